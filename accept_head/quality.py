"""How good predicted acceptance probabilities are: binary KL, Brier, ECE, AUROC, and predicted against observed mean.

Labels are soft: a label a counts as a positive with weight a and a negative with weight 1 − a. So each metric is its
expectation over the outcome of the verification. A position may count with a weight of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accept_head.errors import InputError

ECE_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of one prediction over `count` positions, or positions whose weights sum to about that.

    binary_kl: mean KL(a ‖ P̂), nats. constant_kl: the same for the best constant, P̂ = mean a.
    brier: mean (P̂ − a)². ece: expected calibration error over 15 equal-width bins. auroc: probability that an accepted
    position scores above a rejected one. mean_predicted, mean_observed: mean P̂ and mean a.
    """

    count: int
    binary_kl: float
    constant_kl: float
    brier: float
    ece: float
    auroc: float
    mean_predicted: float
    mean_observed: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def quality(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Quality:
    """The quality of logits (n,) for soft labels (n,). weights: (n,), how much each position counts; 1 when left out.
    Raises InputError when none counts."""
    counted = torch.ones_like(labels, dtype=torch.bool) if weights is None else weights > 0
    if not counted.any():
        raise InputError("there are no positions to evaluate: the dev traces hold no usable token")
    logits, labels = logits[counted].double(), labels[counted].double()
    weights = torch.ones_like(labels) if weights is None else weights[counted].double()
    shares = weights / weights.sum()
    predicted, observed = logits.sigmoid(), shares @ labels
    constant = torch.logit(observed.clamp(1e-12, 1 - 1e-12)).expand_as(labels)
    return Quality(
        count=round(weights.sum().item()),
        binary_kl=(shares @ binary_kl(labels, logits)).item(),
        constant_kl=(shares @ binary_kl(labels, constant)).item(),
        brier=(shares @ (predicted - labels).square()).item(),
        ece=expected_calibration_error(predicted, labels, shares),
        auroc=auroc(predicted, labels, shares),
        mean_predicted=(shares @ predicted).item(),
        mean_observed=observed.item(),
    )


def binary_kl(labels: Tensor, logits: Tensor) -> Tensor:
    """KL(a ‖ P̂) of two Bernoulli distributions, in nats, per element; P̂ = sigmoid(logits). Shapes are equal."""
    labels, logits = labels.double(), logits.double()
    cross_entropy = -(labels * F.logsigmoid(logits) + (1 - labels) * F.logsigmoid(-logits))
    entropy = -(torch.xlogy(labels, labels) + torch.xlogy(1 - labels, 1 - labels))
    return cross_entropy - entropy


def expected_calibration_error(predicted: Tensor, labels: Tensor, shares: Tensor, bins: int = ECE_BINS) -> float:
    """Σ_b |Σ_{i in b} s_i·(P̂_i − a_i)| over equal-width bins of P̂. All (n,); the shares s sum to 1."""
    index = (predicted * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=predicted.dtype).index_add_(0, index.cpu(), (shares * (predicted - labels)).cpu())
    return gap.abs().sum().item()


def auroc(predicted: Tensor, labels: Tensor, shares: Tensor) -> float:
    """Area under the ROC curve with soft labels. Ties count one half. 0.5 when one class has no weight. All (n,)."""
    scores, group = predicted.unique(return_inverse=True)
    positive = torch.zeros_like(scores).index_add_(0, group, shares * labels)
    negative = torch.zeros_like(scores).index_add_(0, group, shares * (1 - labels))
    below = negative.cumsum(0) - negative
    total = positive.sum() * negative.sum()
    return ((positive * (below + negative / 2)).sum() / total).item() if total > 0 else 0.5
