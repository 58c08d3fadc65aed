"""Replay's two fast methods and its general one against a slow walk that decides round by round and token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accept_head import InputError
from accept_head.cost import ForwardCosts, total_time
from accept_head.inference import RowPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policy import Signal
from accept_head.inference.replay import thresholds as module
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import replay_fixed, replay_oracle
from tests.inference.support.made_up import MADE_UP, make_sample, samples, walk
from tests.inference.support.rules_by_hand import (
    COSTLY,
    LAGGING,
    RULES,
    assert_same,
    decider,
    theorem_4_1,
)


def setting_of(draw_thresholds, k_max):
    bounds = st.tuples(st.integers(1, k_max), st.integers(1, k_max)).map(sorted)
    return st.builds(lambda t, b: Setting(threshold=t, k_min=b[0], k_max=b[1]), draw_thresholds, bounds)


THRESHOLDS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0).map(lambda x: round(x, 3)))


# --- the slow walk ---------------------------------------------------------------------------------------------------


@MADE_UP
@given(samples(k_max=8), st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_fixed_lengths_replay_as_the_slow_walk(folder, sample, lengths):
    traces = sample.couple(folder)
    for k, fast in zip(lengths, replay_fixed(traces, lengths), strict=True):
        assert (fast.name, fast.params) == ((f"fixed:{k}", {"k": k}) if k else ("none", {}))
        assert_same(fast, walk(sample, lambda tokens, k=k: (min(k, len(tokens)), 0), 8))


@pytest.mark.parametrize("name", RULES)
@MADE_UP
@given(sample=samples(k_max=7), chosen=st.lists(setting_of(THRESHOLDS, 7), min_size=1, max_size=3))
def test_threshold_rules_replay_as_the_slow_walk_and_as_the_policy_itself_answers(folder, name, sample, chosen):
    traces = sample.couple(folder)
    fast = replay_thresholds(traces, RULES[name](0.5), chosen, name)
    for setting, one in zip(chosen, fast, strict=True):
        bounds = {"k_min": setting.k_min, "k_max": setting.k_max}
        assert_same(one, walk(sample, decider(name, setting.threshold, **bounds), 7))
        assert_same(one, replay(traces, RULES[name](setting.threshold, **bounds), name))
        lag = {"lag": int(name in LAGGING)} if name in LAGGING | COSTLY else {}
        assert one.params == {"threshold": setting.threshold, **bounds, **lag}
        assert one.name == f"{name}:{setting.threshold:g}"


@MADE_UP
@given(samples(k_max=7), st.integers(0, 7))
def test_the_general_replay_of_a_fixed_length_is_the_fast_one(folder, sample, k):
    traces = sample.couple(folder)
    assert_same(replay(traces, FixedPolicy(k), f"fixed:{k}"), replay_fixed(traces, [k])[0])


def test_a_gain_is_not_a_product_and_an_early_one_below_the_level_is_remembered(folder):
    """The chance C_k·β̂_{k+1} may rise again: the round ends at the first that is too small, also when k_min is why it
    did not end there."""
    sample = make_sample(5, responses=30)
    traces, setting = sample.couple(folder), Setting(threshold=0.5, k_min=3, k_max=6)
    scores = score_tokens(traces, RULES["head of both"](0.5))
    assert scores.shape == (len(traces.ids), 2)
    judged = torch.cat([scores, scores.new_zeros(1, 2)])[traces.path]
    gains = judged[..., 0].cumprod(1) * judged[..., 1]
    assert (gains[:, 1:] > gains[:, :-1])[:, :2].any()

    def drafted(statistic):
        kept = (statistic >= 0.5).sum(1) + 1
        return kept.clamp(min=3).minimum(traces.drafts)

    (gain,) = replay_thresholds(traces, RULES["head of both"](0.5), [setting], "head")
    lengths = module.threshold_lengths(traces, RULES["head of both"](0.5), [setting], scores)[:, 0]
    assert torch.equal(lengths, drafted(gains.cummin(1).values).int())
    assert not torch.equal(lengths, drafted(gains).int()), "one that forgets is seen"
    (product,) = replay_thresholds(traces, RULES["head of both by its product"](0.5), [setting], "head")
    assert not np.array_equal(gain.counts, product.counts)


def test_lags_are_told_apart(folder):
    sample = make_sample(5, responses=30)
    traces = sample.couple(folder)
    lags = [
        replay_thresholds(traces, RULES[name](0.5), [Setting(threshold=0.4, k_max=6)], name)[0].counts.sum(0)
        for name in ("head lag 0", "head lag 1")
    ]
    assert lags[0][3] > lags[0][0] - lags[0][2] + lags[0][1] - len(sample.records)  # forwards for nothing
    assert lags[0][1] < lags[1][1] and lags[0][2] > lags[1][2]


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("head")])
@MADE_UP
@given(sample=samples(k_max=7), chosen=st.lists(setting_of(THRESHOLDS, 7), min_size=1, max_size=3))
def test_pruned_scores_change_nothing(folder, name, sample, chosen):
    traces = sample.couple(folder)
    pruned = replay_thresholds(traces, RULES[name](0.5), chosen, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "score_tokens", lambda *arguments, **_: score_tokens(*arguments))
        whole = replay_thresholds(traces, RULES[name](0.5), chosen, name)
    for one, other in zip(pruned, whole, strict=True):
        assert_same(one, other)


def test_pruning_leaves_out_most_tokens_of_a_strict_rule(folder):
    sample = make_sample(5, responses=40, accept=0.4)
    traces = sample.couple(folder)
    policy = RULES["head lag 1"](0.5)
    scored = [int((score_tokens(traces, policy, floor)[traces.positions :] > 0).sum()) for floor in (0.0, 0.9, 1.0)]
    assert scored[0] > 3 * scored[1] > 0 and scored[2] == 0


def test_more_settings_than_walk_together_change_nothing(folder, monkeypatch):
    traces = make_sample(7, responses=8).couple(folder)
    chosen = [Setting(threshold=t, k_max=6) for t in np.linspace(0, 1, 11).tolist()]
    together = replay_thresholds(traces, RULES["confidence"](0.5), chosen, "confidence")
    monkeypatch.setattr(module, "LANES", 3)
    for one, other in zip(replay_thresholds(traces, RULES["confidence"](0.5), chosen, "c"), together, strict=True):
        assert_same(one, other)
        assert one.params == other.params


# --- the oracle ------------------------------------------------------------------------------------------------------


@MADE_UP
@given(samples())
def test_the_oracle_has_the_counts_of_theorem_4_1(folder, sample):
    oracle = replay_oracle(sample.couple(folder))
    assert oracle.counts.tolist() == [theorem_4_1(record) for record in sample.records]
    assert oracle.at_risk.tolist() == oracle.accepted.tolist()


@MADE_UP
@given(samples(), st.integers(0, 1000), st.floats(0.01, 0.99))
def test_no_policy_is_faster_than_the_oracle(folder, sample, seed, ratio):
    random = np.random.default_rng(seed)
    traces = sample.couple(folder)
    costs = ForwardCosts(t_draft=ratio, t_target=1.0)

    def time(counts):
        return total_time(costs, draft_forwards=counts[:, 3], target_forwards=counts[:, 2])

    best = time(replay_oracle(traces).counts)
    for share in (0.1, 0.5, 0.9):
        counts = walk(sample, lambda tokens, n=share: (random.binomial(len(tokens), n), 0), traces.k_max).counts
        assert (time(counts) >= best - 1e-9).all()
    for one in replay_fixed(traces, range(traces.k_max + 1)):
        assert (time(one.counts) >= best - 1e-9).all()


# --- what policies are told ------------------------------------------------------------------------------------------


class Curious(RowPolicy):
    """Asks for everything, and remembers what it is told."""

    needs = frozenset(Signal)
    max_draft_tokens = 4

    def __init__(self):
        self.steps, self.outcomes, self.started = [], [], None

    def start(self, batch, device):
        self.started = batch

    def admit(self, rows, lengths):
        self.admitted = rows.tolist()

    def keep_drafting(self, step):
        self.steps.append(step)
        return step.active

    def observe(self, outcome):
        self.outcomes.append(outcome)


def test_a_policy_is_told_what_the_decode_loop_would_tell_it(folder):
    sample = make_sample(11, responses=6)
    policy = Curious()
    costs = ForwardCosts(t_draft=0.01, t_target=0.1)
    replayed = replay(sample.couple(folder), policy, "curious", costs=costs)
    assert (policy.started, policy.admitted) == (6, list(range(6)))
    walked = walk(sample, lambda tokens: (min(4, len(tokens)), 0), 6)
    assert np.array_equal(replayed.counts, walked.counts)
    first = [sample.round(row, 0, 4) for row in range(6)]
    for step in policy.steps[: max(map(len, first))]:
        for row, tokens in enumerate(first):
            if step.active[row]:
                token = tokens[step.depth - 1]
                assert step.token_ids[row] == token.id
                assert torch.equal(step.fed_hidden[row], token.fed)
                assert step.drawn_hidden is None or torch.equal(step.drawn_hidden[row], token.drawn)
                assert float(step.logprob[row]) == pytest.approx(token.logprob)
                assert float(step.entropy[row]) == pytest.approx(token.entropy)
                assert float(step.max_prob[row]) == pytest.approx(token.max_prob)
            assert bool(step.active[row]) == (step.depth < len(tokens)), "asked only where a token may follow"
    outcome = policy.outcomes[0]
    assert outcome.drafted.tolist() == [len(tokens) for tokens in first]
    assert outcome.seconds == pytest.approx(0.01 * max(map(len, first)) + 0.1)
    for row, record in enumerate(sample.records):
        count = int(outcome.judged[row])
        assert outcome.divergence[row, :count].tolist() == pytest.approx(record["divergence"][:count])
        assert outcome.lengths[row] == len(record["prompt_ids"]) + min(
            int(outcome.accepted[row]) + 1, len(record["response_ids"])
        )
    assert outcome.accepted.tolist() == [sum(t.accepted for t in tokens) for tokens in first]
    assert sum(int(outcome.live.sum()) for outcome in policy.outcomes) == walked.counts[:, 2].sum()


class Incurious(Curious):
    needs = frozenset({Signal.ENTROPY})


def test_a_policy_is_told_nothing_that_it_did_not_ask_for(folder):
    policy = Incurious()
    replay(make_sample(11).couple(folder), policy, "incurious")
    assert policy.outcomes[0].divergence is None
    for step in policy.steps:
        assert step.entropy is not None
        assert step.fed_hidden is step.drawn_hidden is step.logprob is step.max_prob is None


def test_rounds_longer_than_the_rollouts_are_refused_with_both_numbers(folder):
    traces = make_sample(1).couple(folder)
    for ask in (
        lambda: replay_fixed(traces, [3, 7]),
        lambda: replay_thresholds(traces, ConfidencePolicy(), [Setting(threshold=0.5, k_max=7)], "confidence"),
        lambda: replay(traces, FixedPolicy(7), "fixed:7"),
    ):
        with pytest.raises(InputError, match=r"up to 7 tokens.* rounds of 6"):
            ask()


def test_totals_are_sums_over_responses(folder):
    replayed = replay_fixed(make_sample(1).couple(folder), [3])[0]
    total = replayed.total
    assert [total.generated, total.discarded, total.target_forwards, total.draft_forwards] == (
        replayed.counts.sum(0).tolist()
    )
