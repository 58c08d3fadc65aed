"""Traces as tensors: packed one by one, padded and stacked for the draft, and the inputs and labels of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from accept_head.head_config import Predicts

# The labels at a place of a draft input. token: a(Y_i). next: β_{i+1} where X_i was fed last, and β₁ at the prompt's
# end. after: β_{i+1} at the place of token label i. It counts only where Y_i is accepted: there the text continues with
# Y_i, and Y_{i+1} is drawn next. So if a head reads Y_i, its P̂·β̂ is the chance that both are accepted.
LABELS = ("token", "next", "after")


@dataclass
class Places:
    """What heads learn at some places of a draft's input. All fields are on the host.

    It selects the places that count while a GPU runs the draft, without waiting for it.

    labels: (…, 3), last axis token, next, after; see LABELS. weights: (…, 3) float32, how much each label counts: 0 or
    1; for a drafter that reads the target's states, the chance that a round reaches the place. signals: (…, 3), draft
    signals where the token label counts. drawn_ids: (…), the drawn token there. alternative_ids: (…, m), the
    alternatives there. alternatives: (…, m, 2), log q and a of these.
    """

    labels: Tensor
    weights: Tensor
    signals: Tensor
    drawn_ids: Tensor
    alternative_ids: Tensor
    alternatives: Tensor


PLACE_FIELDS = tuple(field.name for field in fields(Places))


@dataclass
class Packed(Places):
    """One trace as a draft input.

    input_ids, position_ids: (seq,). allowed: (seq, seq) bool, which keys a query attends to. index: of the prompt.
    """

    input_ids: Tensor
    position_ids: Tensor
    allowed: Tensor
    index: int


@dataclass
class DraftBatch(Places):
    """The inputs of one draft forward, and the labels of its positions.

    input_ids, position_ids: (batch, seq). allowed: (batch, 1, seq, seq). indices: (batch,), of the prompts, for
    messages.
    """

    input_ids: Tensor
    position_ids: Tensor
    allowed: Tensor
    indices: Tensor

    def to(self, device: torch.device) -> DraftBatch:
        """The batch with the draft's inputs on the device."""
        inputs = {name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "allowed")}
        return replace(self, **inputs)

    def at(self, hidden: Tensor, axes: Sequence[int]) -> StateBatch:
        """The places where one of LABELS[axes] counts. hidden: (batch, seq, hidden_size), from this forward."""
        used = (self.weights[..., axes] > 0).any(-1)
        places = sent(used.flatten().nonzero()[:, 0], hidden.device)
        return StateBatch(
            **{name: getattr(self, name)[used] for name in PLACE_FIELDS},
            hidden=hidden.flatten(0, 1).index_select(0, places),
            counts=used.sum(-1),
            indices=self.indices,
        )


@dataclass
class StateBatch(Places):
    """The inputs and labels of heads at the n places that count in some traces, trace after trace.

    It replaces a DraftBatch once the draft has run.

    hidden: (n, hidden_size), in the draft's dtype, maybe on a GPU. counts: (traces,), places of each trace. indices:
    (traces,).
    """

    hidden: Tensor
    counts: Tensor
    indices: Tensor

    def to(self, device: torch.device) -> StateBatch:
        return replace(self, hidden=self.hidden.to(device))

    @classmethod
    def joined(cls, batches: Sequence[StateBatch]) -> StateBatch:
        return cls(**{name: torch.cat([vars(batch)[name] for batch in batches]) for name in vars(batches[0])})


def collate(packed: Sequence[Packed]) -> DraftBatch:
    """Stack traces, padded on the right. A padded query attends to itself, so that no attention row is empty."""
    names = (*PLACE_FIELDS, "input_ids", "position_ids")
    padded = {name: pad_sequence([getattr(item, name) for item in packed], batch_first=True) for name in names}
    rows, width = padded["input_ids"].shape
    allowed = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1, 1)
    for row, item in enumerate(packed):
        length = len(item.input_ids)
        allowed[row, 0, :length, :length] = item.allowed
    return DraftBatch(**padded, allowed=allowed, indices=torch.tensor([item.index for item in packed]))


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
