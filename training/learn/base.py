"""Fits a head's base (accept_head/base.py): a logistic regression on functions of the draft signals, to convergence.

The traces hold all its inputs, so no draft is run. The ridge is chosen on dev traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from accept_head.base import base_functions, places_of
from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig, Predicts
from accept_head.quality import Quality, binary_kl, quality
from accept_head.training.learn.batches import StateBatch
from accept_head.training.learn.draws import draws

RIDGES = (1e-2, 1.0, 1e2)  # added to the Fisher information of each weight, which is about a tenth of a label's
CONSTANT = 1e-4  # a function with a smaller deviation counts as constant


class Labelled(NamedTuple):
    """n tokens that a draft drew, with their signals and labels.

    signals: (n, 3). accept, reject: (n, predictions), the sums of a and of 1 − a over the times that the token was
    drawn. Both are 0 where the prediction has no label.
    """

    signals: Tensor
    accept: Tensor
    reject: Tensor

    @classmethod
    def of(cls, traces: Iterable[StateBatch], axes: Sequence[int]) -> Labelled:
        """The labels LABELS[axes] of traces, including those of alternatives. Their states are not read."""
        found = [draws(trace, axes) for trace in traces]
        return cls(*(torch.cat([getattr(each, name) for each in found]) for name in cls._fields))


def fit_base(
    train: Labelled,
    dev: Labelled,
    *,
    hidden_size: int,
    signals: tuple[str, ...],
    predicts: Predicts,
    w_acc: float = 1.0,
    w_rej: float = 1.0,
) -> AcceptanceHead:
    """Fit a head that is a base alone to `train`, with the ridge that gives the least KL on `dev`."""
    counts = (train.accept + train.reject).sum(-1).double()
    functions = base_functions(train.signals.double())[..., places_of(signals)]
    mean = counts @ functions / counts.sum()
    deviation = (counts @ (functions - mean).square() / counts.sum()).sqrt()
    config = HeadConfig(
        hidden_size=hidden_size,
        depth=0,
        predicts=predicts,
        reads="before",
        signals=signals,
        signal_mean=tuple(mean.tolist()),
        signal_std=tuple(torch.where(deviation < CONSTANT, 1.0, deviation).tolist()),
        base=True,
        residual=False,
    )
    fits = [_fitted(AcceptanceHead(config), train, w_acc, w_rej, ridge) for ridge in RIDGES]
    return min(fits, key=lambda head: divergence(head.base_logits(dev.signals), dev)).eval()


@torch.no_grad()
def _fitted(head: AcceptanceHead, train: Labelled, w_acc: float, w_rej: float, ridge: float) -> AcceptanceHead:
    """Fit the base by IRLS. A soft label becomes two observations, one of each outcome, with the label's weights."""
    x = head.double().normalised(train.signals).numpy()
    twice, outcome = np.concatenate([x, x]), np.repeat([1, 0], len(x))
    for row, (accept, reject) in enumerate(zip(train.accept.T.double(), train.reject.T.double(), strict=True)):
        weight = np.concatenate([w_acc * accept.numpy(), w_rej * reject.numpy()])
        model = LogisticRegression(C=1 / ridge, solver="newton-cholesky", tol=1e-9, max_iter=100)
        model.fit(twice[weight > 0], outcome[weight > 0], sample_weight=weight[weight > 0])
        head.base.weight[row] = torch.from_numpy(model.coef_[0])
        head.base.bias[row] = float(model.intercept_[0])
    return head.float()


def train_quality(head: AcceptanceHead, labelled: Labelled) -> dict[str, dict[str, float]]:
    """For each prediction: the mean binary KL over the tokens that the base was fitted to, and their number."""
    found: dict[str, dict[str, float]] = {}
    for axis, prediction in enumerate(head.config.predictions):
        one = Labelled(labelled.signals, labelled.accept[:, axis : axis + 1], labelled.reject[:, axis : axis + 1])
        kl = divergence(head.base_logits(one.signals)[:, axis : axis + 1], one)
        found[prediction] = {"count": round(float((one.accept + one.reject).sum())), "binary_kl": kl}
    return found


@torch.no_grad()
def qualities(head: AcceptanceHead, labelled: Labelled) -> dict[str, Quality]:
    """The quality of each prediction of a base. labelled: without alternatives, so that each row is one token."""
    logits, counts = head.base_logits(labelled.signals), labelled.accept + labelled.reject
    labels = labelled.accept / counts.clamp(min=1e-12)
    return {
        prediction: quality(logits[:, axis], labels[:, axis], counts[:, axis])
        for axis, prediction in enumerate(head.config.predictions)
    }


@torch.no_grad()
def divergence(logits: Tensor, labelled: Labelled) -> float:
    """Mean binary KL over all labels, nats. logits: (n, predictions)."""
    counts = labelled.accept + labelled.reject
    label = labelled.accept / counts.clamp(min=1e-12)
    return float((counts * binary_kl(label, logits)).sum() / counts.sum())
