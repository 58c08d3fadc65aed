"""Rules with a cost model: what their comparison with scalars (test_rules.py) does not say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.budget import BudgetPolicy, Ranked, graph_size
from accept_head.inference.replay.lossless import PROVED, Shape, enumerate_rounds
from tests.inference.support.rounds import begin, one_round, outcome
from tests.inference.support.scalar_rules import costs_of, graph_sized

pytestmark = pytest.mark.filterwarnings("ignore:adaspec lossy")
LIGHT, DEPTH = costs_of(draft=3e-4, token=2e-3), 3


@pytest.mark.parametrize("stride", [8, 32])
def test_graph_sizes(stride):
    tokens = torch.arange(1, 200)
    assert graph_size(tokens, stride).tolist() == [graph_sized(n, stride) for n in tokens.tolist()]


def test_equal_survivals_are_taken_depth_by_depth():
    survivals = torch.tensor([[1.0, 1.0, 0.5], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    real = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    ranked = Ranked.of(survivals, real)
    kept = [ranked.kept(torch.tensor(m), 3).tolist() for m in range(11)]
    assert kept[:7] == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1]]
    assert kept[8:] == [[3, 2, 3]] * 3
    assert ranked.gains.tolist() == [0, 1, 2, 3, 4, 5, 5.5, 5.5, 5.5, 5.5]
    assert ranked.reach.tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 3, 3]


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
@pytest.mark.parametrize("lossy", [False, True])
def test_adaspec_plans_no_round_that_takes_longer_than_the_limit(slo_ms, most, lossy):
    costs = costs_of(token=0.25e-3)
    policy = begin(AdaSpecPolicy(costs, slo_ms=slo_ms, k_max=6, probe=1, lossy=lossy), [3, 3])
    sure = np.full((2, 6), 0.999)
    for _ in range(4):  # probing does not exceed it either
        drafted, kept = one_round(policy, [True, True], {"max_prob": sure, "logprob": np.log(sure)})
        assert drafted.tolist() == [most, most]
        policy.observe(outcome(drafted, kept, submitted=kept, lengths=[3, 3]))


# --- what one row emits in a round, exactly --------------------------------------------------------------------------


def of_rounds(make):
    """Distributions are peaked, so that rows stop at, and are trimmed to, many lengths."""
    shape = Shape(vocab=3, depth=DEPTH, rows=2, history=1, concentration=0.15, agreement=0.3)
    return enumerate_rounds(make, pairs=25, shape=shape)


EXACT = {
    "budget": lambda: BudgetPolicy(LIGHT, k_max=DEPTH),
    "budget, no cap": lambda: BudgetPolicy(LIGHT, k_max=DEPTH, cap=False),
    # Linear costs: the best m is where the first token comes that is not worth it, whatever follows.
    "budget, retrospective": lambda: BudgetPolicy(LIGHT, k_max=DEPTH, cap=False, retrospective=True),
    "adaspec": lambda: AdaSpecPolicy(LIGHT, k_max=DEPTH),  # its stop depends on all rows
}
BIASED = {
    "budget, retrospective, graph": lambda: BudgetPolicy(LIGHT, k_max=DEPTH, cap=False, retrospective=True, graph=True),
    "adaspec, lossy": lambda: AdaSpecPolicy(LIGHT, k_max=DEPTH, lossy=True),
    "adaspec, lossy, graph": lambda: AdaSpecPolicy(LIGHT, k_max=DEPTH, lossy=True, graph=True),
}


@pytest.mark.parametrize("name", [*EXACT, *BIASED])
def test_what_is_dropped_biases_a_row_or_does_not(name):
    found = of_rounds((EXACT | BIASED)[name])
    if name in BIASED:
        assert found.ratio.mean() > 1e-3
        return
    trimmed = 1 - (found.submitted @ range(DEPTH + 1)) / (found.drafted @ range(DEPTH + 1))
    assert found.ratio.max() < PROVED
    assert trimmed > 0.05 and np.count_nonzero(found.submitted) > 2, "rows are trimmed, and to several lengths"
