"""Two policies have the same hash if and only if they have the same content."""

from __future__ import annotations

import torch

from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from tests.inference.support.toy import random_head


def costs(t_target):
    return PairCosts.constant(ForwardCosts(t_draft=0.1, t_target=t_target))


def head(change=0.0, threshold=0.5):
    torch.manual_seed(0)
    made = random_head(8)
    with torch.no_grad():
        made.output.bias += change
    return HeadPolicy(made, threshold)


DIFFERENT = [
    lambda: ConfidencePolicy(0.4),
    lambda: ConfidencePolicy(0.5),
    lambda: ConfidencePolicy(0.4, k_max=5),
    lambda: EntropyPolicy(0.4),
    lambda: GoodputPolicy(costs(1.0)),
    lambda: GoodputPolicy(costs(1.5)),
    lambda: BatchMapPolicy([(1, 4, 3)]),
    lambda: BatchMapPolicy([(1, 4, 2), (5, 8, 3)]),
    head,
    lambda: head(change=0.1),
    lambda: head(threshold=0.6),
]


def test_what_a_policy_is_made_of_makes_its_hash():
    hashes = [content_hash(make()) for make in DIFFERENT]
    assert len(set(hashes)) == len(DIFFERENT)
    assert hashes == [content_hash(make()) for make in DIFFERENT]
