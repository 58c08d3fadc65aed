"""What one round of the decode loop made: proposals, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accept_head.acceptance import divergence
from accept_head.inference.policy import VerifyOutcome
from accept_head.inference.rows import Rows
from accept_head.inference.verify import Verified


@dataclass
class Drafted:
    """One round's proposals, slot by slot. ids: (batch,) each; probabilities: (batch, vocab) each, q, or empty when
    greedy; scores: (batch, vocab) each, what q is made of, or empty if nobody asks; lengths: (batch,), how many of the
    slots are each row's."""

    ids: list[Tensor]
    probabilities: list[Tensor]
    scores: list[Tensor]
    lengths: Tensor

    def append(self, ids: Tensor, q: Tensor | None, active: Tensor, scores: Tensor | None = None) -> None:
        self.ids.append(ids)
        self.probabilities += [] if q is None else [q]
        self.scores += [] if scores is None else [scores]
        self.lengths = self.lengths + active

    def divergence(self, target_scores: Tensor, temperature: float) -> Tensor:
        """KL(p ‖ q) at each slot, of plain softmaxes, (batch, k). target_scores: (batch, k + 1, vocab)."""
        if not self.scores:
            return target_scores.new_zeros(len(target_scores), 0)
        own = torch.stack(self.scores, dim=1)
        return divergence(target_scores[:, :-1] / (temperature or 1.0), own / (temperature or 1.0))


@dataclass(frozen=True)
class Round:
    """What a watcher of the loop sees after each round."""

    rows: Rows
    drafted: Drafted
    verified: Verified
    logits: Tensor  # the target's, (batch, k + 1, vocab)
    scores: Tensor  # the same after the processors
    outcome: VerifyOutcome
