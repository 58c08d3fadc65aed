"""Traces as tensors: packed one by one, padded and stacked for the draft, and the inputs and labels of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accept_head.head_config import Predicts
from accept_head.signals import SIGNALS

# The labels at a place of a draft input. token: a(Y_i). next: β_{i+1} where X_i was fed last, and β₁ at the prompt's
# end. after: β_{i+1} at the place of token label i. It counts only where Y_i is accepted: there the text continues with
# Y_i, and Y_{i+1} is drawn next. So if a head reads Y_i, its P̂·β̂ is the chance that both are accepted.
LABELS = ("token", "next", "after")


@dataclass
class DraftBatch:
    """The inputs of one draft forward, and the labels of its positions.

    Labels stay on the host. It selects the positions that count while a GPU runs the draft, without waiting for it.

    input_ids, position_ids: (batch, seq). allowed: (batch, 1, seq, seq) bool, which keys a query attends to.
    labels, mask: (batch, seq, 3), last axis token, next, after; see LABELS. signals: (batch, seq, 3), draft signals
    where the token label counts. drawn_ids: (batch, seq), the drawn token there. alternative_ids: (batch, seq, m), the
    alternatives there. alternatives: (batch, seq, m, 2), log q and a of these. indices: (batch,), prompt index of each
    trace, for messages.
    """

    input_ids: Tensor
    position_ids: Tensor
    allowed: Tensor
    labels: Tensor
    mask: Tensor
    signals: Tensor
    drawn_ids: Tensor
    alternative_ids: Tensor
    alternatives: Tensor
    indices: Tensor

    def to(self, device: torch.device) -> DraftBatch:
        """The batch with the draft's inputs on the device."""
        inputs = {name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "allowed")}
        return replace(self, **inputs)

    def at(self, hidden: Tensor, axes: Sequence[int]) -> StateBatch:
        """The places where one of LABELS[axes] counts. hidden: (batch, seq, hidden_size), from this forward."""
        used = self.mask[..., axes].any(-1)
        places = sent(used.flatten().nonzero()[:, 0], hidden.device)
        return StateBatch(
            hidden=hidden.flatten(0, 1).index_select(0, places),
            labels=self.labels[used],
            mask=self.mask[used],
            signals=self.signals[used],
            drawn_ids=self.drawn_ids[used],
            alternative_ids=self.alternative_ids[used],
            alternatives=self.alternatives[used],
            counts=used.sum(-1),
            indices=self.indices,
        )


@dataclass
class StateBatch:
    """The inputs and labels of heads at the n places that count in some traces, trace after trace.

    It replaces a DraftBatch once the draft has run. All fields except `hidden` are on the host.

    hidden: (n, hidden_size), in the draft's dtype. labels, mask: (n, 3). signals: (n, 3). drawn_ids: (n,).
    alternative_ids: (n, m). alternatives: (n, m, 2). counts: (traces,), places of each trace. indices: (traces,).
    """

    hidden: Tensor
    labels: Tensor
    mask: Tensor
    signals: Tensor
    drawn_ids: Tensor
    alternative_ids: Tensor
    alternatives: Tensor
    counts: Tensor
    indices: Tensor

    def to(self, device: torch.device) -> StateBatch:
        return replace(self, hidden=self.hidden.to(device))

    @classmethod
    def joined(cls, batches: Sequence[StateBatch]) -> StateBatch:
        return cls(**{name: torch.cat([vars(batch)[name] for batch in batches]) for name in vars(batches[0])})


@dataclass
class Packed:
    """One trace as a draft input. Fields as in DraftBatch, without the batch axis.

    ids, positions: (seq,). allowed: (seq, seq). labels, mask: (seq, 3). signals: (seq, 3). drawn_ids: (seq,).
    alternative_ids: (seq, m). alternatives: (seq, m, 2).
    """

    ids: Tensor
    positions: Tensor
    allowed: Tensor
    labels: Tensor
    mask: Tensor
    signals: Tensor
    drawn_ids: Tensor
    alternative_ids: Tensor
    alternatives: Tensor


def collate(packed: list[Packed], indices: list[int]) -> DraftBatch:
    """Stack traces, padded on the right. A padded query attends to itself, so that no attention row is empty."""
    width = max(len(item.ids) for item in packed)
    rows, most = len(packed), packed[0].alternative_ids.shape[1]
    batch = DraftBatch(
        input_ids=torch.zeros(rows, width, dtype=torch.long),
        position_ids=torch.zeros(rows, width, dtype=torch.long),
        allowed=torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1, 1),
        labels=torch.zeros(rows, width, len(LABELS)),
        mask=torch.zeros(rows, width, len(LABELS), dtype=torch.bool),
        signals=torch.zeros(rows, width, len(SIGNALS)),
        drawn_ids=torch.zeros(rows, width, dtype=torch.long),
        alternative_ids=torch.zeros(rows, width, most, dtype=torch.long),
        alternatives=torch.zeros(rows, width, most, 2),
        indices=torch.tensor(indices),
    )
    for row, item in enumerate(packed):
        length = len(item.ids)
        batch.input_ids[row, :length] = item.ids
        batch.position_ids[row, :length] = item.positions
        batch.allowed[row, 0, :length, :length] = item.allowed
        batch.labels[row, :length] = item.labels
        batch.mask[row, :length] = item.mask
        batch.signals[row, :length] = item.signals
        batch.drawn_ids[row, :length] = item.drawn_ids
        batch.alternative_ids[row, :length] = item.alternative_ids
        batch.alternatives[row, :length] = item.alternatives
    return batch


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. On a GPU the copy is queued behind earlier work, and the host does not wait.

    A plain `to` would wait for that work, because its source may be paged out.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def label_axes(predicts: Predicts, *, sees_drawn: bool) -> list[int]:
    """Which of LABELS each of a head's logits is trained on."""
    if predicts == "both":
        return [LABELS.index("token"), LABELS.index("after" if sees_drawn else "next")]
    return [LABELS.index(predicts)]
