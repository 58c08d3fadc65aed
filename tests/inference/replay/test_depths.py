"""Traces of an EAGLE-3 drafter, whose tokens depend on where a round began: their tables; replay against decoding."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from accept_head import Sampling, load_pair
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.cli import main
from accept_head.cost import ForwardCosts
from accept_head.eagle3.saved import save_eagle3
from accept_head.errors import InputError
from accept_head.inference import generate
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay import depths as module
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.calibration import rounds_of
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.coupled import load_coupled
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.truth import informed_tables
from accept_head.inference.replay.walk import replay_fixed, replay_oracle, round_starts
from accept_head.inference.report.calibration import calibrate_depths
from accept_head.inference.report.rounds import view_responses
from accept_head.prompts import load_prompts
from accept_head.signals import SIGNALS
from accept_head.training.collect.score import score_positions
from accept_head.training.collect.verb import collect
from tests.examples import make_eagle3
from tests.inference.support.held_out import Z_LIMIT, z_scores
from tests.inference.support.toy import random_head

DEPTHS, TOKENS = 5, 24
# Untrained models agree often where both are unsure.
SAMPLED, GREEDY = Sampling(temperature=8.0, top_k=0), Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(random_llama, byte_tokenizer, random_pair_folder, tmp_path_factory):
    """A target with its drafter."""
    folder, target = tmp_path_factory.mktemp("eagle3"), random_llama(1, layers=4)
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    save_eagle3(make_eagle3(target, draft_vocabulary=200), folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def pair(folder):
    return load_pair(folder / "target", folder / "drafter", device="cpu")


@pytest.fixture(scope="module")
def prompts(pair, random_pair_folder):
    path = str(random_pair_folder / "prompts" / "train.jsonl")
    return [list(prompt.ids) for prompt in load_prompts(path, pair.tokenizer)]


@pytest.fixture(scope="module")
def collected(folder, random_pair_folder):
    made = {}

    def make(sampling, depths=DEPTHS, out=None):
        if sampling not in made or out:
            out = out or folder / f"traces-{sampling.temperature:g}-{sampling.top_k}"
            collect(
                str(folder / "target"), str(folder / "drafter"), str(out), depths=depths, max_new_tokens=TOKENS,
                prompts=str(random_pair_folder / "prompts" / "train.jsonl"), shard_size=8, batch_size=4, seed=5,
                **sampling.to_dict(),
            )  # fmt: skip
            made[sampling] = out
        return made[sampling]

    return make


@pytest.fixture(scope="module")
def traces(collected, folder, pair):
    def load(sampling):
        return load_coupled(collected(sampling), pair.draft, checkpoint_fingerprint(folder / "drafter"))

    return load


@pytest.fixture
def random_head_folder(tmp_path):
    """A head that reads the drafter's state and its signals."""
    random_head(32, signals=True, reads="before", std=0.1).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


@torch.no_grad()
def last_state(pair, known, fed):
    """The state after a round that began with the tokens `known` and was fed these of its own, without a cache."""
    drafter, states = pair.draft, None
    streams = pair.target(torch.tensor([known]), output_hidden_states=True).hidden_states
    states = drafter.project(torch.cat([streams[number][0, :-1] for number in drafter.layers_read], dim=-1))
    ids = torch.tensor([*known[1:], *fed])
    for slots in range(len(known) - 1, len(ids) + 1):
        output = drafter(ids[None, :slots], states[None], torch.arange(slots)[None])
        states = torch.cat([states, output.own[0, -1:]])
    return output.hidden[0, -1]


def check_states(pair, traces, prompts):
    """Each token's state is that of a round from its start."""
    fed = torch.cat([part for _, _, part, _ in traces.hidden()])
    for row in range(0, len(prompts), 3):
        response = traces.traces["response_ids"][row]
        for start in range(0, len(response), 5):
            for depth in range(min(DEPTHS, len(response) - start)):
                here = traces.tokens_of(traces.starts[row] + start, torch.tensor(depth))
                known, own = [*prompts[row], *response[:start]], response[start : start + depth]
                assert torch.allclose(fed[here], last_state(pair, known, own), atol=1e-4), (row, start, depth)


def test_the_state_of_each_depth_is_that_of_a_round_from_its_start(pair, traces, prompts):
    check_states(pair, traces(SAMPLED), prompts)


@torch.no_grad()
def scored_over_all_ids(pair, traces, prompts, row, sampling):
    """name → (n, depths) by `score_positions`, from the states that were kept."""
    response = torch.tensor(traces.traces["response_ids"][row])
    text = torch.tensor([[*prompts[row], *response.tolist()]])
    logits = pair.target(text).logits[0, len(prompts[row]) - 1 : -1, : pair.vocab_size]
    first = int(traces.starts[row]) * DEPTHS
    states = torch.cat([part for _, _, part, _ in traces.hidden()])[first : first + len(response) * DEPTHS]
    scores = pair.draft.spread(pair.draft.lm_head(states.view(-1, DEPTHS, states.shape[-1])))[..., : pair.vocab_size]
    counters = torch.stack([torch.full_like(response, row), torch.arange(len(response))], dim=-1)
    parts = [score_positions(logits, scores[:, depth], response, counters, sampling, seed=5) for depth in range(DEPTHS)]
    return {name: torch.stack([part[name] for part in parts], dim=-1) for name in parts[0]}


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, Sampling(temperature=8.0, top_k=40)])
def test_columns_are_those_of_the_whole_vocabulary(pair, traces, prompts, sampling):
    """The drafter's tokens are scored among the ids that it has; those of the response may be others."""
    made, others = traces(sampling), 0
    for row in range(0, len(prompts), 3):
        expected, record = scored_over_all_ids(pair, made, prompts, row, sampling), made.traces[row]
        others += sum(not pair.draft.t2d[token] for token in record["response_ids"])
        assert record["target_logprob"] == pytest.approx(expected["target_logprob"][:, 0].tolist(), abs=1e-4)
        for name in ("draft_ids", "accepted"):
            assert record[name] == expected[name].flatten().tolist(), name
        for name in ("acceptance", "overlap", *SIGNALS):
            assert record[name] == pytest.approx(expected[name].flatten().tolist(), abs=1e-4), name
    assert others > 5


COUNTED = [
    "fixed:3",
    f"fixed:{DEPTHS}",
    f"confidence:0.1,k_max={DEPTHS}",
    f"max-prob:0.2,k_max={DEPTHS}",
    "adaedl:0.3,k_max=5",
]


def replayed(traces, spec, draft):
    policy = make_policy(spec, draft)
    if spec.startswith("fixed"):
        return replay_fixed(traces, [policy.max_draft_tokens])[0].counts
    if isinstance(policy, ThresholdPolicy):
        setting = Setting(threshold=policy.threshold, k_min=policy.k_min, k_max=policy.max_draft_tokens)
        fast = replay_thresholds(traces, policy, [setting], "rule")[0].counts
        assert np.array_equal(fast, replay(traces, policy, "asked", batch=1).counts)
        return fast
    return replay(traces, policy, spec, batch=1).counts


def counted(pair, prompts, spec, sampling, seed=0):
    stats = generate(
        pair.target, pair.draft, prompts, policy=spec, sampling=sampling, max_new_tokens=TOKENS, batch_size=1, seed=seed
    ).stats
    return np.array([[s.generated, s.discarded, s.rounds, s.draft_forwards] for s in stats], dtype=float)


@pytest.mark.parametrize(
    "spec",
    # A threshold on max q is replayed as one on the chance of the drawn token is.
    [
        pytest.param(spec, marks=pytest.mark.slow) if spec == "fixed:3" or "max-prob" in spec else spec
        for spec in COUNTED
    ],
)
def test_greedy_counts_are_those_of_the_loop(pair, traces, prompts, spec):
    assert np.array_equal(replayed(traces(GREEDY), spec, pair.draft), counted(pair, prompts, spec, GREEDY))


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if "confidence" in spec else pytest.mark.slow) for spec in COUNTED]
)
def test_sampled_rates_are_those_of_the_loop(pair, traces, prompts, spec):
    """|z| > 3.89 fails, a false alarm in 10,000."""
    decoded = np.concatenate([counted(pair, prompts, spec, SAMPLED, seed) for seed in range(4)])
    assert max(map(abs, z_scores(replayed(traces(SAMPLED), spec, pair.draft), decoded))) < Z_LIMIT


def test_a_round_that_takes_its_tokens_from_another_depth_shows(pair, traces, prompts, monkeypatch):
    """The same comparison with rounds that stay at depth 1, as those of a draft model do."""
    made = traces(SAMPLED)
    monkeypatch.setattr(type(made), "following", property(lambda self: self.depths))
    with pytest.raises(AssertionError):
        check_states(pair, made, prompts)


def test_rollouts_are_drawn_from_the_rounds_own_states(pair, traces, prompts):
    made = traces(SAMPLED)
    hidden = torch.cat([part for *_, part in made.hidden()])
    checked = [0] * DEPTHS
    for number, token in enumerate(made.rejected.tolist()):
        position, depth = divmod(token, DEPTHS)
        if int(made.rollout_lengths[number]) == 0 or checked[depth] == 10:
            continue
        row = int((made.starts <= position).sum()) - 1
        start, response = position - depth - int(made.starts[row]), made.traces["response_ids"][row]
        own = [*response[start : start + depth], int(made.ids[token])]
        expected = last_state(pair, [*prompts[row], *response[:start]], own)
        assert torch.allclose(expected, hidden[number, 0], atol=1e-4), (row, start, depth)
        checked[depth] += 1
    assert min(checked[: DEPTHS - 1]) >= 5, checked


def test_greedy_counts_of_a_trained_drafter_are_those_of_the_loop(embedded_pair_folder, tmp_path):
    """Rounds of accepted tokens, of several depths."""
    prompts = embedded_pair_folder / "prompts" / "test.jsonl"
    models = embedded_pair_folder / "target", embedded_pair_folder / "eagle3"
    collect(
        *map(str, models), str(tmp_path / "traces"), str(prompts), depths=6, max_new_tokens=TOKENS, temperature=0.0,
        max_prompts=10, batch_size=10,
    )  # fmt: skip
    pair = load_pair(*models, device="cpu")
    traces = load_coupled(tmp_path / "traces", pair.draft, checkpoint_fingerprint(models[1]))
    ids = [list(prompt.ids) for prompt in load_prompts(str(prompts), pair.tokenizer, max_prompts=10)]
    assert (traces.leading >= 3).sum() > 5
    for spec in ("fixed:4", "confidence:0.2,k_max=6"):
        assert np.array_equal(replayed(traces, spec, pair.draft), counted(pair, ids, spec, GREEDY)), spec


def test_the_oracle_stops_before_each_rejection_of_its_own_rounds(traces):
    """Against a plain loop over the table of starts and depths."""
    made = traces(SAMPLED)
    expected = []
    for accepted in made.traces["accepted"]:
        table = np.array(accepted).reshape(-1, DEPTHS)
        place, rounds, forwards = 0, 0, 0
        while place < len(table):
            room = min(DEPTHS, len(table) - place - 1)  # the last token needs no draft
            length = next((d for d in range(room) if not table[place + d, d]), room)
            place, rounds, forwards = place + length + 1, rounds + 1, forwards + length
        expected.append((len(table), 0, rounds, forwards))
    assert np.array_equal(replay_oracle(made).counts, expected)


# --- the informed bound ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(collected, folder):
    """A copy of the sampled traces, to which tables are added."""
    return shutil.copytree(collected(SAMPLED), folder / "asked")


@pytest.fixture(scope="module")
def truth(asked, folder, pair):
    made = load_coupled(asked, pair.draft, checkpoint_fingerprint(folder / "drafter"))
    return informed_tables(made, pair.draft, lambda: pair.target)


@torch.no_grad()
def distributions(pair, known, fed):
    """(p, q) after a round that began with the tokens `known` and was fed these of its own, without a cache."""
    logits = pair.target(torch.tensor([[*known, *fed]])).logits[0, -1]
    scores = pair.draft.spread(pair.draft.lm_head(last_state(pair, known, fed)))
    return SAMPLED.probabilities(logits[: pair.vocab_size]), SAMPLED.probabilities(scores[: pair.vocab_size])


def largest_difference(pair, traces, prompts, truth):
    """Between the tables and a plain loop, over every 40th rollout."""
    off = {name: getattr(truth, name)[traces.of_responses :].view(-1, DEPTHS - 1) for name in ("acceptance", "overlap")}
    ids = traces.ids[traces.of_responses :].view(-1, DEPTHS - 1)
    found, depths = [], set()
    for number in range(0, len(traces.rejected), 40):
        position, depth = divmod(int(traces.rejected[number]), DEPTHS)
        row = int((traces.starts <= position).sum()) - 1
        start, response = position - depth - int(traces.starts[row]), traces.traces["response_ids"][row]
        own = [*response[start : start + depth], int(traces.ids[traces.rejected[number]])]
        for place in range(int(traces.rollout_lengths[number])):
            p, q = distributions(pair, [*prompts[row], *response[:start]], own)
            token = int(ids[number, place])
            found.append(abs(min(1, float(p[token] / q[token])) - off["acceptance"][number, place]))
            found.append(abs(float(torch.minimum(p, q).sum()) - off["overlap"][number, place]))
            own.append(token)
            depths.add((depth, place))
    assert len(depths) >= 8
    return float(max(found))


def test_what_the_target_says_of_rollouts_is_that_of_a_plain_loop(pair, traces, prompts, truth):
    made = traces(SAMPLED)
    assert largest_difference(pair, made, prompts, truth) < 1e-4
    moved = replace(truth, overlap=truth.overlap.roll(1))
    assert largest_difference(pair, made, prompts, moved) > 1e-2


def test_the_informed_bound_lies_between_the_best_fixed_length_and_the_oracle(traces, truth):
    """On the tokens of the responses, its tables are the traces' own."""
    made, costs = traces(SAMPLED), ForwardCosts(t_draft=0.2, t_target=1.0)
    labels = np.concatenate(made.traces.with_format("numpy")["acceptance"][:])
    assert np.array_equal(truth.acceptance[: made.of_responses], labels)
    policies = [*replay_fixed(made, range(1, DEPTHS + 1)), replay_informed(made, truth, costs), replay_oracle(made)]
    *fixed, informed, oracle = (float(throughputs(one.counts.sum(0), costs)) for one in policies)
    assert max(fixed) < informed < oracle


def test_tune_and_report_show_the_informed_bound(collected, folder, tmp_path):
    """The drafter has no embeddings of its own, and only its traces are read, here of another dtype."""
    out, target = tmp_path / "tuned.json", ("--target", folder / "target")
    asked = shutil.copytree(collected(SAMPLED), tmp_path / "asked")  # without tables
    assert tuned(folder, asked, out, "--rules", "max-prob", *target, "--dtype", "bfloat16") == 0
    assert "informed" in {row["name"] for row in json.loads(out.read_text())["policies"]}
    paths = ("--traces", asked, "--draft", folder / "drafter", "--out", tmp_path / "report.html")
    assert main([*map(str, ("report", *paths, *target, "--t_draft", 0.05, "--t_target", 1, "--responses", 0))]) == 0
    assert "informed bound" in (tmp_path / "report.html").read_text()


# --- tune and report -------------------------------------------------------------------------------------------------


def tuned(folder, traces, out, *words):
    paths = ("--traces", traces, "--draft", folder / "drafter", "--out", out)
    return main([*map(str, ("tune", *paths, "--t_draft", 0.05, "--t_target", 1, *words))])


def test_tune_compares_rules_on_such_traces(collected, folder, tmp_path, random_head_folder):
    out = tmp_path / "tuned.json"
    assert tuned(folder, collected(SAMPLED), out, "--head", random_head_folder, "--rules", "max-prob", "adaedl") == 0
    rows = {row["name"].partition(":")[0]: row for row in json.loads(out.read_text())["policies"]}
    assert {"none", "fixed", "head", "max-prob", "adaedl", "oracle"} == set(rows)
    assert rows["fixed"]["params"]["k"] == DEPTHS and rows["max-prob"]["params"]["k_max"] in (4, 5)


def test_tune_refuses_rounds_longer_than_the_depths(collected, folder, tmp_path, capsys):
    assert tuned(folder, collected(SAMPLED), tmp_path / "tuned.json", "--k_max", 20) == 2
    assert "k_max" in capsys.readouterr().err


def test_a_report_shows_such_traces(collected, folder, tmp_path, random_head_folder):
    out = tmp_path / "report.html"
    paths = ("--traces", collected(SAMPLED), "--draft", folder / "drafter", "--head", random_head_folder, "--out", out)
    assert main([*map(str, ("report", *paths, "--t_draft", 0.05, "--t_target", 1, "--responses", 2))]) == 0
    assert f"fixed:{DEPTHS}" in out.read_text() and f"fixed:{DEPTHS + 1}" not in out.read_text()


def test_viewed_rounds_and_calibration_take_each_token_at_its_depth(traces, pair):
    made = traces(SAMPLED)
    responses = view_responses(made, range(4), "fixed", made.drafts, pair.tokenizer)
    for number, viewed in enumerate(responses):
        record, position = made.traces[number], 0
        for shown in viewed.rounds:
            accepted = sum(token.status == "accepted" for token in shown.drafted)
            for depth, token in enumerate(shown.drafted[: accepted + 1]):
                here = (position + depth) * DEPTHS + depth
                assert token.acceptance == record["acceptance"][here]
                assert token.draft_probability == pytest.approx(np.exp(record["draft_logprob"][here]), rel=1e-5)
            position += accepted + 1
    labels = np.concatenate(made.traces.with_format("numpy")["acceptance"][:])
    told = torch.from_numpy(labels).double()
    assert all(curve.ece < 1e-6 for curve in calibrate_depths(made, "head", torch.cat([told, told])))


def test_rounds_to_calibrate_on_take_each_token_at_its_depth(traces):
    made = traces(SAMPLED)
    rounds = rounds_of(made, HeadPolicy(random_head(32, signals=True, reads="before", std=0.1), 0.5))
    labels = np.concatenate(made.traces.with_format("numpy")["acceptance"][:])
    starts = round_starts(made, made.drafts).numpy()
    row, depth = np.nonzero(rounds.at_risk)
    assert depth.max() > 0
    assert np.allclose(rounds.acceptance[row, depth], labels[(starts[row] + depth) * DEPTHS + depth])


# --- what is refused, and what is kept -------------------------------------------------------------------------------


def test_a_finished_folder_is_left_as_it_is(collected):
    out = collected(SAMPLED)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    collected(SAMPLED, out=out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert len(list(out.glob("rollouts/*.safetensors"))) == 3


def test_a_missing_rollout_file_is_named(collected, folder, pair, tmp_path):
    copy = shutil.copytree(collected(SAMPLED), tmp_path / "traces")
    (copy / "rollouts" / "shard-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"shard-00001.safetensors: is missing"):
        load_coupled(copy, pair.draft, checkpoint_fingerprint(folder / "drafter"))


def test_traces_of_other_depths_are_not_continued(collected):
    with pytest.raises(InputError, match="another depths"):
        collected(SAMPLED, depths=4, out=collected(SAMPLED))


def test_leading_accepted_goes_down_the_depths():
    accepted = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    assert module.leading_accepted(accepted, torch.full((4,), 3)).tolist() == [3, 2, 0, 1]
    assert module.leading_accepted(accepted, torch.full((4,), 1)).tolist() == [2, 1, 0, 0]
