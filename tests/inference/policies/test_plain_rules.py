"""Rules of one line, each against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy
from accept_head.inference.policies.online.signals import OnlineSignalsPolicy
from accept_head.inference.policies.svip import SvipPolicy
from tests.inference.support.rounds import begin, one_round, outcome

ROWS = [[0.9, 0.8, 0.7, 0.6], [0.5, 0.9, 0.9, 0.9], [0.95, 0.95, 0.4, 0.9]]
LOGS = [[math.log(q) for q in row] for row in ROWS]


def drafted(policy, **shown):
    return one_round(policy, [True] * 3, shown)[0].tolist()


def first_below(values, level):
    """Tokens of a round that ends after the first value below the level."""
    return next((k for k, value in enumerate(values, 1) if value < level), len(values))


def products(row):
    return [math.prod(row[:k]) for k in range(1, len(row) + 1)]


@pytest.mark.parametrize("threshold", [0.6, 0.45, 0.32])
def test_cumulative_confidence_is_the_product_of_q(threshold):
    assert drafted(CumulativeConfidencePolicy(threshold), logprob=LOGS) == [
        first_below(products(row), threshold) for row in ROWS
    ]


@pytest.mark.parametrize("threshold", [0.45, 0.55, 0.75])
def test_max_prob_stops_after_a_token_where_max_q_was_less(threshold):
    assert drafted(MaxProbPolicy(threshold), max_prob=ROWS) == [first_below(row, threshold) for row in ROWS]


@pytest.mark.parametrize("threshold", [0.2, 0.3, 0.35])
def test_svip_stops_by_the_root_of_the_scaled_entropy(threshold):
    expected = [first_below([-math.sqrt(0.15 * entropy) for entropy in row], -threshold) for row in ROWS]
    assert drafted(SvipPolicy(threshold), entropy=ROWS) == expected


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_before_anything_is_learnt_online_signals_go_by_q(threshold):
    policy = begin(OnlineSignalsPolicy(threshold), [5, 5, 5])
    q = torch.tensor(ROWS)
    shown = {"logprob": q.log(), "max_prob": q.sqrt(), "entropy": 1 - q}  # of these only q counts
    assert drafted(policy, **shown) == [first_below(products(row), 1 - threshold) for row in ROWS]
    torch.testing.assert_close(policy.predicted[0], q[:, 0], rtol=1e-4, atol=0)


def test_the_heuristic_never_drafts_nothing():
    policy, seen = begin(HfHeuristicPolicy(2), [5]), []
    for accepted in (0, 0, 0, 1):
        k = policy.start_round(torch.tensor([True]))
        seen += k.tolist()
        policy.observe(outcome(k, [accepted]))
    assert seen == [2, 1, 1, 1] and policy.start_round(torch.tensor([True])).tolist() == [3]
