"""The threshold rules, asked token by token: where they stop, their bounds, and their inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

from accept_head import InputError, Sampling
from accept_head.inference import generate
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import Signal
from tests.inference.support.rounds import one_round
from tests.inference.support.scalar_rules import FirstBelow, product_rule
from tests.inference.support.toy import random_head, toy_pair

HIDDEN = 4


class Scripted(ThresholdPolicy):
    """Its scores are given: step.logprob."""

    needs = reads = frozenset({Signal.LOGPROB})

    def __init__(self, threshold, *, statistic="minimum", k_min=1, k_max=20):
        self.statistic = statistic
        super().__init__("scripted", threshold, k_min, k_max)

    @staticmethod
    def level_of(threshold):
        return threshold

    def score(self, step):
        return step.logprob


def drafted(policy, rows, signal="logprob"):
    """Tokens that each row drafts when its signals are rows[r]."""
    return one_round(policy, [True] * len(rows), {signal: rows})[0].tolist()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(1, 16).map(lambda n: n / 16), min_size=6, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["product", "minimum"]),
    st.integers(0, 32).map(lambda n: n / 32),
    st.integers(1, 4),
    st.integers(4, 9),
)
def test_a_rule_stops_when_its_statistic_is_below_the_level_within_its_bounds(rows, statistic, level, k_min, k_max):
    """Scores are multiples of 1/16: products of six are exact."""
    policy = Scripted(level, statistic=statistic, k_min=k_min, k_max=k_max)
    by_hand = FirstBelow("logprob", float, level, math.prod if statistic == "product" else min, k_min, k_max)
    for _ in range(2):  # nothing is left of a round before
        assert drafted(policy, rows) == [by_hand.drafts({"logprob": scores}, 99) for scores in rows]


def test_the_loop_shows_the_entropy_of_what_it_draws_from():
    """Against scipy, on the distribution that the first token was really drawn from; greedy: the plain softmax."""
    pair, seen = toy_pair(), []

    class Watching(EntropyPolicy):
        def keep_drafting(self, step):
            if step.depth == 1:
                seen.append(float(step.entropy[0]))
            return super().keep_drafting(step)

    for sampling in (Sampling(temperature=2.0, top_k=3), Sampling(temperature=0)):
        seen.clear()
        generate(pair.target, pair.draft, [[1, 2]], policy=Watching(1.0), sampling=sampling, max_new_tokens=3)
        logits = pair.draft(torch.tensor([[1, 2]])).logits[0, -1]
        plain = Sampling(temperature=1.0, top_k=0) if sampling.greedy else sampling
        assert seen[0] == pytest.approx(scipy_entropy(plain.probabilities(logits).numpy()), abs=1e-5)


# --- the head --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def states():
    """(rows, depth, hidden): states[r, 0] is at the last verified token, states[r, k] at Y_k."""
    return torch.randn(3, 8, HIDDEN, generator=torch.Generator().manual_seed(4))


def drafted_by(policy, states):
    return drafted(policy, states, "states")


def first_stop(head, states, threshold, k_min, lag, first):
    """SpecDec++ §4.2 by hand. first: which state judges Y_1."""
    most = states.shape[1] - 1
    probabilities = head.probability(states[:, first:]).tolist()
    return [product_rule(row, threshold, most, k_min=k_min, lag=lag) for row in probabilities]


@pytest.mark.parametrize("k_min", [1, 2, 4])
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8, 0.95])
def test_a_head_stops_by_its_product_at_either_lag(states, threshold, k_min):
    head, before = random_head(HIDDEN), random_head(HIDDEN, reads="before")
    with torch.no_grad():
        for lag in (0, 1):
            policy = HeadPolicy(head, threshold, lag=lag, k_min=k_min)
            assert drafted_by(policy, states) == first_stop(head, states, threshold, k_min, lag, 1)
        policy = HeadPolicy(before, threshold, k_min=k_min)
        assert drafted_by(policy, states) == first_stop(before, states, threshold, k_min, 0, 0)


@pytest.mark.parametrize("k_min", [1, 3])
@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_a_head_that_looks_ahead_stops_by_the_chance_of_the_token_not_yet_drawn(states, threshold, k_min):
    """docs/theory.md §5 by hand: at the first k where C_k·β̂_{k+1} is below 1 − threshold, or at k_min after that."""
    head, stopped, by_product = random_head(HIDDEN, predicts="both"), [], []
    with torch.no_grad():
        both = head(states[:, 1:]).sigmoid()
        for row in both:
            gains = [float(row[:k, 0].prod() * row[k - 1, 1]) for k in range(1, len(row))]
            first = next((k for k, gain in enumerate(gains, 1) if gain < 1 - threshold), len(row))
            stopped.append(min(max(first, k_min), len(row)))
        for lag in (0, 1):
            policy = HeadPolicy(head, threshold, lag=lag, k_min=k_min)
            late = [min(max(k + lag, k_min), 7) if k < 7 else 7 for k in stopped] if k_min == 1 else None
            counts = drafted_by(policy, states)
            assert counts == (late if late and lag else stopped if not lag else counts)
            for judged, (probability, following) in enumerate(
                zip(policy.predicted, policy.predicted_next, strict=True)
            ):
                torch.testing.assert_close(torch.stack([probability, following], -1), both[:, judged])
        policy = HeadPolicy(head, threshold, lag=0, k_min=k_min, rule="product")
        by_product = drafted_by(policy, states)
        assert by_product == first_stop(head, states, threshold, k_min, 0, 1)
        assert not policy.predicts_next and not policy.predicted_next
    assert threshold < 0.6 or k_min == 3 or by_product != stopped, "the two rules are told apart"


def test_a_rule_that_the_head_cannot_follow_is_refused():
    blind = random_head(HIDDEN, reads="before", predicts="both")  # knows nothing of Y, hence not what follows it
    assert not HeadPolicy(blind, 0.5).predicts_next
    for head in (blind, random_head(HIDDEN)):
        with pytest.raises(InputError, match="rule is gain"):
            HeadPolicy(head, 0.5, rule="gain")
    with pytest.raises(InputError, match="'most', expected product or gain"):
        HeadPolicy(random_head(HIDDEN, predicts="both"), 0.5, rule="most")
    with pytest.raises(InputError, match="'token' was asked for"):
        HeadPolicy(random_head(HIDDEN, predicts="next"), 0.5)


def test_a_lag_drafts_two_tokens_at_least_and_asks_for_no_state_at_a_drawn_token(states):
    head = random_head(HIDDEN)
    with torch.no_grad():
        late, at_once = HeadPolicy(head, 0.0, lag=1), HeadPolicy(head, 0.0, lag=0)
        assert drafted_by(late, states) == [2, 2, 2] and not Drafting(late).looks_ahead
        assert drafted_by(at_once, states) == [1, 1, 1] and Drafting(at_once).looks_ahead


def test_what_a_policy_reads_and_what_it_needs():
    """With a lag the state at the token before is the one that this token was drawn from."""
    drawn, before = random_head(HIDDEN), random_head(HIDDEN, reads="before", signals=True)
    of_q = {Signal.LOGPROB, Signal.ENTROPY, Signal.MAX_PROB}
    for policy, reads, needs in (
        (HeadPolicy(drawn, 0.5, lag=0), {Signal.DRAWN_HIDDEN}, {Signal.DRAWN_HIDDEN}),
        (HeadPolicy(drawn, 0.5, lag=1), {Signal.DRAWN_HIDDEN}, {Signal.FED_HIDDEN}),
        (HeadPolicy(before, 0.5), {Signal.FED_HIDDEN, *of_q}, {Signal.FED_HIDDEN, *of_q}),
        (EntropyPolicy(0.5), {Signal.ENTROPY}, {Signal.ENTROPY}),
        (ConfidencePolicy(0.5), {Signal.LOGPROB}, {Signal.LOGPROB}),
    ):
        assert (policy.reads, policy.needs) == (reads, needs)
