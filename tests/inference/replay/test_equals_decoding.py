"""Replay predicts the counts of the real decode loop: the same policy object, the same held-out prompts.

At T = 0, on the same responses, each response's counts are equal. At T = 1 both are samples: z = difference /
√(se² + se²) with standard errors over prompts. |z| > 3.89 fails, a false alarm in 10,000 for each comparison (fewer,
because both have the same prompts). Most must lie in the joint 95 % interval.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from accept_head.cost import BatchForwardCost, PairCosts
from accept_head.inference import RowPolicy
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policies.leviathan import LeviathanPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy, MeanMaxProbPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.signals import OnlineSignalsPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import replay_fixed
from accept_head.prompts import load_prompts
from tests.inference.support.held_out import (
    GREEDY,
    K_MAX,
    NEWLINE,
    PERIOD,
    ROWS,
    SAMPLED,
    Z_95,
    Z_LIMIT,
    Held,
    head,
    z_scores,
)


class Cautious(RowPolicy):
    """Drafts one token more than were accepted last time: it remembers rows from round to round."""

    max_draft_tokens = 6

    def start(self, batch, device):
        self.next = torch.zeros(batch, dtype=torch.long, device=device)

    def admit(self, rows, lengths):
        self.next[rows] = 3

    def select(self, rows):
        self.next = self.next[rows]

    def start_round(self, live):
        return self.next.clone()

    def observe(self, outcome):
        self.next = torch.where(outcome.live, (outcome.accepted + 1).clamp(max=6), self.next)


POLICIES = {
    "none": lambda: FixedPolicy(0),
    "fixed:5": lambda: FixedPolicy(5),
    "confidence:0.15": lambda: ConfidencePolicy(0.15, k_max=K_MAX),
    "entropy:1.2, k_min 2": lambda: EntropyPolicy(1.2, k_min=2, k_max=K_MAX),
    "head lag 1, 0.5": lambda: HeadPolicy(head(signals=True), 0.5, k_max=K_MAX),
    "head lag 0, 0.5": lambda: HeadPolicy(head(signals=True), 0.5, lag=0, k_max=K_MAX),
    "head with embedding, 0.5": lambda: HeadPolicy(
        head(reads="before", signals=True, width=48, embedding=True), 0.5, k_max=K_MAX
    ),
    "head with a base, 0.5": lambda: HeadPolicy(head(base=True, width=48, embedding=True), 0.5, k_max=K_MAX),
    "head of both with a base, 0.5": lambda: HeadPolicy(head(base=True, width=48, predicts="both"), 0.5, k_max=K_MAX),
    "base alone, 0.5": lambda: HeadPolicy(head(base=True), 0.5, k_max=K_MAX),
    "head of both lag 1, 0.7": lambda: HeadPolicy(head(predicts="both"), 0.7, k_min=3, k_max=K_MAX),
    "cautious": Cautious,
    "adaedl:0.5": lambda: AdaEdlPolicy(0.5, k_max=K_MAX),
    "max-prob:0.5": lambda: MaxProbPolicy(0.5, k_max=K_MAX),
    "leviathan": lambda: LeviathanPolicy(0.1, k_max=K_MAX),
    "hf-heuristic": lambda: HfHeuristicPolicy(5, k_max=K_MAX),
}


def online_head():
    policy = RecalibratedHeadPolicy(head(reads="before", signals=True), 0.5, k_max=K_MAX, online=True)
    policy.recalibration.INTERVAL = 4  # there are few rounds
    return policy


def forward(beta, gamma):
    return BatchForwardCost(alpha=1e-5, beta=beta, gamma=gamma, r_squared=1.0)


# Drafts are cheap and long; verifying a token more is dear enough to drop the doubtful ones.
COSTS = PairCosts(draft=forward(0.001, 0.01), target=forward(0.02, 0.4))
# What a row drafts depends on the rows around it, or on what all rows have seen.
OF_THE_BATCH = {
    "max-prob-mean": lambda: MeanMaxProbPolicy(0.5, k_max=K_MAX),
    "hf-confidence": lambda: HfConfidencePolicy(0.3, k_max=K_MAX),
    "online-logistic": lambda: OnlineLogisticPolicy(0.5, k_max=K_MAX),
    "online-signals": lambda: OnlineSignalsPolicy(0.5, k_max=K_MAX),
    "online head": online_head,
    "dsde": lambda: DsdePolicy(4, k_max=K_MAX, calibration=3),
    "batch-map": lambda: BatchMapPolicy([(1, 4, 6), (5, 12, 3), (13, 16, 1)]),
    "goodput": lambda: GoodputPolicy(COSTS),
    "adaspec": lambda: AdaSpecPolicy(COSTS),
    "budget": lambda: BudgetPolicy(COSTS),
}
SLOW_OF_THE_BATCH = ("max-prob-mean", "hf-confidence", "adaspec", "dsde")


def replayed(traces, policy):
    """By the fast way, if it has one."""
    if isinstance(policy, FixedPolicy):
        return replay_fixed(traces, [policy.max_draft_tokens])[0].counts
    if not isinstance(policy, ThresholdPolicy):
        return replay(traces, policy, "any").counts
    setting = Setting(threshold=policy.threshold, k_min=policy.k_min, k_max=policy.max_draft_tokens)
    return replay_thresholds(traces, policy, [setting], "rule")[0].counts


@pytest.fixture(scope="module")
def held_out(embedded_pair, embedded_pair_folder, tmp_path_factory):
    """held_out(sampling, ends, prompts, new_tokens, most) → Held, made once. most: tokens kept of a prompt."""
    path = str(embedded_pair_folder / "prompts" / "test.jsonl")

    @cache
    def make(sampling, ends, count, new_tokens, most=None):
        prompts = [list(prompt.ids[:most]) for prompt in load_prompts(path, embedded_pair.tokenizer, max_prompts=count)]
        folder = tmp_path_factory.mktemp("held-out") / "traces"
        return Held(embedded_pair, prompts, folder, sampling, list(ends), new_tokens)

    return make


@pytest.fixture(scope="module")
def decoded():
    """decoded(held, name) → counts and responses by the loop, made once."""

    @cache
    def make(held, name):
        return held.decode(POLICIES[name]())

    return make


def rates(counts):
    """Discard rate and verification rate."""
    total = counts.sum(0)
    return total[1] / total[0], total[2] / total[0]


def agree_within_1_percent(one, other):
    return all(abs(a - b) <= 0.01 * b for a, b in zip(rates(one), rates(other), strict=True))


def agree_in_distribution(one, other):
    return max(map(abs, z_scores(one, other))) < Z_LIMIT


CHECKS = {GREEDY: agree_within_1_percent, SAMPLED: agree_in_distribution}

# Wrong in a way that a real mistake would be.
WRONG = {
    "rollouts left out": lambda t: replace(t, drafts=torch.minimum(t.drafts, t.leading + 1)),
    "the rejected token counts as accepted": lambda t: replace(t, leading=torch.minimum(t.leading + 1, t.drafts)),
    "rounds end before the rejected token": lambda t: replace(t, drafts=torch.minimum(t.drafts, t.leading)),
}


class Wanted:
    """What the quick and the long test share."""

    def check_greedy(self, held, decoded, name):
        counts, responses = decoded(held, name)
        assert responses == held.responses
        mine = replayed(held.traces, POLICIES[name]())
        assert np.array_equal(mine, counts)
        assert agree_within_1_percent(mine, counts)

    def check_sampled(self, held, decoded, name):
        counts, _ = decoded(held, name)
        mine = replayed(held.traces, POLICIES[name]())
        assert agree_in_distribution(mine, counts), z_scores(mine, counts)

    def inside(self, held, decoded, names):
        """How many of both rates of all policies lie in the joint 95 % interval, and of how many."""
        pairs = [(replayed(held.traces, POLICIES[name]()), decoded(held, name)[0]) for name in names]
        scores = [score for pair in pairs for score in z_scores(*pair)]
        return sum(abs(score) < Z_95 for score in scores), len(scores)


QUICK = [name for name in POLICIES if name not in ("none", "head of both lag 1, 0.7")]
# One of each way to be replayed: sampled rates can only differ where greedy counts do, or in a draw that all share.
QUICK_SAMPLED = (
    "fixed:5", "confidence:0.15", "head lag 0, 0.5", "head of both with a base, 0.5", "hf-heuristic",
)  # fmt: skip
LENGTHS = {GREEDY: 32, SAMPLED: 40}


@pytest.fixture(scope="module")
def quick(held_out):
    """40 prompts, and a period ends a response: some finish early, some do not."""
    return lambda sampling: held_out(sampling, (PERIOD,), 40, LENGTHS[sampling], 32)


class TestQuick(Wanted):
    @pytest.mark.parametrize("name", QUICK)
    def test_greedy_counts_are_those_of_the_loop(self, quick, decoded, name):
        self.check_greedy(quick(GREEDY), decoded, name)

    @pytest.mark.parametrize("name", QUICK_SAMPLED)
    def test_sampled_rates_are_those_of_the_loop(self, quick, decoded, name):
        self.check_sampled(quick(SAMPLED), decoded, name)

    def test_most_sampled_rates_lie_in_the_joint_95_percent_interval(self, quick, decoded):
        inside, count = self.inside(quick(SAMPLED), decoded, QUICK_SAMPLED)
        assert count == 2 * len(QUICK_SAMPLED) and inside >= count - 3

    @pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_OF_THE_BATCH else name for name in OF_THE_BATCH],
    )
    def test_rules_of_the_whole_batch(self, quick, name):
        """As many rows in replay as in the loop, which take new requests at the same time."""
        for sampling in (GREEDY, SAMPLED) if name == "budget" else (GREEDY,):
            held, policy = quick(sampling), OF_THE_BATCH[name]()
            counts, _ = held.decode(policy)
            mine = replay(held.traces, OF_THE_BATCH[name](), name, batch=ROWS).counts
            if sampling is GREEDY:
                assert np.array_equal(mine, counts)
            else:
                assert agree_in_distribution(mine, counts), z_scores(mine, counts)
        alone = replay(held.traces, OF_THE_BATCH[name](), name, batch=1).counts
        assert not np.array_equal(mine, alone), "the batch must have made a difference"

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_responses_end_in_all_ways(self, quick, sampling):
        """So that the tests above have seen accepted, rejected and drafted end tokens."""
        traces = quick(sampling).traces
        finished, short = np.array(traces.traces["finished"]), (traces.lengths < LENGTHS[sampling]).numpy()
        accepted = np.array([flags[-1] for flags in traces.traces["accepted"]])
        assert 5 < finished.sum() < 35
        assert {True, False} == set(accepted[finished])
        assert int((traces.ids[: traces.positions] == PERIOD).sum()) > finished[accepted].sum(), "none is rejected"
        assert (traces.ids[traces.positions :] == PERIOD).any()
        assert (traces.drafts[(traces.starts + traces.lengths - 1)[finished & short]] > 0).all()

    @pytest.mark.parametrize("name", ["fixed:5", "confidence:0.15", "head lag 0, 0.5"])
    @pytest.mark.parametrize("mistake", WRONG)
    def test_a_wrong_replay_fails_both_checks(self, quick, decoded, mistake, name):
        for sampling, agree in CHECKS.items():
            held = quick(sampling)
            counts, _ = decoded(held, name)
            assert agree(replayed(held.traces, POLICIES[name]()), counts)
            assert not agree(replayed(WRONG[mistake](held.traces), POLICIES[name]()), counts)


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_shortest_responses(held_out, decoded, sampling, new_tokens):
    held = held_out(sampling, (PERIOD, NEWLINE), 12, new_tokens, 32)
    for name in ("none", "fixed:5", "entropy:1.2, k_min 2", "head lag 1, 0.5", "head lag 0, 0.5"):
        counts, responses = decoded(held, name)
        mine = replayed(held.traces, POLICIES[name]())
        if sampling is GREEDY:
            assert responses == held.responses
            assert np.array_equal(mine, counts)
        else:
            assert agree_in_distribution(mine, counts), name
        assert (mine[:, 3] <= (new_tokens - 1) * mine[:, 2]).all()


OWN, MANY = (2,), (PERIOD, NEWLINE)
LONG = [
    *QUICK_SAMPLED,
    "head lag 1, 0.5",
    "max-prob:0.5",
    "none",
    "head of both lag 1, 0.7",
    "cautious",
]  # the others are replayed as one of these
CASES = [(OWN, name) for name in LONG] + [(MANY, name) for name in ("fixed:5", "head lag 1, 0.5", "head lag 0, 0.5")]


@pytest.mark.slow
@pytest.mark.timeout(3000)
class TestLong(Wanted):
    """80 whole prompts, 80 tokens: the pair's own end token, and frequent ones."""

    @pytest.mark.parametrize(("ends", "name"), CASES)
    def test_greedy_counts_are_those_of_the_loop(self, held_out, decoded, name, ends):
        self.check_greedy(held_out(GREEDY, ends, 80, 80), decoded, name)

    @pytest.mark.parametrize(("ends", "name"), CASES)
    def test_sampled_rates_are_those_of_the_loop(self, held_out, decoded, name, ends):
        self.check_sampled(held_out(SAMPLED, ends, 80, 80), decoded, name)

    def test_most_sampled_rates_lie_in_the_joint_95_percent_interval(self, held_out, decoded):
        inside, count = self.inside(held_out(SAMPLED, OWN, 80, 80), decoded, LONG)
        assert count == 2 * len(LONG) and inside >= count - 4
