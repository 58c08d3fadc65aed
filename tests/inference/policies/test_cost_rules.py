"""Rules with a confidence or a cost model against scalar references, and their output by exact enumeration."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference import generate
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.budget import BudgetPolicy, Ranked, graph_size
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policy import BOTH, DraftStep
from tests.inference.support.cost_rules import (
    DEPTH,
    LIGHT,
    costs_of,
    drawn,
    graph_sized,
    is_biased,
    is_exact,
    of_rounds,
    some_live,
)
from tests.inference.support.rounds import Given, Reference, Rowwise, begin, compare, one_round, outcome
from tests.inference.support.toy import ragged_prompts, two


def confidence(max_q):
    """p of vLLM's estimator before its first step."""
    odds = 40.0 if max_q >= 1 else math.log(max_q / (1 - max_q))
    return 1 / (1 + math.exp(0.2 - 0.5 * odds))


# --- online-logistic -------------------------------------------------------------------------------------------------


class ScalarLogistic:
    """One row, before the estimator has learnt anything."""

    def __init__(self, k_min):
        self.k_min = k_min

    def drafts(self, shown, room):
        survivals = np.cumprod([confidence(max_q) for max_q in shown["max_prob"]])
        return next((n for n, left in enumerate(survivals, 1) if n >= self.k_min and left < 0.3), len(survivals))

    def verified(self, round):
        pass


@pytest.mark.parametrize("k_min", [1, 3])
def test_online_logistic_keeps_the_token_after_which_survival_is_too_small(k_min):
    def given(number, random):
        return Given(np.ones(6, dtype=bool), np.zeros((6, 8)), drawn(random.beta(2, 0.4, size=(6, 8))))

    policy = OnlineLogisticPolicy(0.3, k_min=k_min, k_max=8)
    lengths = compare(policy, Rowwise(lambda: ScalarLogistic(k_min)), given, 50, [3] * 6).drafted
    assert lengths.min() == k_min and lengths.max() == 8 and len(np.unique(lengths)) > 4


def test_online_logistic_learns():
    """Where every confident token is rejected it comes to stop at once."""
    policy = begin(OnlineLogisticPolicy(0.3, k_max=4), [3] * 8)
    live, sure = np.ones(8, dtype=bool), drawn(np.full((8, 4), 0.95))
    assert one_round(policy, live, sure)[0].tolist() == [4] * 8
    for _ in range(400):
        drafted, _ = one_round(policy, live, sure)
        policy.observe(outcome(drafted, np.zeros(8)))
    assert one_round(policy, live, sure)[0].tolist() == [1] * 8


# --- goodput ---------------------------------------------------------------------------------------------------------


class ScalarGoodput(Reference):
    """From the formula of docs/theory.md §8."""

    def __init__(self, costs, rate, decay, longest, probe):
        self.costs, self.decay, self.longest, self.probe = costs, decay, longest, probe
        self.accepted, self.judged = rate * 20, 20.0
        self.idle, self.seen = 0, set()

    def drafts(self, live, given, lengths):
        rows, context, a = len(lengths), sum(lengths), self.accepted / self.judged
        best, best_goodput = 0, -1.0
        for k in range(self.longest + 1):
            tokens = rows * (k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a))
            draft, target = self.costs.draft, self.costs.target
            seconds = k * (draft.alpha * context + draft.beta * rows + draft.gamma)
            seconds += target.alpha * context + target.beta * (k + 1) * rows + target.gamma
            goodput = tokens / seconds * (1.1 if k == 0 else 1)
            if goodput > best_goodput:
                best, best_goodput = k, goodput
        if best == 0 and self.probe and self.idle >= self.probe:
            best = 1
        self.idle = self.idle + 1 if best == 0 else 0
        self.seen.add(best)
        return [min(best, given.of(row)[1]) for row in live]

    def verified(self, rounds):
        judged = sum(min(each.drafted, each.accepted + 1) for each in rounds)
        if judged:
            self.accepted = self.decay * self.accepted + sum(each.accepted for each in rounds)
            self.judged = self.decay * self.judged + judged

    def state(self):
        return {"accepted": self.accepted, "judged": self.judged}


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_goodput_is_its_formula_over_many_rounds(decay):
    def given(number, random):
        room = random.integers(0, 7, size=4) + (random.random(4) < 0.8) * 6
        return Given(some_live(random, 4), random.random((4, 6)) < (0.9, 0.2, 0.6)[number // 100], room=room)

    costs = costs_of(draft=1.5e-3, token=1e-3, context=1e-6)
    scalar = ScalarGoodput(costs, 0.7, decay, 6, 5)
    compare(GoodputPolicy(costs, decay=decay, probe=5, k_max=6), scalar, given, 300, [5, 900, 20, 300], seed=3)
    assert len(scalar.seen) >= (3 if decay == 1 else 5)


def test_goodput_follows_batch_and_context():
    lengths = torch.tensor([100] * 32)
    policy = begin(GoodputPolicy(costs_of(token=1e-4)), lengths.tolist())
    one = policy.start_round(torch.arange(32) < 1)[0]
    many = policy.start_round(torch.arange(32) < 32)[0]
    assert int(one) > int(many), "a token to verify costs more relative to the rest when there are more rows"
    free = begin(GoodputPolicy(PairCosts.constant(ForwardCosts(t_draft=1e-9, t_target=1.0))), [3])
    assert free.start_round(torch.tensor([True])).tolist() == [8]
    slow = begin(GoodputPolicy(PairCosts.constant(ForwardCosts(t_draft=1.0, t_target=1.0)), probe=0), [3])
    assert slow.start_round(torch.tensor([True])).tolist() == [0]


def test_goodput_without_drafts_is_favoured_by_a_tenth():
    """With a = 0.7 one draft token is worth 0.7 / 1 of a round: break-even at t_draft = 0.7·t_target, less a tenth."""
    for t_draft, k in ((0.54, 1), (0.56, 0), (0.69, 0)):
        policy = begin(GoodputPolicy(PairCosts.constant(ForwardCosts(t_draft=t_draft, t_target=1.0)), k_max=1), [3])
        assert policy.start_round(torch.tensor([True])).tolist() == [k], t_draft


@pytest.mark.parametrize("probe", [0, 3])
def test_goodput_without_drafts_is_left_again_after_a_while(probe):
    policy = begin(GoodputPolicy(PairCosts.constant(ForwardCosts(t_draft=2.0, t_target=1.0)), probe=probe), [3, 3])
    live = torch.tensor([True, True])
    lengths = [int(policy.start_round(live)[0]) for _ in range(9)]
    assert lengths == ([0] * 9 if probe == 0 else [0, 0, 0, 1, 0, 0, 0, 1, 0])


def test_goodput_outlives_start_and_follows_rows():
    policy = begin(GoodputPolicy(costs_of()), [5, 6, 7])
    policy.observe(outcome([4, 4, 0], [1, 4, 0], [True, True, False], lengths=[7, 11, 8]))
    assert (float(policy.accepted), float(policy.judged)) == (19, 26)
    policy.select(torch.tensor([2, 0]))
    assert policy.lengths.tolist() == [8, 7]
    policy.admit(torch.tensor([0]), torch.tensor([50]))
    assert policy.lengths.tolist() == [50, 7]
    begin(policy, [1])
    assert (float(policy.accepted), float(policy.judged)) == (19, 26)


# --- budget ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [8, 32])
def test_graph_sizes(stride):
    tokens = torch.arange(1, 200)
    assert graph_size(tokens, stride).tolist() == [graph_sized(n, stride) for n in tokens.tolist()]


class ScalarBudget(Reference):
    """Lists and brute force. last: for each row its ŝ of the round before."""

    def __init__(self, costs, longest, cap, graph, retrospective):
        self.costs, self.longest, self.cap, self.graph = costs, longest, cap, graph
        self.retrospective = retrospective
        self.depth, self.last = longest, []
        self.budgets, self.depths = set(), set()

    def admit(self, row, length):
        self.last[row : row + 1] = [[float(depth < self.depth) for depth in range(self.longest)]]

    def select(self, order):
        self.last = [self.last[row] for row in order]

    def best(self, slots, steps):
        """slots: (ŝ, depth) from the best on → (m*, deepest of the m*). steps: None = as many as are needed."""
        found = (-1.0, 0, 0)
        for m in range(len(slots) + 1):
            reach, tokens = max((depth for _, depth in slots[:m]), default=0), self.rows + m
            forwards = max(1, reach) if steps is None else steps
            seconds = forwards * self.costs.draft_seconds(self.rows, self.context)
            seconds += self.costs.verify_seconds(graph_sized(tokens, 8) if self.graph else tokens, self.context)
            goodput = (self.rows + sum(s for s, _ in slots[:m])) / seconds
            if goodput > found[0] + 1e-9:
                found = (goodput, m, reach)
        return found[1:]

    def drafts(self, live, given, lengths):
        self.rows, self.context = len(live), sum(lengths)
        slots = sorted((-self.last[row][d], d + 1) for row in live for d in range(self.longest))
        self.budget, reach = self.best([(-s, depth) for s, depth in slots], None if self.cap else self.longest)
        if self.cap:
            self.depth = max(1, reach)
        self.survivals = {}
        for row in live:
            shown, room = given.of(row)
            own = [confidence(max_q) for max_q in shown["max_prob"][: min(self.depth, room)]]
            self.survivals[row] = np.cumprod(own).tolist()
        kept = self.trim()
        self.budgets.add(self.budget)
        self.depths.add(self.depth)
        return [(len(self.survivals[row]), kept[row]) for row in live]

    def trim(self):
        slots = sorted((-s, depth + 1, row) for row, own in self.survivals.items() for depth, s in enumerate(own))
        if self.retrospective:
            steps = max(len(own) for own in self.survivals.values())
            self.budget, _ = self.best([(-s, depth) for s, depth, _ in slots], steps)
        kept = dict.fromkeys(self.survivals, 0)
        for _, depth, row in slots[: self.budget]:
            kept[row] += 1
            assert kept[row] == depth, "a prefix of each row"
        return kept

    def verified(self, rounds):
        for row in range(len(self.last)):
            own = self.survivals.get(row, [])
            rate = own[-1] ** (1 / len(own)) if own else 0.0
            self.last[row] = own + [rate**depth for depth in range(len(own) + 1, self.longest + 1)]

    def state(self):
        return {"budget": self.budget}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cap": False},
        {"graph": True},
        {"cap": False, "graph": True, "retrospective": True},
    ],
    ids=str,
)
def test_budget_is_brute_force_over_many_rounds(options):
    def given(number, random):
        live, room = some_live(random, 4, 0.85), np.where(random.random(4) < 0.8, 5, random.integers(0, 5, size=4))
        first = np.where(live)[0][0]
        room[first] = max(1, room[first])
        max_q = random.beta((6, 1.5)[number // 45], 1, size=(4, 5))
        return Given(live, random.random((4, 5)) < 0.6, drawn(max_q), room)

    costs = costs_of(draft=4e-4, token=1.3e-3, context=1e-6)
    policy = BudgetPolicy(costs, k_max=5, **options)
    scalar = ScalarBudget(costs, 5, policy.cap, policy.graph, policy.retrospective)
    # Before the estimator's first step, so that p is known.
    played = compare(policy, scalar, given, 90, [60, 7, 390, 120], moves=10, seed=5)
    assert (played.drafted - played.submitted).sum() > 20 and len(scalar.budgets) > 4
    assert len(scalar.depths) > 2 or not policy.cap


def test_equal_survivals_are_taken_depth_by_depth():
    survivals = torch.tensor([[1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    real = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    ranked = Ranked.of(survivals, real)
    kept = [ranked.kept(torch.tensor(m), 3).tolist() for m in range(11)]
    assert kept[:7] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1]]
    assert kept[8:] == [[3, 2, 3]] * 3
    assert ranked.gains.tolist() == [0, 1, 2, 3, 4, 5, 5.5, 5.5, 5.5, 5.5]
    assert ranked.reach.tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 3, 3]


def test_a_budget_that_drafts_in_vain_gets_shallow_and_deep_again():
    policy = begin(BudgetPolicy(costs_of(draft=1e-3, token=1e-3), k_max=6), [3, 3])
    seen = []
    for max_q in (0.01, 0.01, 0.01, *[0.999] * 3):
        drafted, kept = one_round(policy, [True, True], drawn(np.full((2, 6), max_q)))
        policy.observe(outcome(drafted, kept, submitted=kept, lengths=[9, 9]))
        seen.append((int(drafted[0]), int(kept[0])))
    assert seen[0] == (6, 6), "a new row is taken to be sure"
    assert seen[1:4] == [(1, 0)] * 3
    assert [drafted for drafted, _ in seen[4:]] == [6, 6]


def test_the_budget_forgets_a_row_that_is_given_to_another_request_and_follows_rows_that_move():
    policy = begin(BudgetPolicy(costs_of(), k_max=3, cap=False), [3, 4, 5])
    values = np.array([[0.9, 0.8, 0.7], [0.5, 0.5, 0.5], [0.99, 0.9, 0.1]])
    drafted, kept = one_round(policy, [True] * 3, drawn(values), [3, 2, 1])
    policy.observe(outcome(drafted, kept, submitted=kept, lengths=[6, 7, 8]))
    last = policy.last.clone()
    p = confidence(0.5)
    assert last[1].tolist() == pytest.approx([p, p**2, p**3]), "the last was not drafted"
    policy.select(torch.tensor([2, 0]))
    assert policy.last.tolist() == last[[2, 0]].tolist() and policy.lengths.tolist() == [8, 6]
    policy.admit(torch.tensor([1]), torch.tensor([40]))
    assert policy.last.tolist() == [last[2].tolist(), [1, 1, 1]] and policy.lengths.tolist() == [8, 40]


# --- all -------------------------------------------------------------------------------------------------------------

COSTS = costs_of()
POLICIES = {
    "online-logistic": lambda: OnlineLogisticPolicy(0.5, k_max=6),
    "goodput": lambda: GoodputPolicy(COSTS, k_max=6),
    "budget": lambda: BudgetPolicy(COSTS, k_max=6),
    "budget, uncapped": lambda: BudgetPolicy(COSTS, k_max=6, cap=False),
    "budget, retrospective": lambda: BudgetPolicy(COSTS, k_max=6, retrospective=True, graph=True),
    "adaspec": lambda: AdaSpecPolicy(COSTS, k_max=6),
    "adaspec, lossy": lambda: AdaSpecPolicy(COSTS, k_max=6, lossy=True, graph=True),
    "adaspec, slo, graph": lambda: AdaSpecPolicy(COSTS, k_max=6, slo_ms=30.0, graph=True),
}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OnlineLogisticPolicy(1.5), "online-logistic threshold is 1.5"),
        (lambda: OnlineLogisticPolicy(k_min=3, k_max=2), "online-logistic bounds are k_min 3 and k_max 2"),
        (lambda: GoodputPolicy(COSTS, rate=1.0), "goodput rate is 1.0"),
        (lambda: GoodputPolicy(COSTS, prior=0.0), "goodput prior is 0.0"),
        (lambda: GoodputPolicy(COSTS, decay=0.0), "goodput decay is 0.0"),
        (lambda: GoodputPolicy(COSTS, probe=-1), "goodput probe is -1"),
        (lambda: GoodputPolicy(COSTS, k_max=0), "goodput k_max is 0"),
        (lambda: BudgetPolicy(COSTS, k_max=0), "budget k_max is 0"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, says):
    with pytest.raises(InputError, match=f"^{says}, expected"):
        make()


def test_defaults():
    logistic, goodput, budget = OnlineLogisticPolicy(), GoodputPolicy(COSTS), BudgetPolicy(COSTS)
    assert (logistic.threshold, logistic.k_min, logistic.max_draft_tokens) == (0.5, 1, 20)
    assert (goodput.decay, goodput.probe.every, goodput.max_draft_tokens) == (1.0, 32, 8)
    assert (float(goodput.accepted), float(goodput.judged)) == (14, 20)
    assert (budget.max_draft_tokens, budget.cap, budget.graph, budget.retrospective) == (8, True, False, False)
    asked = [Drafting(policy) for policy in (logistic, goodput, budget)]
    assert [each.trims for each in asked] == [False, False, True] and all(each.lossless == BOTH for each in asked)
    assert BudgetPolicy(COSTS, retrospective=True).lossless == {"match"}


@pytest.mark.filterwarnings("ignore:adaspec lossy")
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_waits_for_the_device(name):
    """A meta tensor has no value to read, so whatever the host would have to know raises here."""
    device = torch.device("meta")
    policy = POLICIES[name]()
    if hasattr(policy, "estimator"):
        policy.estimator.INTERVAL = 2
    asked = Drafting(begin(policy, [3, 4, 5], device))
    live = torch.ones(3, dtype=torch.bool, device=device)
    value = torch.zeros(3, device=device)
    count = torch.zeros(3, dtype=torch.long, device=device)
    for _ in range(2):
        going = asked.begin(live, 3)
        for depth in range(1, 4 if asked.asks else 1):
            going = asked.drew(going)
            going = asked.judge(DraftStep(depth, None, going.active, logprob=value, max_prob=value), going)
        if asked.trims:
            assert asked.trim(count).shape == (3,)
        policy.observe(outcome(count, count, live))
    asked.select(torch.zeros(2, dtype=torch.long, device=device))
    assert asked.begin(live[:2], 3).budget.shape == (2,)


@cache
def greedy():
    """A pair, prompts, and what the target alone makes of them."""
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    prompts = ragged_prompts(3)
    return target, draft, prompts, generate(target, draft, prompts, policy="none", max_new_tokens=10).tokens


@pytest.mark.parametrize("name", ["online-logistic", "goodput", "budget", "adaspec"])
def test_greedy_tokens_are_the_targets(name):
    target, draft, prompts, plain = greedy()
    tokens, stats = generate(target, draft, prompts, policy=POLICIES[name](), max_new_tokens=10, batch_size=2)
    assert tokens == plain
    assert sum(row.accepted for row in stats) > 5


# --- what one row emits in a round, exactly --------------------------------------------------------------------------


def test_the_budget_is_exact():
    assert is_exact(of_rounds(lambda: BudgetPolicy(LIGHT, k_max=DEPTH, cap=False)))
    assert is_exact(of_rounds(lambda: BudgetPolicy(LIGHT, k_max=DEPTH)))


def test_the_retrospective_budget_is_biased_where_costs_rise_in_steps():
    options = {"k_max": DEPTH, "cap": False, "retrospective": True}
    assert is_biased(of_rounds(lambda: BudgetPolicy(LIGHT, graph=True, **options)))
    # Linear costs: the best m is where the first token comes that is not worth it, whatever follows.
    assert is_exact(of_rounds(lambda: BudgetPolicy(LIGHT, **options)))
