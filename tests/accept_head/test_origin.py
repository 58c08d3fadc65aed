"""A head that is used differently from its training: what is refused, what gives a warning, and how often."""

import json
from dataclasses import replace

import pytest
import torch

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.head import origin
from accept_head.head.network import AcceptanceHead
from accept_head.head.origin import Checkpoint, HeadOrigin
from accept_head.head.saved import save_head
from accept_head.head_config import HeadConfig
from accept_head.inference import generate
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policies.spec import DraftShape
from accept_head.sampling import Sampling
from tests.examples import QUALITY, TRACES

SAMPLED = Sampling(temperature=1.0, top_k=0)


@pytest.fixture
def said(caplog):
    """What has been said so far in this test, a line each."""
    origin._say_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.name == "accept_head"]


@pytest.fixture
def head(tmp_path, random_pair_folder):
    """A head whose folder records the random pair; head(**changes) of what it records."""

    def make(tuned=None, **changes):
        traces = replace(
            TRACES,
            target_fingerprint=checkpoint_fingerprint(random_pair_folder / "target"),
            draft_fingerprint=checkpoint_fingerprint(random_pair_folder / "draft"),
            vocab_size=261,
            sampling=SAMPLED,
            dtype="float32",
        )
        folder = tmp_path / "head"
        metrics, config = {"dev": {"token": QUALITY}}, HeadConfig(hidden_size=16, depth=1)
        save_head(AcceptanceHead(config), folder, metrics=metrics, training={}, traces=replace(traces, **changes))
        if tuned:
            values = {"threshold": 0.5, "traces": {"sampling": tuned.to_dict()}}
            (folder / "decoding.json").write_text(json.dumps(values))
        return folder

    return make


def decode(pair, folder, sampling, spec="head:{}:0.5"):
    prompts = [[1, 7, 8], [1, 9]]
    options = {"policy": spec.format(folder), "sampling": sampling, "max_new_tokens": 4}
    return generate(pair.target, pair.draft, prompts, **options)


def test_a_head_used_as_it_was_trained_says_nothing(head, random_pair, said):
    decode(random_pair, head(), SAMPLED)
    assert said() == []


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (Sampling(temperature=0), "greedy decoding"),
        (Sampling(temperature=0.6, top_k=0), "temperature 0.6"),
        (Sampling(temperature=1.0, top_k=50), "top_k 50"),
    ],
)
def test_other_sampling_is_said_once_with_both_settings(head, random_pair, said, now, named):
    folder = head()
    for _ in range(2):
        tokens, _ = decode(random_pair, folder, now)
    (line,) = said()
    assert str(folder) in line and "temperature 1, top_k 0" in line and named in line and "\n" not in line
    assert all(len(row) for row in tokens)


def test_two_greedy_settings_are_the_same_setting(head, random_pair, said):
    decode(random_pair, head(sampling=Sampling(temperature=0, top_k=50)), Sampling(temperature=0, top_k=0))
    assert said() == []


def test_a_tuned_threshold_is_for_the_sampling_that_it_was_tuned_for(head, random_pair, said):
    folder = head(tuned=Sampling(temperature=0))
    decode(random_pair, folder, Sampling(temperature=0), "head:{}")
    assert said() == []
    decode(random_pair, folder, Sampling(temperature=0))  # the threshold is the user's now, the head is for SAMPLED
    assert len(said()) == 1


@pytest.mark.parametrize("role", ["draft", "target"])
def test_another_model_of_the_same_shape_is_said(head, random_pair, said, role):
    folder = head(**{f"{role}_fingerprint": "0123456789abcdef", role: "someone/else"})
    decode(random_pair, folder, SAMPLED)
    (line,) = said()
    assert f"trained with the {role} someone/else (01234567)" in line and str(random_pair.draft.name_or_path) != line
    assert getattr(random_pair, role).name_or_path in line


def test_a_wrapped_policy_says_it_too(head, random_pair, said):
    decode(random_pair, head(), Sampling(temperature=0), "head:{}:0.5,costs=0.2")
    assert len(said()) == 1


def test_another_dtype_is_said(head, said):
    folder = head()
    make_policy(f"head:{folder}:0.5", DraftShape(16, torch.device("cpu"), dtype="float32"))
    assert said() == []
    make_policy(f"head:{folder}:0.5", DraftShape(16, torch.device("cpu"), dtype="bfloat16"))
    (line,) = said()
    assert "float32" in line and "bfloat16" in line


def test_fewer_token_ids_than_recorded_are_refused_and_more_are_padding(head, random_pair):
    folder = head()
    with pytest.raises(InputError, match="261 token ids, but this one has 260"):
        make_policy(f"head:{folder}:0.5", DraftShape(16, torch.device("cpu"), torch.zeros(260, 16)))
    make_policy(f"head:{folder}:0.5", DraftShape(16, torch.device("cpu"), torch.zeros(264, 16)))


def test_vllm_knows_the_mode_beforehand(head, said):
    folder = head()
    origin = HeadOrigin.read(str(folder), folder)
    origin.check_mode(greedy=False)
    assert said() == []
    origin.check_mode(greedy=True)
    assert "temperature 1" in said()[0] and "likeliest" in said()[0]
    HeadOrigin(str(folder), {}, {"temperature": 0}).check_mode(greedy=False)
    assert "greedy decoding, but samples drafts of requests with a temperature" in said()[-1]


def test_what_is_not_known_is_not_said(tmp_path, random_pair, said):
    AcceptanceHead(HeadConfig(hidden_size=16, depth=1)).save_pretrained(tmp_path / "plain")
    decode(random_pair, tmp_path / "plain", Sampling(temperature=0))
    (tmp_path / "plain" / "trace_config.json").write_text(
        '{"sampling": [1], "draft_fingerprint": 3, "vocab_size": "x"}'
    )
    decode(random_pair, tmp_path / "plain", Sampling(temperature=0))
    origin = HeadOrigin("it", {"draft_fingerprint": "0123456789"}, {})
    origin.check_draft(Checkpoint("nobody/has-this"), None, None)
    assert said() == []
