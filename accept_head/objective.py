"""What a head is trained on, and the quality it is judged by (SpecDec++ §4.4).

Labels are acceptance probabilities a ∈ [0, 1], not 0/1 outcomes. Every function returns sums, or per-element values:
a batch split over processes is added up first and divided once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class WeightedSum(NamedTuple):
    """A numerator and its denominator, scalars on the device of the inputs."""

    value: Tensor
    weight: Tensor


def weighted_bce(
    logits: Tensor, labels: Tensor, mask: Tensor, *, w_acc: float = 1.0, w_rej: float = 1.0
) -> WeightedSum:
    """Numerator and denominator of the weighted soft-label binary cross-entropy (docs/theory.md §4)

        L = −Σ_i [w_acc·a_i·log P̂_i + w_rej·(1 − a_i)·log(1 − P̂_i)] / Σ_i [w_acc·a_i + w_rej·(1 − a_i)]

    logits, labels, mask: the same shape; P̂ = sigmoid(logits); only positions where mask is true count.
    """
    logits, labels = logits.float(), labels.float()
    accept_weight, reject_weight = w_acc * labels, w_rej * (1 - labels)
    loss = -(accept_weight * F.logsigmoid(logits) + reject_weight * F.logsigmoid(-logits))
    zero = torch.zeros((), device=logits.device)
    return WeightedSum(
        torch.where(mask, loss, zero).sum(), torch.where(mask, accept_weight + reject_weight, zero).sum()
    )


def binary_kl(labels: Tensor, logits: Tensor) -> Tensor:
    """KL(a ‖ P̂) of two Bernoulli distributions, in nats, per element; P̂ = sigmoid(logits). Shapes are equal."""
    labels, logits = labels.double(), logits.double()
    cross_entropy = -(labels * F.logsigmoid(logits) + (1 - labels) * F.logsigmoid(-logits))
    entropy = -(torch.xlogy(labels, labels) + torch.xlogy(1 - labels, 1 - labels))
    return cross_entropy - entropy
