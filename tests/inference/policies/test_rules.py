"""Every policy against its rule in scalars, over many rounds of rows that come, wait, move and go.

`RULES` says of each policy: how it is made, its rule (support/scalar_rules.py), what its rounds are like, what must
have happened in them for the comparison to mean something, and whether a CUDA graph may contain its steps.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.costs.host import PACKED, PADDED, VLLM_V1, VLLM_V2, Host
from accept_head.inference.engine.capture import capture_of
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.bandit import BanditPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policies.leviathan import LeviathanPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy, MeanMaxProbPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policies.online.signals import OnlineSignalsPolicy
from accept_head.inference.policies.registry import POLICIES
from accept_head.inference.policies.svip import SvipPolicy
from accept_head.inference.policy import BOTH, DraftStep
from tests.inference.support.rounds import Foretelling, Given, Reference, Rowwise, Told, begin, compare, outcome
from tests.inference.support.scalar_rules import (
    Capped,
    DearFirst,
    FirstBelow,
    InBlocks,
    MeanOfBatch,
    OtherWhenPlain,
    Persisting,
    ScalarAdaEdl,
    ScalarAdaSpec,
    ScalarBandit,
    ScalarBatchStop,
    ScalarBudget,
    ScalarDsde,
    ScalarFork,
    ScalarGoodput,
    ScalarLeviathan,
    ScalarLogistic,
    Theirs,
    TheirThreshold,
    costs_of,
    pair_costs,
)
from tests.inference.support.toy import ragged_prompts, two

pytestmark = pytest.mark.filterwarnings("ignore:adaspec lossy")


@dataclass
class Rule:
    """given: what a round is like, by its number. rounds, lengths, moves: as in `compare`. saw: whether the rounds that
    were played, and what the reference has noted, are worth something."""

    policy: Callable[[], Any]
    reference: Callable[[Any], Reference]
    given: Callable[[int, np.random.Generator], Given]
    saw: Callable[[Any, Any], bool]
    rounds: int = 100
    lengths: tuple[int, ...] = (3, 3, 3, 3, 3)
    moves: int = 30
    captured: bool = True


def some_live(random, rows, share=0.8):
    live = random.random(rows) < share
    live[random.integers(rows)] = True
    return live


def drawn(max_q, q=None):
    """What policies are shown of tokens; as likely as the likeliest, if nothing else is said."""
    return {"max_prob": max_q, "logprob": np.log(max_q if q is None else q)}


# --- thresholds ------------------------------------------------------------------------------------------------------


def any_tokens(number, random):
    """The signals do not depend on each other, so that a rule that reads another one is found."""
    shape = (5, 9)
    shown = {"logprob": np.log(random.beta(4, 1, shape)), "max_prob": random.beta(4, 1, shape)}
    shown["entropy"] = random.gamma(1.0, 0.5, shape)
    return Given(some_live(random, 5), random.random(shape) < 0.7, shown, random.integers(0, 10, 5))


def several(lengths=4):
    return lambda played, reference: len(np.unique(played.drafted)) > lengths


def at_its_beginning(threshold, **bounds):
    """It goes by q alone as long as it has learnt nothing, and with such a prior it never does."""
    return OnlineSignalsPolicy(threshold, prior=1e9, **bounds)


# name: the class, its signal, the score of a token, the statistic, the level of a threshold, and thresholds
THRESHOLDS = {
    "confidence": (ConfidencePolicy, "logprob", math.exp, min, float, (0.3, 0.8)),
    "cumulative-confidence": (CumulativeConfidencePolicy, "logprob", math.exp, math.prod, float, (0.2, 0.6)),
    "max-prob": (MaxProbPolicy, "max_prob", float, min, float, (0.4, 0.8)),
    "entropy": (EntropyPolicy, "entropy", lambda h: -h, min, lambda t: -t, (0.5, 1.5)),
    "svip": (SvipPolicy, "entropy", lambda h: -math.sqrt(0.15 * h), min, lambda t: -t, (0.25, 0.4)),
    "online-signals": (at_its_beginning, "logprob", math.exp, math.prod, lambda t: 1 - t, (0.4, 0.8)),
}


def thresholds():
    for name, (make, signal, score, statistic, level, values) in THRESHOLDS.items():
        for threshold, bounds in zip(values, ({"k_max": 20}, {"k_min": 3, "k_max": 8}), strict=True):
            scalar = (signal, score, level(threshold), statistic)
            yield (
                f"{name}:{threshold}",
                Rule(
                    lambda make=make, threshold=threshold, bounds=bounds: make(threshold, **bounds),
                    lambda policy, scalar=scalar, bounds=bounds: Rowwise(lambda: FirstBelow(*scalar, **bounds)),
                    any_tokens,
                    several(),
                    rounds=40,
                ),
            )


# --- what is learnt of earlier rounds --------------------------------------------------------------------------------


def easy_and_hard(number, random):
    rates = np.array([[0.0], [0.2], [0.7], [0.97], [1.0]])
    return Given(some_live(random, 5, random.choice([0.2, 0.9])), random.random((5, 12)) < rates)


def whole_or_not(number, random):
    """Rows whose rounds are accepted as a whole, or hardly."""
    rates = np.array([[0.05], [0.2], [0.4], [0.6]])
    wins = (random.random((4, 1)) < rates) | (random.random((4, 30)) < 0.8)
    room = np.where(random.random(4) < 0.5, 30, random.integers(0, 30, 4))  # the end of the response
    return Given(random.random(4) < 0.9, wins, room=room)


def few_probabilities(number, random):
    """So that ties are common."""
    q = random.integers(1, 50, (4, 7)) / 50
    return Given(some_live(random, 4), random.random((4, 7)) < q, {"logprob": np.log(q)}, random.integers(0, 7, 4))


def of_entropy(number, random):
    wins = random.random((5, 6)) < (0.95 if number % 2 else 0.6)
    room = np.where(random.random(5) < 0.9, 6, random.integers(0, 6, 5))
    return Given(random.random(5) < 0.9, wins, {"entropy": random.gamma(1.0, 0.8, size=(5, 6))}, room)


def of_divergence(number, random):
    values = random.gamma(0.5, 0.3 if number % 40 < 20 else 0.05, size=(5, 20))
    room = np.where(random.random(5) < 0.1, random.integers(0, 21, 5), 99)
    return Given(random.random(5) < 0.9, random.random((5, 20)) < 0.85, room=room, divergence=values)


def of_seconds(number, random):
    room = np.where(random.random(3) < 0.9, 99, random.integers(0, 3, 3))
    return Given(some_live(random, 3), random.random((3, 5)) < 0.7, room=room, tokens_per_second=random.gamma(20, 5))


def of_confidences(number, random):
    """Confident tokens are accepted less and less."""
    max_q = random.beta(2, 0.4, size=(5, 8))
    return Given(some_live(random, 5), random.random((5, 8)) < max_q / (1 + number / 50), drawn(max_q))


def dsde(scalar, caps=True, warm=1, **options):
    return Rule(
        lambda: DsdePolicy(**options),
        lambda policy: Capped(scalar, caps),
        of_divergence,
        lambda played, seen: seen.capped > (50 if caps else -1) and len(seen.seen) > 6 and len(seen.warm) == warm,
        rounds=300,
        moves=60,
    )


def leviathan(cost, *seen, **options):
    return Rule(
        lambda: LeviathanPolicy(cost, k_max=12, **options),
        lambda policy: Rowwise(lambda: ScalarLeviathan(cost, 12, **options)),
        easy_and_hard,
        lambda played, reference: set(seen) <= set(played.drafted.flat),
        rounds=200,
        moves=70,
    )


def bandit(arms, shared=False):
    """arms: the draft lengths."""
    return Rule(
        lambda: BanditPolicy(arms[-1], zero_arm=arms[0] == 0, shared_bonus=shared),
        lambda policy: ScalarBandit(arms, shared),
        of_seconds,
        lambda played, seen: (
            seen.played[: 2 * len(arms) - 1] == [*arms, *arms][:-1]
            and (shared or min(map(seen.played.count, arms)) > 20)
        ),
        rounds=300,
        lengths=(3, 3, 3),
    )


# --- costs -----------------------------------------------------------------------------------------------------------


def of_batches(number, random):
    room = random.integers(0, 7, size=4) + (random.random(4) < 0.8) * 6
    return Given(some_live(random, 4), random.random((4, 6)) < (0.9, 0.2, 0.6)[number // 100], room=room)


def of_survivals(number, random):
    live, room = some_live(random, 4, 0.85), np.where(random.random(4) < 0.8, 5, random.integers(0, 5, size=4))
    first = np.where(live)[0][0]
    room[first] = max(1, room[first])
    return Given(live, random.random((4, 5)) < 0.6, drawn(random.beta((6, 1.5)[number // 45], 1, size=(4, 5))), room)


def of_surprises(number, random):
    """Tokens that are not always the likeliest."""
    max_q = random.beta((8, 2, 4)[number // 40], 1, size=(5, 6))
    q = np.where(random.random((5, 6)) < max_q, max_q, (1 - max_q) / 2)
    room = np.where(random.random(5) < 0.8, 6, random.integers(1, 6, size=5))
    return Given(some_live(random, 5), random.random((5, 6)) < 0.5, drawn(max_q, q), room)


GOODPUT = costs_of(draft=1.5e-3, token=1e-3, context=1e-6)
BUDGET = costs_of(draft=4e-4, token=1.3e-3, context=1e-6)
ADASPEC = costs_of(draft=5e-4, token=1e-3, context=4e-7)


def goodput(lengths, costs=GOODPUT, **options):
    return Rule(
        lambda: GoodputPolicy(costs, k_max=6, **options),
        lambda policy: ScalarGoodput(costs, 0.7, policy.decay, 6, policy.probe.every),
        of_batches,
        lambda played, reference: len(reference.seen) >= lengths,
        rounds=300,
        lengths=(5, 900, 20, 300),
    )


def budget(costs=BUDGET, **options):
    return Rule(
        lambda: BudgetPolicy(costs, k_max=5, **options),
        lambda policy: ScalarBudget(costs, 5, policy.cap, policy.graph, policy.retrospective),
        of_survivals,
        lambda played, seen: (
            (played.drafted - played.submitted).sum() > 20
            and len(seen.budgets) > 4
            and (len(seen.depths) > 2 or not options.get("cap", True))
        ),
        rounds=90,
        lengths=(60, 7, 390, 120),
        moves=10,
    )


def adaspec(costs=ADASPEC, **options):
    return Rule(
        lambda: AdaSpecPolicy(costs, k_max=6, **options),
        lambda policy: ScalarAdaSpec(policy, costs),
        of_surprises,
        lambda played, reference: (
            len(np.unique(played.drafted.max(1))) > 1
            and 0.02 < 1 - played.submitted.sum() / played.drafted.sum() < 0.9
            and ("probe" not in options or 0 in played.drafted.max(1))
        ),
        rounds=120,
        lengths=(700, 3, 90, 320, 15),
        moves=25,
    )


def of_loads(ahead):
    """Easy text, hard text, and easy text again. ahead: whether the next token is foretold, too."""

    def given(number, random):
        told = random.beta(*((6, 1), (1, 3), (6, 1))[number * 3 // 300], size=(7, 6))
        foretold = random.beta(5, 2, size=told.shape) if ahead else np.ones(told.shape)
        room = np.where(random.random(7) < 0.9, 6, random.integers(1, 3, size=7))
        cut = np.where(random.random(7) < 0.1, random.integers(0, 4, 7), 99)
        signals = {"max_prob": told, "entropy": foretold}
        return Given(
            some_live(random, 7), random.random(told.shape) < told, signals, room, cut=cut, known=random.random(7) < 0.9
        )

    return given


LOADS = {
    "light": pair_costs(0.1, 0.02, row=0.002, context=1e-4),
    "heavy": pair_costs(0.15, 0.15, context=1e-4),
    "other when plain": OtherWhenPlain(**vars(pair_costs(0.1, 0.02, row=0.002, context=1e-4))),
    "dear first": DearFirst(**vars(pair_costs(0.06, 0.02, row=0.002, context=1e-4))),
    "in blocks": InBlocks(**vars(pair_costs(0.06, 0.03, row=0.002, context=1e-4))),
}
HOSTS = {
    "": PADDED,
    ", packed": PACKED,
    ", packed by four": replace(PACKED, block=4),
    ", vllm v2": VLLM_V2,
    ", padded, feeds": Host(verifies_padding=True, drafts_stopped=True, feeds=True),
    ", vllm v1": VLLM_V1,
}


def batch_stop(inner, load, host):
    options = {"memory": 100.0, "probe": 6, "prior": 5.0, "optimism": 0.8}
    return Rule(
        lambda: BatchStopPolicy(inner(6, 0.05), LOADS[load], host=host, **options),
        lambda policy: ScalarBatchStop(LOADS[load], 6, 0.05, host, inner is Foretelling, **options),
        of_loads(inner is Foretelling),
        lambda played, reference: len(reference.longest) >= (5 if load == "light" else 3),
        rounds=300,
        lengths=(5, 60, 17, 33, 8, 41, 24),
        moves=20,
        captured=False,  # by what it is made around: see test_batch_stop_captured.py
    )


RULES = {
    "none": Rule(
        lambda: FixedPolicy(0),
        lambda policy: Rowwise(lambda: FirstBelow("logprob", math.exp, -1, k_max=0)),
        any_tokens,
        several(0),
    ),
    "fixed:4": Rule(
        lambda: FixedPolicy(4),
        lambda policy: Rowwise(lambda: FirstBelow("logprob", math.exp, -1, k_max=4)),
        any_tokens,
        several(3),
    ),
    **dict(thresholds()),
    "max-prob-mean": Rule(
        lambda: MeanMaxProbPolicy(0.75), lambda policy: MeanOfBatch(0.75), any_tokens, several(), captured=False
    ),
    "adaedl": Rule(
        lambda: AdaEdlPolicy(0.6, k_max=6),
        lambda policy: Rowwise(lambda: ScalarAdaEdl(0.6, 6), levels="level", rates="rate"),
        of_entropy,
        lambda played, seen: len({round(row.level, 4) for row in seen.rows}) > 2,  # rows have gone their own ways
        rounds=200,
    ),
    "adaedl, k_min": Rule(
        lambda: AdaEdlPolicy(0.6, k_min=3, k_max=6),
        lambda policy: Rowwise(lambda: ScalarAdaEdl(0.6, 6, k_min=3), levels="level", rates="rate"),
        of_entropy,
        several(),
    ),
    "leviathan": leviathan(0.1, 1, 12),
    "leviathan, dear": leviathan(0.3, 0, 1, 12, probe=3, prior=1.0),
    "leviathan, hopeless": leviathan(1.0, 0, rate=0.9, probe=1),
    "dsde": dsde(ScalarDsde, k=8),
    "dsde, no cap": dsde(ScalarDsde, False, k=8, cap=False),
    "dsde, fork": dsde(ScalarFork, warm=3, fork=True, temperature=0.5),
    "bandit": bandit([1, 2, 3, 4]),
    "bandit, zero": bandit([0, 1, 2, 3, 4]),
    "bandit, shared": bandit([1, 2, 3, 4], shared=True),
    "hf-heuristic": Rule(
        lambda: HfHeuristicPolicy(k_max=10_000),
        lambda policy: Rowwise(lambda: Theirs("heuristic_transient")),
        whole_or_not,
        lambda played, reference: {1, 2, 20, 22} <= set(played.drafted.flat),
        rounds=300,
        lengths=(3, 3, 3, 3),
        moves=50,
    ),
    "hf-heuristic, capped": Rule(
        lambda: HfHeuristicPolicy(5, k_max=8),
        lambda policy: Rowwise(lambda: Theirs("heuristic_transient", k=5, most=8)),
        whole_or_not,
        lambda played, reference: {1, 5, 7, 8} <= set(played.drafted.flat),
        lengths=(3, 3, 3, 3),
    ),
    "hf-heuristic, persist": Rule(
        lambda: HfHeuristicPolicy(6, k_max=10_000, persist=True),
        lambda policy: Persisting(6),
        whole_or_not,
        lambda played, reference: reference.first != 6,
        lengths=(3, 3, 3, 3),
    ),
    "hf-confidence": Rule(
        lambda: HfConfidencePolicy(0.41, k_min=2),
        TheirThreshold,
        few_probabilities,
        lambda played, reference: len(reference.seen) > 3 and len(np.unique(played.drafted)) > 4,
        lengths=(3, 3, 3, 3),
        captured=False,
    ),
    "online-logistic": Rule(
        lambda: OnlineLogisticPolicy(0.3, k_min=2, k_max=8),
        lambda policy: ScalarLogistic(0.3, 2, 8),
        of_confidences,
        lambda played, reference: len(np.unique(played.drafted)) > 4,
        rounds=220,
    ),
    "batch-map": Rule(
        lambda: BatchMapPolicy([(1, 2, 4), (3, 3, 2), (4, 4, 0), (6, 9, 3)]),
        lambda policy: ByRows([0, 4, 4, 2, 0, 0]),
        easy_and_hard,
        several(2),
    ),
    "goodput": goodput(5, probe=5),
    "goodput, decay": goodput(7, probe=5, decay=0.9),
    "goodput, no probe": goodput(7, probe=0, decay=0.9),
    "goodput, dear first": goodput(4, DearFirst(**vars(GOODPUT)), probe=5),
    "budget": budget(),
    "budget, no cap": budget(cap=False),
    "budget, graph": budget(graph=True),
    "budget, dear first": budget(DearFirst(**vars(BUDGET))),
    "budget, retrospective": budget(cap=False, graph=True, retrospective=True),
    **{
        f"adaspec{', lossy' if lossy else ''}{name}": adaspec(lossy=lossy, **options)
        for lossy in (False, True)
        for name, options in {
            "": {},
            ", graph": {"graph": True},
            ", slo": {"slo_ms": 22.0},
            ", dear first": {"costs": DearFirst(**vars(ADASPEC))},
            ", probe": {"costs": costs_of(draft=8e-3, token=1e-3), "probe": 3},
        }.items()
    },
    **{
        f"{inner.__name__} by costs, {load}{name}": batch_stop(inner, load, host)
        for inner in (Told, Foretelling)
        for load in LOADS
        for name, host in HOSTS.items()
        if name == "" or load in (("dear first", "in blocks") if inner is Told else ("heavy",))
    },
}


class ByRows(Reference):
    """K by the number of live rows."""

    def __init__(self, lengths):
        self.lengths = lengths

    def drafts(self, live, given, lengths):
        return [self.lengths[len(live)]] * len(live)


@pytest.mark.parametrize("name", RULES)
def test_a_policy_drafts_what_its_rule_says(name):
    """Of two batches, one after the other: what is learnt outlives a batch, or it does not, as the rule says."""
    rule = RULES[name]
    policy = rule.policy()
    reference = rule.reference(policy)
    for seed in (1, 2):
        played = compare(policy, reference, rule.given, rule.rounds, rule.lengths, moves=rule.moves, seed=seed)
        assert seed > 1 or rule.saw(played, reference)


def test_no_policy_is_left_out():
    """But those with a head, which have tests of their own."""
    assert {re.split("[:,]", name)[0] for name in RULES if "by costs" not in name} == set(POLICIES) - {"head"}


@pytest.mark.parametrize("name", RULES)
def test_steps_that_are_captured_never_wait_for_the_device(name):
    """A meta tensor has no value to read, so whatever the host would have to know raises here."""
    rule, device = RULES[name], torch.device("meta")
    policy = rule.policy()
    assert (capture_of(policy) is not None) == rule.captured
    if not rule.captured or name.startswith("online-signals"):  # whose sums are the CPU's
        return
    if hasattr(policy, "estimator"):
        policy.estimator.INTERVAL = 2
    asked = Drafting(begin(policy, [3, 4, 5], device))
    live = torch.ones(3, dtype=torch.bool, device=device)
    signals = dict.fromkeys(("logprob", "max_prob", "entropy"), torch.zeros(3, device=device))
    count = torch.zeros(3, dtype=torch.long, device=device)
    for _ in range(2):
        going = asked.begin(live, 3)
        for depth in range(1, 4 if asked.asks else 1):
            going = asked.drew(going)
            going = asked.judge(DraftStep(depth, None, going.active, **signals), going)
        if asked.trims:
            assert asked.trim(count).shape == (3,)
        told = {"divergence": torch.zeros(3, 4, device=device), "seconds": 1.0}
        policy.observe(outcome(count, count, live, lengths=count, **told))
    asked.select(torch.zeros(2, dtype=torch.long, device=device))
    assert asked.begin(live[:2], 3).budget.shape == (2,)


@cache
def greedy():
    """A pair, prompts, and what the target alone makes of them."""
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    prompts = ragged_prompts(5)
    return target, draft, prompts, generate(target, draft, prompts, policy="none", max_new_tokens=24).tokens


@pytest.mark.parametrize("name", [name for name in RULES if name != "none" and "by costs" not in name])
def test_the_text_is_the_targets_whatever_is_learnt(name):
    target, draft, prompts, plain = greedy()
    tokens, stats = generate(target, draft, prompts, policy=RULES[name].policy(), max_new_tokens=24, batch_size=3)
    assert tokens == plain
    assert sum(row.accepted for row in stats) > 5 or name == "leviathan, hopeless"


def test_dsde_takes_rounds_in_which_nobody_drafts_and_models_that_exclude_each_other():
    policy = DsdePolicy(calibration=1)
    begin(policy, [3, 3])
    policy.observe(outcome([0, 0], [0, 0], divergence=torch.zeros(2, 0)))
    assert policy.start_round(torch.tensor([True, True])).tolist() == [5, 5]
    policy.observe(outcome([2, 2], [1, 2], divergence=torch.tensor([[0.1, math.inf], [0.1, 0.1]])))
    for _ in range(2):
        assert policy.start_round(torch.tensor([True, True])).tolist() == [2, 3]


COSTS = costs_of()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EntropyPolicy(-0.1), "entropy threshold is -0.1"),
        (lambda: EntropyPolicy(math.nan), "entropy threshold is nan"),
        (lambda: EntropyPolicy(math.inf), "entropy threshold is inf"),
        (lambda: EntropyPolicy(0.5, k_min=0), "entropy bounds are k_min 0 and k_max 20"),
        (lambda: EntropyPolicy(0.5, k_min=3, k_max=2), "entropy bounds are k_min 3 and k_max 2"),
        (lambda: EntropyPolicy(0.5, k_max=0), "entropy bounds are k_min 1 and k_max 0"),
        (lambda: MeanMaxProbPolicy(1.5), "max-prob-mean threshold is 1.5"),
        (lambda: MeanMaxProbPolicy(0.5, k_max=0), "max-prob-mean k_max is 0"),
        (lambda: AdaEdlPolicy(-0.1), "adaedl threshold is -0.1"),
        (lambda: LeviathanPolicy(0.0), "leviathan cost_ratio is 0.0"),
        (lambda: LeviathanPolicy(0.1, rate=1.5), "leviathan rate is 1.5"),
        (lambda: LeviathanPolicy(0.1, prior=0), "leviathan prior is 0"),
        (lambda: LeviathanPolicy(0.1, probe=0), "leviathan probe is 0"),
        (lambda: LeviathanPolicy(0.1, k_max=0), "leviathan k_max is 0"),
        (lambda: DsdePolicy(0), "dsde k is 0"),
        (lambda: DsdePolicy(calibration=0), "dsde calibration is 0"),
        (lambda: DsdePolicy(k_min=9, k_max=8), "dsde bounds are k_min 9 and k_max 8"),
        (lambda: DsdePolicy(temperature=-1.0), "dsde temperature is -1.0"),
        (lambda: BanditPolicy(0), "bandit arms is 0"),
        (lambda: BanditPolicy(passes=1), "bandit passes is 1"),
        (lambda: BanditPolicy(exploration=-1.0), "bandit exploration is -1.0"),
        (lambda: HfHeuristicPolicy(0), "hf-heuristic k is 0"),
        (lambda: HfHeuristicPolicy(k_max=0), "hf-heuristic k_max is 0"),
        (lambda: HfConfidencePolicy(0.0), "hf-confidence threshold is 0.0"),
        (lambda: HfConfidencePolicy(1.1), "hf-confidence threshold is 1.1"),
        (lambda: HfConfidencePolicy(window=5), "hf-confidence window is 5"),
        (lambda: HfConfidencePolicy(k_min=3, k_max=2), "hf-confidence bounds are k_min 3 and k_max 2"),
        (lambda: OnlineLogisticPolicy(1.5), "online-logistic threshold is 1.5"),
        (lambda: OnlineLogisticPolicy(k_min=3, k_max=2), "online-logistic bounds are k_min 3 and k_max 2"),
        (lambda: GoodputPolicy(COSTS, rate=1.0), "goodput rate is 1.0"),
        (lambda: GoodputPolicy(COSTS, prior=0.0), "goodput prior is 0.0"),
        (lambda: GoodputPolicy(COSTS, decay=0.0), "goodput decay is 0.0"),
        (lambda: GoodputPolicy(COSTS, probe=-1), "goodput probe is -1"),
        (lambda: GoodputPolicy(COSTS, k_max=0), "goodput k_max is 0"),
        (lambda: BudgetPolicy(COSTS, k_max=0), "budget k_max is 0"),
        (lambda: AdaSpecPolicy(COSTS, slo_ms=-1), "adaspec slo_ms is -1"),
        (lambda: AdaSpecPolicy(COSTS, k_max=0), "adaspec k_max is 0"),
        (lambda: AdaSpecPolicy(COSTS, probe=-2), "adaspec probe is -2"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, says):
    with pytest.raises(InputError, match=f"^{says}, expected"):
        make()


def test_defaults():
    """What the table does not go by, because it says something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which lossy alone does
        adaspec = AdaSpecPolicy(COSTS)
    logistic, goodput, budget = OnlineLogisticPolicy(), GoodputPolicy(COSTS), BudgetPolicy(COSTS)
    assert (logistic.threshold, logistic.k_min, logistic.max_draft_tokens) == (0.5, 1, 20)
    assert (goodput.decay, goodput.probe.every, goodput.max_draft_tokens) == (1.0, 32, 8)
    assert (budget.max_draft_tokens, budget.cap, budget.graph, budget.retrospective) == (8, True, False, False)
    assert (adaspec.slo, adaspec.max_draft_tokens, adaspec.lossy, adaspec.graph) == (0, 8, False, False)
    assert adaspec.probe.every == 32
    asked = [Drafting(policy) for policy in (logistic, goodput, budget, adaspec)]
    assert [each.trims for each in asked] == [False, False, True, True] and all(each.lossless == BOTH for each in asked)
    with pytest.warns(UserWarning, match="not the target's under the ratio test"):
        assert AdaSpecPolicy(COSTS, lossy=True).lossless == {"match"}
    assert BudgetPolicy(COSTS, retrospective=True).lossless == {"match"}
