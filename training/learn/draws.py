"""The different tokens drawn at each place of a batch: the drawn token and its alternatives.

A confident draft draws the same token several times. To a head these draws are one position with several labels. The
loss is linear in the label, so the sums of the labels are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accept_head.signals import SIGNALS
from accept_head.training.learn.batches import LABELS, StateBatch

TOKEN, LOGPROB = LABELS.index("token"), SIGNALS.index("draft_logprob")


@dataclass
class Draws:
    """n different draws, on the host.

    place: (n,) ascending, the place in the batch where each was drawn; None: one draw at each place. ids: (n,).
    signals: (n, 3). accept, reject: (n, labels asked for), the sums of a and of 1 − a over the times that the token was
    drawn at its place, each as often as it counts. Both are 0 where the label does not count.
    """

    place: Tensor | None
    ids: Tensor
    signals: Tensor
    accept: Tensor
    reject: Tensor


def draws(batch: StateBatch, axes: Sequence[int]) -> Draws:
    """The draws for which one of LABELS[axes] is known. Alternatives have only the token label."""
    labels, weights = batch.labels[:, axes], batch.weights[:, axes]
    accept, reject = weights * labels, weights * (1 - labels)
    if not batch.alternative_ids.shape[1]:
        return Draws(None, batch.drawn_ids, batch.signals, accept, reject)
    logprob, of_alternatives = batch.alternatives.unbind(-1)
    is_token = torch.tensor([axis == TOKEN for axis in axes])
    counts = (weights * is_token).unsqueeze(1)  # (places, 1, labels)
    of_alternatives = of_alternatives.unsqueeze(-1)
    accept = torch.cat([accept.unsqueeze(1), counts * of_alternatives], 1)
    reject = torch.cat([reject.unsqueeze(1), counts * (1 - of_alternatives)], 1)

    ids = torch.cat([batch.drawn_ids.unsqueeze(-1), batch.alternative_ids], -1)  # (places, draws)
    into = (ids.unsqueeze(-1) == ids.unsqueeze(-2)).int().argmax(-1)  # the first draw of the same token
    number = torch.arange(ids.shape[-1])
    merging = (into.unsqueeze(-2) == number.unsqueeze(-1)).to(accept.dtype)  # (places, kept, draws)
    accept, reject = merging @ accept, merging @ reject
    kept = (into == number) & (accept + reject > 0).any(-1)

    signals = batch.signals.unsqueeze(1).repeat(1, len(number), 1)
    signals[:, 1:, LOGPROB] = logprob  # entropy and max q belong to the place
    return Draws(kept.nonzero()[:, 0], ids[kept], signals[kept], accept[kept], reject[kept])
