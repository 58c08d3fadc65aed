"""AdaSpec against its three algorithms in scalars, its limit on a round's time, and its output by enumeration."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from accept_head import InputError
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.budget import Ranked
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policy import BOTH
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
from tests.inference.support.rounds import Given, Reference, begin, compare, one_round, outcome

LIVE = torch.tensor([True, True])


def lossy(costs, **options):
    with pytest.warns(UserWarning, match="not the target's under the ratio test"):
        return AdaSpecPolicy(costs, lossy=True, **options)


class Scalar(Reference):
    """Algorithms 1 to 3 of the paper, in floats and lists; and the default elimination."""

    def __init__(self, policy, costs):
        self.costs, self.longest, self.slo = costs, policy.max_draft_tokens, policy.slo
        self.graph, self.lossy = policy.graph, policy.lossy
        self.confidences, self.last = [], None

    def size(self, tokens):
        return graph_sized(tokens, 32) if self.graph else tokens

    def mean(self):
        return np.mean(self.confidences) if self.confidences else 0.6

    def draft(self, steps):
        total = 0.0
        for step in range(steps):
            tokens = self.size(self.rows)
            total += self.costs.draft.alpha * (self.context + step * self.rows) + self.costs.draft.beta * tokens
            total += self.costs.draft.gamma
        return total

    def verify(self, tokens):
        target, tokens = self.costs.target, self.size(tokens)
        return target.alpha * self.context + target.beta * tokens + target.gamma

    def goodput(self, accepted, tokens, steps):
        """Alg. 3."""
        seconds = self.draft(steps) + self.verify(tokens)
        if self.slo and self.verify(self.rows) <= self.slo and steps and seconds > self.slo:
            return -1.0
        return (self.rows + accepted) / seconds

    def round(self, q, lengths, room):
        """Alg. 1. q, room: of live rows → tokens drafted by each, and s of each."""
        self.rows, self.context = len(q), sum(lengths)
        mean = self.mean()
        s, going, tokens, accepted = [[1.0] for _ in q], list(range(len(q))), len(q), 0.0
        self.first = goodput = self.goodput(0.0, tokens, 0)
        drafted = [0] * len(q)
        for step in range(1, self.longest + 1):
            ahead = self.goodput(accepted + sum(s[r][-1] * mean for r in going), tokens + len(going), step)
            if ahead < goodput or (step == 1 and ahead == goodput):
                break
            for r in going:
                s[r].append(s[r][-1] * q[r][step - 1])
                accepted += s[r][-1]
                tokens += 1
                drafted[r] += 1
            real = self.goodput(accepted, tokens, step)
            fell, goodput = real < goodput, real
            going = [r for r in going if drafted[r] < room[r]]
            if fell or not going:
                break
        return drafted, s

    def trim(self, drafted, s, max_q):
        """Alg. 2, or slot by slot what pays at the goodput of the round before."""
        steps, kept = max(drafted), list(drafted)

        def of(kept):
            return self.goodput(sum(sum(s[r][1 : k + 1]) for r, k in enumerate(kept)), self.rows + sum(kept), steps)

        slo = self.slo
        if self.lossy:
            self.slo = 0.0  # fewer tokens take less time
            worst_first = sorted((s[r][k], -k, -r) for r, n in enumerate(drafted) for k in range(1, n + 1))
            while any(kept):
                size = self.rows + sum(kept)
                smaller = [n for n in range(1, size) if graph_sized(n, 32) == n]
                if self.graph and smaller[-1] < self.rows:
                    break
                drop = size - smaller[-1] if self.graph else 1
                fewer = list(kept)
                for _, _, r in worst_first[:drop]:
                    fewer[-r] -= 1
                if of(fewer) < of(kept):
                    break
                kept, worst_first = fewer, worst_first[drop:]
        else:
            price = (self.last or self.first) * self.costs.target.beta
            for r, n in enumerate(drafted):
                kept[r] = next((k for k in range(n) if s[r][k] * max_q[r][k] < price), n)
        self.last, self.slo = of(kept), slo
        return kept

    def drafts(self, live, given, lengths):
        shown, room = zip(*(given.of(row) for row in live), strict=True)
        q = [np.exp(each["logprob"]).tolist() for each in shown]
        drafted, s = self.round(q, lengths, room)
        kept, self.last = drafted, self.last if any(drafted) else self.first
        if any(drafted):
            kept = self.trim(drafted, s, [each["max_prob"] for each in shown])
        self.confidences += [each for own, n in zip(q, drafted, strict=True) for each in own[:n]]
        return list(zip(drafted, kept, strict=True))

    def state(self):
        return {"confidence": self.mean(), "last": self.last}


@pytest.mark.parametrize("form", ["lossless", "lossy"])
@pytest.mark.parametrize("options", [{}, {"graph": True}, {"slo_ms": 22.0}], ids=str)
def test_it_is_its_algorithms_over_many_rounds(options, form):
    def given(number, random):
        max_q = random.beta((8, 2, 4)[number // 40], 1, size=(5, 6))
        q = np.where(random.random((5, 6)) < max_q, max_q, (1 - max_q) / 2)
        room = np.where(random.random(5) < 0.8, 6, random.integers(1, 6, size=5))
        return Given(some_live(random, 5), random.random((5, 6)) < 0.5, drawn(max_q, q), room)

    costs = costs_of(draft=5e-4, token=1e-3, context=4e-7)
    policy = (AdaSpecPolicy if form == "lossless" else lossy)(costs, k_max=6, probe=0, **options)
    played = compare(policy, Scalar(policy, costs), given, 120, [700, 3, 90, 320, 15], moves=25, seed=2)
    assert len(np.unique(played.drafted.max(1))) > 2
    assert 0.02 < 1 - played.submitted.sum() / played.drafted.sum() < 0.9


def test_the_first_prediction_is_by_the_confidence_at_the_start():
    """One row, t_target 1: the first token has to be worth its draft step, 0.6 > t_draft."""
    for t_draft, most in ((0.59, 8), (0.61, 0)):
        policy = begin(AdaSpecPolicy(PairCosts.constant(ForwardCosts(t_draft=t_draft, t_target=1.0))), [3])
        assert policy.start_round(torch.tensor([True])).tolist() == [most]


def test_the_step_after_which_goodput_fell_is_kept_and_is_the_last():
    policy = begin(AdaSpecPolicy(PairCosts.constant(ForwardCosts(t_draft=0.1, t_target=1.0))), [3, 3])
    drafted, kept = one_round(policy, LIVE, drawn(np.array([[0.9, 0.9, 0.01, 0.9, 0.9]] * 2)))
    assert drafted.tolist() == kept.tolist() == [3, 3], "verifying costs nothing here, so nothing is dropped"


@pytest.mark.parametrize(
    ("slo_ms", "most"),
    [
        (0.0, 6),
        (100.0, 6),
        (14.0, 2),  # T(k) = 10 + (2 + 2k)/4 + 1.1k ms for two rows: 10.5, 12.1, 13.7, 15.3, …
        (13.6, 1),
        (12.0, 0),
        (10.6, 0),
        (10.4, 6),  # even a round without drafts takes longer: the least time per token is all that is left
    ],
)
@pytest.mark.parametrize("form", ["lossless", "lossy"])
def test_no_round_is_planned_to_take_longer_than_the_limit(slo_ms, most, form):
    costs = costs_of(token=0.25e-3)
    make = AdaSpecPolicy if form == "lossless" else lossy
    policy = begin(make(costs, slo_ms=slo_ms, k_max=6, probe=1), [3, 3])
    for _ in range(4):  # probing does not exceed it either
        drafted, kept = one_round(policy, LIVE, drawn(np.full((2, 6), 0.999)))
        assert drafted.tolist() == [most, most]
        policy.observe(outcome(drafted, kept, submitted=kept, lengths=[3, 3]))


def test_rounds_without_drafts_are_left_again_after_a_while():
    policy = begin(AdaSpecPolicy(PairCosts.constant(ForwardCosts(t_draft=0.7, t_target=1.0)), probe=3), [3, 3])
    seen = []
    for _ in range(5):
        drafted, kept = one_round(policy, LIVE, drawn(np.full((2, 8), 0.95)))
        policy.observe(outcome(drafted, kept, submitted=kept, lengths=[3, 3]))
        seen.append(int(drafted[0]))
    assert seen[:4] == [0, 0, 0, 1] and seen[4] > 1, "it has seen tokens that it is sure of"


def test_the_published_elimination_drops_the_least_likely_first_and_later_tokens_before_earlier_ones():
    policy = begin(lossy(costs_of(draft=1e-6, token=5e-3), k_max=3), [3, 3])
    policy.start_round(LIVE)
    policy.drawn = [torch.tensor([0.9, 0.4]), torch.tensor([0.9, 0.4]), torch.tensor([0.9, 0.01])]
    kept = policy.trim(torch.tensor([3, 3]))
    assert kept.tolist() == [3, 0]
    assert policy.trim(torch.tensor([2, 0])).tolist() == [2, 0]


def test_the_default_elimination_is_by_the_round_before():
    policy = begin(AdaSpecPolicy(costs_of(token=1e-3), k_max=3), [3, 3])
    q, max_q = np.full((2, 3), 0.99), np.array([[0.99, 0.99, 0.99], [0.16, 0.99, 0.99]])
    drafted, kept = one_round(policy, LIVE, drawn(max_q, q))
    # At first λ is that of a round without drafts, 2 tokens in 12 ms: a token of 1 ms is worth it from 1/6 on.
    assert drafted.tolist() == [3, 3] and kept.tolist() == [3, 0]
    policy.observe(outcome(drafted, kept, submitted=kept, lengths=[3, 3]))
    gain = 0.99 + 0.99**2 + 0.99**3
    assert float(policy.last) == pytest.approx((2 + gain) / (3 * 1.1e-3 + 15e-3), rel=1e-5)
    # Now it is 0.27, whatever this round is like.
    max_q = np.array([[0.99, 0.26, 0.99], [0.28, 0.99, 0.99]])
    assert one_round(policy, LIVE, drawn(max_q, q))[1].tolist() == [1, 3]
    begin(policy, [3, 3])
    assert float(policy.last) == 0 and float(policy.confidence) == pytest.approx(0.99), "c̄ outlives start, λ does not"


def test_rows_that_move_and_new_requests():
    policy = begin(AdaSpecPolicy(costs_of()), [5, 6, 7])
    policy.select(torch.tensor([2, 0]))
    assert policy.lengths.tolist() == [7, 5]
    policy.admit(torch.tensor([0]), torch.tensor([50]))
    assert policy.lengths.tolist() == [50, 5]


def test_defaults_and_what_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = AdaSpecPolicy(costs_of())
    assert (policy.slo, policy.max_draft_tokens, policy.lossy, policy.graph) == (0, 8, False, False)
    assert policy.probe.every == 32
    assert Drafting(policy).trims and policy.lossless == BOTH
    assert lossy(costs_of()).lossless == {"match"}
    with pytest.raises(InputError, match=r"adaspec slo_ms is -1, expected"):
        AdaSpecPolicy(costs_of(), slo_ms=-1)
    with pytest.raises(InputError, match="adaspec k_max is 0, expected"):
        AdaSpecPolicy(costs_of(), k_max=0)
    with pytest.raises(InputError, match="adaspec probe is -2, expected"):
        AdaSpecPolicy(costs_of(), probe=-2)


# --- what one row emits in a round, exactly --------------------------------------------------------------------------


class BatchBudget(AdaSpecPolicy):
    """What looks harmless: the best 2 tokens of the batch, by what is known before each is drawn. But the other row's
    third token is there only if the batch went on, which depends on this row's second."""

    def trim(self, drafted):
        real = torch.arange(len(self.drawn)) < drafted[:, None]
        known = torch.stack(self.before, dim=1).cummin(1).values
        return Ranked.of(known, real).kept(torch.tensor(2), len(drafted))


def test_the_default_is_exact_also_when_the_stop_depends_on_all_rows():
    found = of_rounds(lambda: AdaSpecPolicy(LIGHT, k_max=DEPTH))
    assert is_exact(found) and np.count_nonzero(found.drafted) > 2


def test_the_published_elimination_is_biased():
    assert is_biased(of_rounds(lambda: lossy(LIGHT, k_max=DEPTH)))
    assert is_biased(of_rounds(lambda: lossy(LIGHT, k_max=DEPTH, graph=True)))


def test_a_budget_for_the_batch_would_be_biased():
    assert is_biased(of_rounds(lambda: BatchBudget(LIGHT, k_max=DEPTH)))
