"""What one round proposes: the drafted tokens of all rows, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from accept_head.acceptance import divergence


@dataclass
class Drafted:
    """One round's proposals. lengths: (batch,) tokens each row drew; submitted: (batch,) how many of them are verified;
    slots: the most that any row submits.

    Slot by slot, ids: (batch,) each; probabilities: (batch, vocab) each, q, or empty when greedy; scores: the same
    shape, what q is made of, or empty if nobody asks.
    """

    lengths: Tensor
    submitted: Tensor
    slots: int = 0
    ids: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def append(self, ids: Tensor, q: Tensor | None, active: Tensor, scores: Tensor | None = None) -> None:
        self.ids.append(ids)
        self.probabilities += [] if q is None else [q]
        self.scores += [] if scores is None else [scores]
        self.submitted = self.lengths = self.lengths + active
        self.slots = len(self.ids)

    def trim(self, kept: Tensor) -> None:
        """Verify (batch,) tokens of each row only. The host has to know the width of the forward: a sync."""
        self.submitted = torch.minimum(kept, self.lengths).clamp(min=0)
        self.slots = int(self.submitted.max())

    def divergence(self, target_scores: Tensor, temperature: float) -> Tensor:
        """KL(p ‖ q) at each verified slot, of plain softmaxes, (batch, k). target_scores: (batch, k + 1, vocab)."""
        if not self.slots:
            return target_scores.new_zeros(len(target_scores), 0)
        own = torch.stack(self.scores[: self.slots], dim=1)
        return divergence(target_scores[:, :-1] / (temperature or 1.0), own / (temperature or 1.0))
