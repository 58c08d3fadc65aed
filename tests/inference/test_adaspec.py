"""AdaSpec against its three algorithms in scalars, its limit on a round's time, and what it emits by enumeration."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from accept_head import InputError
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.budget import Ranked
from accept_head.inference.policy import BOTH
from tests.inference.test_cost_rules import (
    DEPTH,
    LIGHT,
    MATCH,
    begin,
    bias,
    is_exact,
    one_round,
    padded,
    pair_costs,
    verified,
)

LIVE = torch.tensor([True, True])


def lossy(costs, **options):
    with pytest.warns(UserWarning, match="not the target's under the ratio test"):
        return AdaSpecPolicy(costs, lossy=True, **options)


class Scalar:
    """Algorithms 1 to 3 of the paper, in floats and lists; and the default elimination."""

    def __init__(self, costs, longest, slo, graph, lossy):
        self.costs, self.longest, self.slo, self.graph, self.lossy = costs, longest, slo, graph, lossy
        self.confidences, self.last = [], None

    def draft(self, steps):
        total = 0.0
        for step in range(steps):
            tokens = padded(self.rows, 32, self.graph)
            total += self.costs.draft.alpha * (self.context + step * self.rows) + self.costs.draft.beta * tokens
            total += self.costs.draft.gamma
        return total

    def verify(self, tokens):
        target, tokens = self.costs.target, padded(tokens, 32, self.graph)
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
        mean = sum(self.confidences) / len(self.confidences) if self.confidences else 0.6
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

        if self.lossy:
            self.slo = 0.0  # fewer tokens take less time
            worst_first = sorted((s[r][k], -k, -r) for r, n in enumerate(drafted) for k in range(1, n + 1))
            while any(kept):
                size = self.rows + sum(kept)
                smaller = [n for n in range(1, size) if padded(n, 32, True) == n]
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
        self.last = of(kept)
        return kept


@pytest.mark.parametrize("form", ["lossless", "lossy"])
@pytest.mark.parametrize("options", [{}, {"graph": True}, {"slo_ms": 22.0}], ids=str)
def test_it_is_its_algorithms_over_many_rounds(options, form):
    random = np.random.default_rng(2)
    rows, longest = 5, 6
    costs = pair_costs(draft=5e-4, token=1e-3, context=4e-7)
    policy = (AdaSpecPolicy if form == "lossless" else lossy)(costs, k_max=longest, probe=0, **options)
    scalar = Scalar(costs, longest, policy.slo, policy.graph, policy.lossy)
    lengths = random.integers(3, 900, size=rows)
    begin(policy, lengths.tolist())
    depths, trimmed, total = [], 0, 0
    for number in range(120):
        live = random.random(rows) < 0.8
        live[random.integers(rows)] = True
        here = np.where(live)[0]
        max_q = random.beta((8, 2, 4)[number // 40], 1, size=(rows, longest))
        q = np.where(random.random((rows, longest)) < max_q, max_q, (1 - max_q) / 2).astype(np.float32)
        room = np.where(random.random(rows) < 0.8, longest, random.integers(1, longest, size=rows))
        hidden = q.copy()
        hidden[~live] = np.nan  # idle rows hold garbage
        drafted, kept = one_round(policy, hidden, max_q, live, room)
        expected, s = scalar.round(q[here].tolist(), lengths[here].tolist(), room[here])
        assert drafted[here].tolist() == expected and drafted.sum() == sum(expected)
        if any(expected):
            assert kept[here].tolist() == scalar.trim(expected, s, max_q[here])
            scalar.slo = policy.slo
        else:
            scalar.last = scalar.first
        scalar.confidences += [float(q[r, k]) for r, n in zip(here, expected, strict=True) for k in range(n)]
        accepted = random.integers(0, kept.numpy() + 1)
        lengths = lengths + live * (accepted + 1)
        policy.observe(verified(drafted, kept, accepted, lengths, live))
        assert float(policy.confidence) == pytest.approx(np.mean(scalar.confidences), rel=1e-4)
        assert float(policy.last) == pytest.approx(scalar.last, rel=1e-4)
        depths.append(max(expected))
        trimmed, total = trimmed + int((drafted - kept).sum()), total + int(drafted.sum())
    assert len(set(depths)) > 2
    assert 0.02 < trimmed / total < 0.9


def test_the_first_prediction_is_by_the_confidence_at_the_start():
    """One row, t_target 1: the first token has to be worth its draft step, 0.6 > t_draft."""
    for t_draft, most in ((0.59, 8), (0.61, 0)):
        policy = begin(AdaSpecPolicy(PairCosts.constant(ForwardCosts(t_draft=t_draft, t_target=1.0))), [3])
        assert policy.start_round(torch.tensor([True])).tolist() == [most]


def test_the_step_after_which_goodput_fell_is_kept_and_is_the_last():
    policy = begin(AdaSpecPolicy(PairCosts.constant(ForwardCosts(t_draft=0.1, t_target=1.0))), [3, 3])
    q = np.array([[0.9, 0.9, 0.01, 0.9, 0.9]] * 2)
    drafted, kept = one_round(policy, q, q)
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
    costs = pair_costs(draft=1e-3, token=0.25e-3)
    make = AdaSpecPolicy if form == "lossless" else lossy
    policy = begin(make(costs, slo_ms=slo_ms, k_max=6, probe=1), [3, 3])
    sure = np.full((2, 6), 0.999)
    for _ in range(4):  # probing does not exceed it either
        drafted, kept = one_round(policy, sure, sure)
        assert drafted.tolist() == [most, most]
        policy.observe(verified(drafted, kept, kept, [3, 3]))


def test_rounds_without_drafts_are_left_again_after_a_while():
    policy = begin(AdaSpecPolicy(PairCosts.constant(ForwardCosts(t_draft=0.7, t_target=1.0)), probe=3), [3, 3])
    seen = []
    for _ in range(5):
        sure = np.full((2, 8), 0.95)
        drafted, kept = one_round(policy, sure, sure)
        policy.observe(verified(drafted, kept, kept, [3, 3]))
        seen.append(int(drafted[0]))
    assert seen[:4] == [0, 0, 0, 1] and seen[4] > 1, "it has seen tokens that it is sure of"


def test_the_published_elimination_drops_the_least_likely_first_and_later_tokens_before_earlier_ones():
    policy = begin(lossy(pair_costs(draft=1e-6, token=5e-3), k_max=3), [3, 3])
    policy.start_round(LIVE)
    policy.drawn = [torch.tensor([0.9, 0.4]), torch.tensor([0.9, 0.4]), torch.tensor([0.9, 0.01])]
    kept = policy.trim(torch.tensor([3, 3]))
    assert kept.tolist() == [3, 0]
    assert policy.trim(torch.tensor([2, 0])).tolist() == [2, 0]


def test_the_default_elimination_is_by_the_round_before():
    policy = begin(AdaSpecPolicy(pair_costs(token=1e-3), k_max=3), [3, 3])
    q, max_q = np.full((2, 3), 0.99), np.array([[0.99, 0.99, 0.99], [0.16, 0.99, 0.99]])
    drafted, kept = one_round(policy, q, max_q)
    # At first λ is that of a round without drafts, 2 tokens in 12 ms: a token of 1 ms is worth it from 1/6 on.
    assert drafted.tolist() == [3, 3] and kept.tolist() == [3, 0]
    policy.observe(verified(drafted, kept, kept, [3, 3]))
    gain = 0.99 + 0.99**2 + 0.99**3
    assert float(policy.last) == pytest.approx((2 + gain) / (3 * 1.1e-3 + 15e-3), rel=1e-5)
    # Now it is 0.27, whatever this round is like.
    assert one_round(policy, q, np.array([[0.99, 0.26, 0.99], [0.28, 0.99, 0.99]]))[1].tolist() == [1, 3]
    begin(policy, [3, 3])
    assert float(policy.last) == 0 and float(policy.confidence) == pytest.approx(0.99), "c̄ outlives start, λ does not"


def test_rows_that_move_and_new_requests():
    policy = begin(AdaSpecPolicy(pair_costs()), [5, 6, 7])
    policy.select(torch.tensor([2, 0]))
    assert policy.lengths.tolist() == [7, 5]
    policy.admit(torch.tensor([0]), torch.tensor([50]))
    assert policy.lengths.tolist() == [50, 5]


def test_defaults_and_what_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = AdaSpecPolicy(pair_costs())
    assert (policy.slo, policy.max_draft_tokens, policy.lossy, policy.graph) == (0, 8, False, False)
    assert policy.probe.every == 32
    assert policy.trims and policy.lossless == AdaSpecPolicy.lossless == BOTH
    assert lossy(pair_costs()).lossless == MATCH
    with pytest.raises(InputError, match=r"adaspec slo_ms is -1, expected"):
        AdaSpecPolicy(pair_costs(), slo_ms=-1)
    with pytest.raises(InputError, match="adaspec k_max is 0, expected"):
        AdaSpecPolicy(pair_costs(), k_max=0)
    with pytest.raises(InputError, match="adaspec probe is -2, expected"):
        AdaSpecPolicy(pair_costs(), probe=-2)


# --- what one row emits in a round, exactly --------------------------------------------------------------------------


class BatchBudget(AdaSpecPolicy):
    """What looks harmless: the best 3 tokens of the batch, by what is known before each is drawn. But the other row's
    third token is there only if the batch went on, which depends on this row's second."""

    def trim(self, drafted):
        real = torch.arange(len(self.drawn)) < drafted[:, None]
        known = torch.stack(self.before, dim=1).cummin(1).values
        return Ranked.of(known, real).kept(torch.tensor(3), len(drafted))


def test_the_default_is_exact_also_when_the_stop_depends_on_all_rows():
    found = bias(lambda: AdaSpecPolicy(LIGHT, k_max=DEPTH))
    assert is_exact(found)
    assert len(set(found.drafted.tolist())) > 2


def test_the_published_elimination_is_biased():
    assert bias(lambda: lossy(LIGHT, k_max=DEPTH)).mean > 0.005
    assert bias(lambda: lossy(LIGHT, k_max=DEPTH, graph=True)).mean > 0.005


def test_a_budget_for_the_batch_would_be_biased():
    assert bias(lambda: BatchBudget(LIGHT, k_max=DEPTH)).mean > 0.005
