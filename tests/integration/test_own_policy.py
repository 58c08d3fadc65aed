"""The policy that docs/policies.md shows, as it stands there: in the loop, in the enumeration, and in replay."""

from __future__ import annotations

import re

import pytest
import torch

from accept_head import Sampling
from accept_head.inference import generate
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.coupled import load_coupled
from accept_head.inference.replay.lossless import Shape, enumerate_rounds
from accept_head.pair import checkpoint_fingerprint


@pytest.fixture
def my_policy(repository):
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "docs" / "policies.md").read_text("utf-8"), re.DOTALL)
    assert len(code[code.index("class ") :].strip().splitlines()) <= 15
    names = {}
    exec(compile(code, "docs/policies.md", "exec"), names)
    return names["MyPolicy"]


def test_it_decodes_what_the_target_would_say(my_policy, embedded_pair):
    prompts = embedded_pair.tokenizer(["Once upon a time", "def main():", "2 + 2 ="])["input_ids"]
    models = (embedded_pair.target, embedded_pair.draft)
    plain, _ = generate(*models, prompts, policy="none", max_new_tokens=24)
    tokens, stats = generate(*models, prompts, policy=my_policy(), max_new_tokens=24)
    for expected, found in zip(plain, tokens, strict=True):
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found))
    assert sum(each.accepted for each in stats) > 0
    most = my_policy.max_draft_tokens
    assert any(0 < each.drafted < most * each.rounds for each in stats), "it must have stopped by itself"
    sampled, _ = generate(*models, prompts, policy=my_policy(), sampling=Sampling(temperature=1.0), max_new_tokens=24)
    assert len(sampled) == 3


def test_it_is_lossless(my_policy):
    found = enumerate_rounds(my_policy, pairs=20, shape=Shape(vocab=3, depth=3, rows=2))
    assert found.ratio.max() < 1e-6 and found.match.max() < 1e-6
    assert len(found.submitted) > 1, "it must have stopped at several lengths"


def test_it_can_be_replayed(my_policy, random_traces_folder, random_pair, random_pair_folder):
    fingerprint = checkpoint_fingerprint(random_pair_folder / "draft")
    traces = load_coupled(random_traces_folder, random_pair.draft, fingerprint, k_max=my_policy.max_draft_tokens)
    found = replay(traces, my_policy(), "mine", batch=4)
    generated, _, target_forwards, draft_forwards = found.counts.sum(0)
    assert generated == traces.positions and 0 < target_forwards < generated and draft_forwards > 0
    assert len(found.draft_lengths.nonzero()[0]) > 1, "it must have stopped at several lengths"
