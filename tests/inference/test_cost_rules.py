"""Rules with a confidence or a cost model against scalar references, and what they emit by exact enumeration."""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError
from accept_head.cost import BatchForwardCost, ForwardCosts, PairCosts
from accept_head.inference import generate
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.budget import BudgetPolicy, Ranked, graph_size
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.online.logistic import OnlineLogisticPolicy
from accept_head.inference.policy import BOTH, DraftStep, VerifyOutcome
from tests.inference.toy import ragged_prompts, two

CPU = torch.device("cpu")
MATCH = frozenset({"match"})


def pair_costs(draft=1e-3, token=2e-3, target=10e-3, context=0.0):
    """Seconds of a draft step, and of a verification a token, at all, and a context token."""
    return PairCosts(
        draft=BatchForwardCost(alpha=context / 10, beta=draft / 20, gamma=draft, r_squared=1.0),
        target=BatchForwardCost(alpha=context, beta=token, gamma=target, r_squared=1.0),
    )


def begin(policy, lengths, device=CPU):
    policy.start(len(lengths), device)
    policy.admit(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    return policy


def one_round(policy, q, max_q, live=None, room=None):
    """What the decode loop asks. q, max_q: (rows, depths) of what would be drawn; room: (rows,) budgets of the rows'
    own → (rows,) tokens drafted and tokens verified."""
    q, max_q = (torch.as_tensor(values, dtype=torch.float32) for values in (q, max_q))
    live = torch.ones(len(q), dtype=torch.bool) if live is None else torch.as_tensor(live)
    budget = policy.start_round(live)
    assert budget.dtype == torch.long and budget.shape == live.shape
    budget = budget * live if room is None else torch.minimum(budget * live, torch.as_tensor(room))
    drafted, active = torch.zeros_like(budget), budget > 0
    for depth in range(1, int(budget.max()) + 1):
        drafted = drafted + active
        active = active & (drafted < budget)
        if policy.stops_early:
            step = DraftStep(
                depth=depth,
                token_ids=None,
                active=active,
                logprob=q[:, depth - 1].log(),
                max_prob=max_q[:, depth - 1],
            )
            answer = policy.keep_drafting(step)
            assert answer.dtype == torch.bool and not (answer & ~active).any()
            active = answer
        if not active.any():
            break
    kept = policy.trim(drafted) if policy.trims and budget.any() else drafted
    assert kept.dtype == torch.long and (kept <= drafted).all() and (kept >= 0).all()
    return drafted, kept


def verified(drafted, kept, accepted, lengths, live=None):
    as_long = (torch.as_tensor(values).long() for values in (drafted, kept, accepted, lengths))
    drafted, kept, accepted, lengths = as_long
    live = torch.ones(len(drafted), dtype=torch.bool) if live is None else torch.as_tensor(live)
    return VerifyOutcome(drafted=drafted, submitted=kept, accepted=accepted, live=live, lengths=lengths)


def confidence(max_q):
    """p of vLLM's estimator before its first step."""
    odds = 40.0 if max_q >= 1 else math.log(max_q / (1 - max_q))
    return 1 / (1 + math.exp(0.2 - 0.5 * odds))


# --- online-logistic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_min", [1, 3])
def test_online_logistic_keeps_the_token_after_which_survival_is_too_small(k_min):
    random = np.random.default_rng(0)
    policy = begin(OnlineLogisticPolicy(0.3, k_min=k_min, k_max=8), [3] * 6)
    lengths = []
    for _ in range(50):
        max_q = random.beta(2, 0.4, size=(6, 8))
        drafted, _ = one_round(policy, max_q, max_q)
        for row in range(6):
            survival, expected = 1.0, 0
            for depth in range(1, 9):
                survival, expected = survival * confidence(max_q[row, depth - 1]), depth
                if depth >= k_min and survival < 0.3:
                    break
            assert int(drafted[row]) == expected
        policy.observe(verified(drafted, drafted, np.zeros(6), [4] * 6))
        lengths += drafted.tolist()
    assert min(lengths) == k_min and max(lengths) == 8 and len(set(lengths)) > 4


def test_online_logistic_learns():
    """Where every confident token is rejected it comes to stop at once."""
    policy = begin(OnlineLogisticPolicy(0.3, k_max=4), [3] * 8)
    sure = np.full((8, 4), 0.95)
    assert one_round(policy, sure, sure)[0].tolist() == [4] * 8
    for _ in range(400):
        drafted, kept = one_round(policy, sure, sure)
        policy.observe(verified(drafted, kept, np.zeros(8), [4] * 8))
    assert one_round(policy, sure, sure)[0].tolist() == [1] * 8


# --- goodput ---------------------------------------------------------------------------------------------------------


class ScalarGoodput:
    """From the formula of docs/theory.md §8."""

    def __init__(self, costs, rate, decay, longest, probe):
        self.costs, self.decay, self.longest, self.probe = costs, decay, longest, probe
        self.accepted, self.judged = rate * 20, 20.0
        self.idle = 0

    def length(self, lengths):
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
        return best

    def verified(self, rounds):
        judged = sum(min(k, n + 1) for k, n in rounds)
        if judged:
            self.accepted = self.decay * self.accepted + sum(n for _, n in rounds)
            self.judged = self.decay * self.judged + judged


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_goodput_is_its_formula_over_many_rounds(decay):
    random = np.random.default_rng(3)
    costs = pair_costs(draft=1.5e-3, token=1e-3, context=1e-6)
    policy = begin(GoodputPolicy(costs, decay=decay, probe=5, k_max=6), [5, 900, 20, 300])
    scalar = ScalarGoodput(costs, 0.7, decay, 6, 5)
    lengths, seen = np.array([5, 900, 20, 300]), []
    for number in range(300):
        live = random.random(4) < 0.8
        live[random.integers(4)] = True
        budget = policy.start_round(torch.from_numpy(live))
        k = scalar.length(lengths[live].tolist())
        assert budget.tolist() == [k] * 4 and budget.dtype == torch.long
        seen.append(k)
        drafted = np.where(live, np.minimum(k, random.integers(0, 7, size=4) + (random.random(4) < 0.8) * 6), 0)
        wins = random.random((4, 6)) < (0.9, 0.2, 0.6)[number // 100]
        accepted = np.minimum(drafted, np.cumprod(wins, axis=1).sum(1))
        lengths = lengths + live * (accepted + 1)
        policy.observe(verified(drafted, drafted, accepted, lengths, live))
        scalar.verified([(drafted[row], accepted[row]) for row in np.where(live)[0]])
    assert len(set(seen)) >= (3 if decay == 1 else 5)


def test_goodput_follows_batch_and_context():
    lengths = torch.tensor([100] * 32)
    policy = begin(GoodputPolicy(pair_costs(token=1e-4)), lengths.tolist())
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
    policy = begin(GoodputPolicy(pair_costs()), [5, 6, 7])
    policy.observe(verified([4, 4, 0], [4, 4, 0], [1, 4, 0], [7, 11, 8], [True, True, False]))
    assert (float(policy.accepted), float(policy.judged)) == (19, 26)
    policy.select(torch.tensor([2, 0]))
    assert policy.lengths.tolist() == [8, 7]
    policy.admit(torch.tensor([0]), torch.tensor([50]))
    assert policy.lengths.tolist() == [50, 7]
    begin(policy, [1])
    assert (float(policy.accepted), float(policy.judged)) == (19, 26)


# --- budget ----------------------------------------------------------------------------------------------------------


def padded(tokens, stride, graph):
    sizes = [1]
    while sizes[-1] < tokens:
        sizes.append(sizes[-1] * 2 if sizes[-1] < stride else sizes[-1] + stride)
    return sizes[-1] if graph else tokens


@pytest.mark.parametrize("stride", [8, 32])
def test_graph_sizes(stride):
    tokens = torch.arange(1, 200)
    assert graph_size(tokens, stride).tolist() == [padded(n, stride, True) for n in tokens.tolist()]


class ScalarBudget:
    """Lists and brute force. last: for each row its ŝ of the round before."""

    def __init__(self, costs, longest, cap, graph, retrospective):
        self.costs, self.longest, self.cap, self.graph = costs, longest, cap, graph
        self.retrospective = retrospective
        self.depth, self.last, self.lengths = longest, {}, {}

    def admit(self, row, length):
        self.last[row] = [float(depth < self.depth) for depth in range(self.longest)]
        self.lengths[row] = length

    def best(self, slots, rows, steps):
        """slots: (ŝ, depth) from the best on → (m*, deepest of the m*). steps: None = as many as are needed."""
        found = (-1.0, 0, 0)
        context = sum(self.lengths[row] for row in rows)
        for m in range(len(slots) + 1):
            reach = max((depth for _, depth in slots[:m]), default=0)
            forwards = max(1, reach) if steps is None else steps
            seconds = forwards * self.costs.draft_seconds(len(rows), context)
            seconds += self.costs.verify_seconds(padded(len(rows) + m, 8, self.graph), context)
            goodput = (len(rows) + sum(s for s, _ in slots[:m])) / seconds
            if goodput > found[0] + 1e-9:
                found = (goodput, m, reach)
        return found[1:]

    def start_round(self, rows):
        self.rows = rows
        slots = sorted((-self.last[row][d], d + 1) for row in rows for d in range(self.longest))
        self.budget, reach = self.best([(-s, depth) for s, depth in slots], rows, None if self.cap else self.longest)
        if self.cap:
            self.depth = max(1, reach)
        return self.depth

    def trim(self, survivals):
        """survivals: row → ŝ of its drafted tokens."""
        slots = sorted((-s, depth + 1, row) for row, own in survivals.items() for depth, s in enumerate(own))
        if self.retrospective:
            steps = max(len(own) for own in survivals.values())
            self.budget, _ = self.best([(-s, depth) for s, depth, _ in slots], self.rows, steps)
        kept = dict.fromkeys(survivals, 0)
        for _, depth, row in slots[: self.budget]:
            kept[row] += 1
            assert kept[row] == depth, "a prefix of each row"
        return kept

    def observe(self, survivals, lengths):
        for row in self.last:
            own = survivals.get(row, [])
            rate = own[-1] ** (1 / len(own)) if own else 0.0
            self.last[row] = own + [rate**depth for depth in range(len(own) + 1, self.longest + 1)]
        self.lengths.update(lengths)


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
    random = np.random.default_rng(5)
    rows, longest = 4, 5
    costs = pair_costs(draft=4e-4, token=1.3e-3, context=1e-6)
    policy = BudgetPolicy(costs, k_max=longest, **options)
    scalar = ScalarBudget(costs, longest, policy.cap, policy.graph, policy.retrospective)
    lengths = random.integers(3, 400, size=rows)
    begin(policy, lengths.tolist())
    for row in range(rows):
        scalar.admit(row, int(lengths[row]))
    trimmed, budgets, depths = 0, set(), set()
    for number in range(90):  # before the estimator's first step, so that p is known
        live = random.random(rows) < 0.85
        live[random.integers(rows)] = True
        here = np.where(live)[0].tolist()
        max_q = random.beta((6, 1.5)[number // 45], 1, size=(rows, longest))
        room = np.where(random.random(rows) < 0.8, longest, random.integers(0, longest, size=rows))
        room[here[0]] = max(1, room[here[0]])
        drafted, kept = one_round(policy, max_q, max_q, live, room)
        depth = scalar.start_round(here)
        survivals = {
            row: np.cumprod([confidence(q) for q in max_q[row, : min(depth, room[row])]]).tolist() for row in here
        }
        assert drafted.tolist() == [len(survivals.get(row, [])) for row in range(rows)]
        expected = scalar.trim(survivals)
        assert kept.tolist() == [expected.get(row, 0) for row in range(rows)]
        assert int(policy.budget) == scalar.budget
        accepted = random.integers(0, kept.numpy() + 1)
        lengths = lengths + live * (accepted + 1)
        policy.observe(verified(drafted, kept, accepted, lengths, live))
        scalar.observe(survivals, {row: int(lengths[row]) for row in here})
        if number % 10 == 9:  # a new request takes a row
            row = int(random.integers(rows))
            lengths[row] = 3
            policy.admit(torch.tensor([row]), torch.tensor([3]))
            scalar.admit(row, 3)
        trimmed += int((drafted - kept).sum())
        budgets.add(scalar.budget)
        depths.add(scalar.depth)
    assert trimmed > 20 and len(budgets) > 4
    assert len(depths) > 2 or not policy.cap


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
    policy = begin(BudgetPolicy(pair_costs(draft=1e-3, token=1e-3), k_max=6), [3, 3])
    seen = []
    for max_q in (0.01, 0.01, 0.01, *[0.999] * 3):
        values = np.full((2, 6), max_q)
        drafted, kept = one_round(policy, values, values)
        policy.observe(verified(drafted, kept, kept, [9, 9]))
        seen.append((int(drafted[0]), int(kept[0])))
    assert seen[0] == (6, 6), "a new row is taken to be sure"
    assert seen[1:4] == [(1, 0)] * 3
    assert [drafted for drafted, _ in seen[4:]] == [6, 6]


def test_the_budget_forgets_a_row_that_is_given_to_another_request_and_follows_rows_that_move():
    policy = begin(BudgetPolicy(pair_costs(), k_max=3, cap=False), [3, 4, 5])
    values = np.array([[0.9, 0.8, 0.7], [0.5, 0.5, 0.5], [0.99, 0.9, 0.1]])
    drafted, kept = one_round(policy, values, values, room=[3, 2, 1])
    policy.observe(verified(drafted, kept, kept, [6, 7, 8]))
    last = policy.last.clone()
    p = confidence(0.5)
    assert last[1].tolist() == pytest.approx([p, p**2, p**3]), "the last was not drafted"
    policy.select(torch.tensor([2, 0]))
    assert policy.last.tolist() == last[[2, 0]].tolist() and policy.lengths.tolist() == [8, 6]
    policy.admit(torch.tensor([1]), torch.tensor([40]))
    assert policy.last.tolist() == [last[2].tolist(), [1, 1, 1]] and policy.lengths.tolist() == [8, 40]


# --- all -------------------------------------------------------------------------------------------------------------

COSTS = pair_costs()
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
    assert budget.trims and not goodput.trims and not logistic.trims
    assert logistic.lossless == goodput.lossless == budget.lossless == BOTH
    assert BudgetPolicy(COSTS, retrospective=True).lossless == MATCH and BudgetPolicy.lossless == BOTH


@pytest.mark.filterwarnings("ignore:adaspec lossy")
@pytest.mark.parametrize("name", POLICIES)
def test_nothing_waits_for_the_device(name):
    """A meta tensor has no value to read, so whatever the host would have to know raises here."""
    device = torch.device("meta")
    policy = POLICIES[name]()
    if hasattr(policy, "estimator"):
        policy.estimator.INTERVAL = 2
    begin(policy, [3, 4, 5], device)
    live = torch.ones(3, dtype=torch.bool, device=device)
    value = torch.zeros(3, device=device)
    count = torch.zeros(3, dtype=torch.long, device=device)
    for _ in range(2):
        policy.start_round(live)
        for depth in range(1, 4 if policy.stops_early else 1):
            policy.keep_drafting(DraftStep(depth=depth, token_ids=None, active=live, logprob=value, max_prob=value))
        if policy.trims:
            assert policy.trim(count).shape == (3,)
        policy.observe(VerifyOutcome(drafted=count, submitted=count, accepted=count, live=live, lengths=count))
    policy.select(torch.zeros(2, dtype=torch.long, device=device))
    assert policy.start_round(live[:2]).shape == (2,)


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

VOCAB, DEPTH = 3, 3
Prefix = tuple[int, ...]


class Table:
    """p and q after each prefix, and what the target alone would emit from there on, to DEPTH + 1 tokens in all."""

    def __init__(self, random):
        prefixes = [p for n in range(DEPTH + 1) for p in itertools.product(range(VOCAB), repeat=n)]
        self.p, self.q = ({prefix: random.dirichlet(np.ones(VOCAB)) for prefix in prefixes} for _ in range(2))
        self.joint = {full: np.ones(()) for full in itertools.product(range(VOCAB), repeat=DEPTH + 1)}
        for prefix in reversed(prefixes):
            self.joint[prefix] = np.stack([self.p[prefix][y] * self.joint[*prefix, y] for y in range(VOCAB)])

    def verified(self, drafts: Prefix) -> np.ndarray:
        """(VOCAB,)^(DEPTH + 1), what the ratio test emits when these are submitted, completed by the target."""
        emitted, reached = np.zeros((VOCAB,) * (DEPTH + 1)), 1.0
        for slot, y in enumerate(drafts):
            before = drafts[:slot]
            p, q = self.p[before], self.q[before]
            accepted, rest = min(1.0, p[y] / q[y]), np.maximum(p - q, 0)
            for z in range(VOCAB):
                emitted[*before, z] += reached * (1 - accepted) * rest[z] / rest.sum() * self.joint[*before, z]
            reached *= accepted
        emitted[drafts] += reached * self.joint[drafts]
        return emitted


def drawn(random, concentration):
    """(q of what was drawn, max q) at each depth, of a row that draws one sequence."""
    qs = [random.dirichlet(np.full(VOCAB, concentration)) for _ in range(DEPTH)]
    return [(random.choice(q, p=q), q.max()) for q in qs]


def bias(make, pairs=50, *, sure=0.05, seed=0):
    """Mean and largest total variation between what row 0 of two rows emits and the target's own distribution; how
    many tokens were drafted, and verified, of each draft. sure: how peaked the other row's distributions are, the less
    the more. A round at random comes before, which is the state that the enumerated one starts from."""
    random, distances, counts = np.random.default_rng(seed), [], []
    for _ in range(pairs):
        policy = begin(make(), [3, 5])
        q, max_q = np.array([drawn(random, 0.1), drawn(random, 0.1)]).transpose(2, 0, 1)
        drafted, kept = one_round(policy, q, max_q)
        policy.observe(verified(drafted, kept, kept.clamp(max=1), [6, 7]))
        table, other = Table(random), drawn(random, sure)
        emitted = np.zeros((VOCAB,) * (DEPTH + 1))
        done: dict[Prefix, int] = {}  # what was drafted, to the end of the round → how many of it was verified
        for drafts in itertools.product(range(VOCAB), repeat=DEPTH):
            if any(drafts[:n] in done for n in range(DEPTH + 1)):
                continue  # the tokens that differ were not drafted
            here = [table.q[drafts[:slot]] for slot in range(DEPTH)]
            own = [(q[y], q.max()) for q, y in zip(here, drafts, strict=True)]
            q, max_q = np.array([own, other]).transpose(2, 0, 1)
            drafted, kept = one_round(copy.deepcopy(policy), q, max_q)
            count = int(drafted[0])
            done[drafts[:count]] = int(kept[0])
            emitted += np.prod(q[0, :count]) * table.verified(drafts[: int(kept[0])])
        counts += [(len(drafts), kept) for drafts, kept in done.items()]
        assert emitted.sum() == pytest.approx(1, abs=1e-9)
        distances.append(np.abs(emitted - table.joint[()]).sum() / 2)
    drafted, kept = np.array(counts).T
    return SimpleNamespace(mean=np.mean(distances), most=np.max(distances), drafted=drafted, kept=kept)


def is_exact(found):
    """… and the proof means something: rows are trimmed, and to several lengths."""
    return found.most < 1e-6 and (found.kept < found.drafted).mean() > 0.1 and len(set(found.kept.tolist())) > 2


LIGHT = pair_costs(draft=3e-4, token=2e-3)


def test_the_budget_is_exact():
    assert is_exact(bias(lambda: BudgetPolicy(LIGHT, k_max=DEPTH, cap=False)))
    assert is_exact(bias(lambda: BudgetPolicy(LIGHT, k_max=DEPTH), pairs=20))


def test_the_retrospective_budget_is_biased_where_costs_rise_in_steps():
    options = {"k_max": DEPTH, "cap": False, "retrospective": True}
    assert bias(lambda: BudgetPolicy(LIGHT, graph=True, **options)).mean > 0.005
    # Linear costs: the best m is where the first token comes that is not worth it, whatever follows.
    assert is_exact(bias(lambda: BudgetPolicy(LIGHT, **options), pairs=30))
