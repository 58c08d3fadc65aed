"""Rules that learn from earlier rounds, against scalar references written from their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.policies.bandit import BanditPolicy
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.leviathan import LeviathanPolicy
from tests.inference.support.rounds import Given, Reference, Rowwise, begin, compare, outcome
from tests.inference.support.toy import ragged_prompts, two

# --- the i.i.d. optimum ----------------------------------------------------------------------------------------------


class ScalarLeviathan:
    """One row, from theorem 3.8."""

    def __init__(self, cost, k_max):
        self.cost, self.k_max, self.accepted, self.judged, self.idle = cost, k_max, 3.5, 5.0, 0

    def speed(self, gamma):
        alpha = self.accepted / self.judged
        tokens = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
        return tokens / (1 + gamma * self.cost)

    def drafts(self, shown, room):
        best = max(range(self.k_max + 1), key=self.speed)
        return 1 if best == 0 and self.idle >= 16 else best

    def as_good(self, said, expected):
        return math.isclose(self.speed(said), self.speed(expected), rel_tol=1e-6)

    def verified(self, round):
        self.idle = 0 if round.drafted else self.idle + 1
        self.accepted += round.accepted
        self.judged += min(round.drafted, round.accepted + 1)


@pytest.mark.parametrize("cost", [0.1, 0.3])
def test_leviathan_is_its_formula_for_each_row_over_many_rounds(cost):
    rates = np.array([[0.0], [0.2], [0.7], [0.97], [1.0]])
    reference = Rowwise(lambda: ScalarLeviathan(cost, 12))

    def given(number, random):
        return Given(random.random(5) < 0.9, random.random((5, 12)) < rates)

    played = compare(LeviathanPolicy(cost, k_max=12), reference, given, 300, [3] * 5, moves=70)
    seen = set(played.drafted.flat)
    assert {0, 1, 12} <= seen and len(seen) > 5


def test_leviathan_tries_again_after_a_while_and_recovers_from_bad_luck():
    policy = LeviathanPolicy(0.2, probe=3, prior=1.0)
    begin(policy, [3])
    drafted = []
    for number in range(90):
        k = policy.start_round(torch.tensor([True]))
        drafted.append(int(k[0]))
        policy.observe(outcome(k, k if number > 9 else k * 0))
    stopped = drafted.index(0)
    assert drafted[stopped : stopped + 8] == [0, 0, 0, 1, 0, 0, 0, 1] and min(drafted[-9:]) > 3
    policy = LeviathanPolicy(0.2, probe=3, rate=0.0)
    begin(policy, [3])
    drafted = []
    for number in range(6):
        if number == 2:
            policy.admit(torch.tensor([0]), torch.tensor([5]))
        drafted += policy.start_round(torch.tensor([True])).tolist()
        policy.observe(outcome(drafted[-1:], [0]))
    assert drafted == [0, 0, 0, 0, 0, 1], "a new request waits anew"
    hopeless = LeviathanPolicy(1.0, probe=1, rate=1.0)
    begin(hopeless, [3])
    for _ in range(4):
        assert hopeless.start_round(torch.tensor([True])).tolist() == [0]
        hopeless.observe(outcome([0], [0]))


# --- DSDE ------------------------------------------------------------------------------------------------------------


def spread(values, decay):
    weights = [decay**i for i in range(len(values))]
    newest_first = values[::-1]
    mean = sum(w * v for w, v in zip(weights, newest_first, strict=True)) / sum(weights)
    return sum(w * (v - mean) ** 2 for w, v in zip(weights, newest_first, strict=True)) / sum(weights)


class ScalarDsde:
    """One row, eqs 1-8."""

    cap = staticmethod(np.mean)

    def __init__(self):
        self.values, self.first, self.accepted, self.last = [], [], [], 0.0

    def calibrated(self):
        return len(self.accepted) == 6

    def warm(self):
        return 8

    def predicted(self):
        longest = max(self.accepted) * (1 + np.mean(self.first) / (max(self.first) + 1e-6))
        longest = min(20.0, max(2.0, longest))
        ratio = spread(self.values[-10:], 0.85) / spread(self.values[-30:], 0.85)
        penalty = (math.exp(2 * self.last) - 1) * ratio
        return (1 - penalty) * (longest - 2) + 2 if penalty <= 1 else 2.0

    def as_good(self, said, expected):
        return self.calibrated() and abs(said - expected) < 0.5 + 1e-3

    def verified(self, round):
        if round.divergence:
            self.learn(round.accepted, round.divergence)

    def learn(self, accepted, values):
        if not self.calibrated():
            self.accepted.append(accepted)
            self.first += values
        self.values += values
        self.last = np.mean(values)


class ScalarFork(ScalarDsde):
    """One row of the authors' KLScheduler, with k_min 2, k_max 20, 30 tokens of warm-up, sampled at T = 0.5."""

    def __init__(self):
        super().__init__()
        self.k, self.ready = 5, False

    def calibrated(self):
        return self.ready

    def warm(self):
        return self.k

    def predicted(self):
        longest = round(max(self.accepted) * (1 + 0.5 * np.mean(self.first) / max(self.first)))
        longest = min(20, max(2, longest))
        shortest = min(longest, max(2, math.ceil(longest * 0.1)))
        known = self.values[-30:]
        overall = spread(known, 0.9)
        ratio = 20.0 if overall < 1e-6 else spread(known[-(len(known) // 3) :], 0.9) / overall
        penalty = ratio * (math.exp(2 * self.last / 0.5) - 1)
        return max(shortest, math.ceil((longest - shortest) * (1 - penalty) + shortest)) if penalty <= 1 else shortest

    @staticmethod
    def cap(predictions):
        return math.ceil(np.mean(predictions))

    def learn(self, accepted, values):
        self.values += values
        self.last = np.mean(values)
        if self.ready:
            return
        if len(self.values) < 30:
            self.accepted.append(accepted)
            self.first += values
            self.k = min(2 * self.k, 20) if accepted >= self.k else self.k
        else:
            self.ready = True


class Capped(Rowwise):
    """Rows that know enough draft what they predict, but no more than the batch's cap."""

    def __init__(self, make):
        super().__init__(make)
        self.capped, self.seen, self.warm = 0, set(), set()

    def drafts(self, live, given, lengths):
        predicted = {row: self.rows[row].predicted() for row in live if self.rows[row].calibrated()}
        cap = self.make.cap(list(predicted.values())) if predicted else None
        self.capped += sum(value > cap for value in predicted.values())
        self.warm |= {self.rows[row].warm() for row in live if row not in predicted}
        wanted = [min(predicted[row], cap) if row in predicted else self.rows[row].warm() for row in live]
        self.seen |= {round(float(k)) for row, k in zip(live, wanted, strict=True) if row in predicted}
        return [min(k, given.of(row)[1]) for row, k in zip(live, wanted, strict=True)]


@pytest.mark.parametrize(("scalar", "fork"), [(ScalarDsde, False), (ScalarFork, True)])
def test_dsde_is_its_equations_for_each_row_over_many_rounds(scalar, fork):
    def given(number, random):
        values = random.gamma(0.5, 0.3 if number % 40 < 20 else 0.05, size=(5, 20))
        room = np.where(random.random(5) < 0.1, random.integers(0, 21, 5), 99)  # at the end of a response
        return Given(random.random(5) < 0.9, random.random((5, 20)) < 0.85, room=room, divergence=values)

    policy = DsdePolicy(**({"fork": True, "temperature": 0.5} if fork else {"k": 8}))
    reference = Capped(scalar)
    compare(policy, reference, given, 300, [3] * 5, moves=60, seed=1)
    assert reference.capped > 50 and len(reference.seen) > 6 and 2 in reference.seen, "rows must have been told apart"
    assert len(reference.warm) == (3 if fork else 1)


def test_dsde_without_a_cap_leaves_each_row_its_own_length():
    capped, free = DsdePolicy(calibration=1), DsdePolicy(calibration=1, cap=False)
    for policy in (capped, free):
        begin(policy, [3, 3])
        policy.observe(outcome([5, 5], [5, 0], divergence=torch.tensor([[0.1, 0.0, 0.0, 0.0, 0.0]] * 2)))
    live = torch.tensor([True, True])
    assert free.start_round(live).tolist() == [6, 2]
    assert capped.start_round(live).tolist() == [4, 2]
    assert capped.start_round(torch.tensor([True, False])).tolist()[0] == 6, "a row that is idle counts for nothing"


def test_dsde_takes_rounds_in_which_nobody_drafts_and_models_that_exclude_each_other():
    policy = DsdePolicy(calibration=1)
    begin(policy, [3, 3])
    policy.observe(outcome([0, 0], [0, 0], divergence=torch.zeros(2, 0)))
    assert policy.start_round(torch.tensor([True, True])).tolist() == [5, 5]
    policy.observe(outcome([2, 2], [1, 2], divergence=torch.tensor([[0.1, math.inf], [0.1, 0.1]])))
    for _ in range(2):
        assert policy.start_round(torch.tensor([True, True])).tolist() == [2, 3]


# --- BanditSpec ------------------------------------------------------------------------------------------------------


class ScalarBandit(Reference):
    def __init__(self, arms, shared):
        self.arms, self.shared, self.rewards, self.t = arms, shared, {arm: [] for arm in arms}, 1

    def bound(self, arm, top):
        n = sum(map(len, self.rewards.values())) if self.shared else len(self.rewards[arm])
        return np.mean(self.rewards[arm]) / top + math.sqrt(6 * math.log(self.t) / n)

    def chooses(self):
        if self.t < 2 * len(self.arms):
            return self.arms[(self.t - 1) % len(self.arms)]
        top = max(max(rewards) for rewards in self.rewards.values())
        return max(self.arms, key=lambda arm: self.bound(arm, top))

    def drafts(self, live, given, lengths):
        return [self.chooses()] * len(live)

    def verified(self, rounds):
        self.rewards[self.chooses()].append(sum(each.accepted + 1 for each in rounds) / rounds[0].seconds)
        self.t += 1


def play(policy, number_of_rounds, reward, arms=range(1, 5), shared=False):
    """Arms in the order played, all tokens accepted; reward(arm, round, random) is in tokens/s."""
    scalar, everyone = ScalarBandit(arms, shared), np.ones(3, dtype=bool)

    def given(number, random):
        speed = float(reward(scalar.chooses(), number, random))
        return Given(everyone, np.ones((3, 5), dtype=bool), tokens_per_second=speed)

    return compare(policy, scalar, given, number_of_rounds, [3] * 3, seed=2).drafted[:, 0].tolist()


@pytest.mark.parametrize(("zero", "shared"), [(False, False), (True, False), (False, True)])
def test_bandit_is_its_formula_over_many_rounds(zero, shared):
    arms, policy = range(0 if zero else 1, 5), BanditPolicy(4, zero_arm=zero, shared_bonus=shared)
    played = play(policy, 400, lambda arm, number, random: random.gamma(20, 5 + arm % 3), arms, shared)
    assert played[: 2 * len(arms) - 1] == [*arms, *arms][:-1]
    assert shared or min(map(played.count, arms)) > 20


def test_the_released_bonus_never_looks_back_at_an_arm_that_was_unlucky():
    def unlucky(arm, number, random):
        return 50.0 if number < 7 and arm == 3 else {1: 100.0, 2: 90.0, 3: 120.0, 4: 80.0}[arm]

    released = play(BanditPolicy(4, shared_bonus=True), 1200, unlucky, shared=True)
    assert set(released[7:]) == {1}
    ours = play(BanditPolicy(4), 1200, unlucky)
    assert max(range(1, 5), key=ours[-200:].count) == 3


def test_bandit_counts_only_rounds_of_the_arm_and_tokens_of_live_rows():
    policy = BanditPolicy(2)
    begin(policy, [3, 3])
    live = torch.tensor([True, False])
    assert policy.start_round(live).tolist() == [1, 1]
    policy.observe(outcome([1, 5], [1, 5], [True, False], seconds=0.5))
    assert policy.sums.tolist() == [4, 0] and policy.counts.tolist() == [1, 0]
    assert policy.start_round(live).tolist() == [2, 2]
    policy.observe(outcome([1, 2], [1, 2], [True, False], seconds=0.5))
    assert policy.counts.tolist() == [1, 0] and policy.start_round(live).tolist() == [2, 2]
    begin(policy, [3] * 3)
    assert policy.counts.tolist() == [1, 0], "another batch: what was learnt stays"


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeviathanPolicy(0.0),
        lambda: LeviathanPolicy(0.1, rate=1.5),
        lambda: LeviathanPolicy(0.1, prior=0),
        lambda: LeviathanPolicy(0.1, probe=0),
        lambda: LeviathanPolicy(0.1, k_max=0),
        lambda: DsdePolicy(0),
        lambda: DsdePolicy(calibration=0),
        lambda: DsdePolicy(k_min=9, k_max=8),
        lambda: DsdePolicy(temperature=-1.0),
        lambda: BanditPolicy(0),
        lambda: BanditPolicy(passes=1),
        lambda: BanditPolicy(exploration=-1.0),
    ],
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(InputError, match="expected"):
        make()


@pytest.mark.parametrize(
    "policy",
    [LeviathanPolicy(0.2), DsdePolicy(calibration=2), DsdePolicy(fork=True), BanditPolicy(3, zero_arm=True)],
    ids=["leviathan", "dsde", "dsde-fork", "bandit"],
)
def test_the_text_is_the_targets_whatever_is_learned(policy):
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    prompts = ragged_prompts(6)
    plain = generate(target, draft, prompts, policy="none", max_new_tokens=24, batch_size=3).tokens
    tokens, stats = generate(target, draft, prompts, policy=policy, max_new_tokens=24, batch_size=3)
    assert tokens == plain
    assert sum(row.drafted for row in stats) > 50 and sum(row.accepted for row in stats) > 10
