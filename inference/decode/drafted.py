"""The proposals of one round: the drafted tokens of all rows, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.acceptance import divergence
from accept_head.inference.policies.drafting import DraftProgress
from accept_head.inference.policy import DraftStep


class Drawn(NamedTuple):
    """The tokens drawn at one slot. ids: (batch,). q: (batch, vocab), the distribution that they were drawn from; of a
    drafter with a vocabulary of its own, over that. scores: (batch, vocab), its logits over the pair's. None if not
    needed. step: what the policy sees; None if it is not asked."""

    ids: Tensor
    q: Tensor | None
    scores: Tensor | None
    step: DraftStep | None


@dataclass
class Drafted:
    """One round's proposals. lengths: (batch,) tokens each row drew. submitted: (batch,) how many of them are verified.
    slots: the most that any row submits. extra_forwards: as in DraftProgress.

    Lists with an entry per slot, as in Drawn: ids, (batch,) each; probabilities, (batch, vocab) each, q, empty when
    greedy; scores, (batch, vocab) each, empty if not needed.
    """

    lengths: Tensor
    submitted: Tensor
    extra_forwards: Tensor
    slots: int = 0
    ids: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    @classmethod
    def nothing(cls, progress: DraftProgress) -> Drafted:
        return cls(progress.lengths, progress.lengths, progress.extra_forwards)

    def append(self, drawn: Drawn) -> None:
        self.ids.append(drawn.ids)
        self.probabilities += [] if drawn.q is None else [drawn.q]
        self.scores += [] if drawn.scores is None else [drawn.scores]
        self.slots = len(self.ids)

    def cut(self, slots: int) -> None:
        """Keep the first `slots`, which some row drew."""
        self.slots = slots
        for part in (self.ids, self.probabilities, self.scores):
            del part[slots:]

    def stop(self, progress: DraftProgress) -> None:
        """End drafting: take over the final counts."""
        self.submitted = self.lengths = progress.lengths
        self.extra_forwards = progress.extra_forwards

    def submit(self, kept: Tensor) -> None:
        """Verify only `kept`, (batch,), tokens of each row. A sync: the host needs the width of the forward."""
        self.submitted = kept
        self.slots = int(kept.max())

    @property
    def forwards(self) -> Tensor:
        """() int, draft forwards that were run."""
        return (self.lengths + self.extra_forwards).max()

    @property
    def counts(self) -> Drafted:
        """The counts alone, without distributions. Of `ids` only the first stays, to show that tokens were drawn."""
        return replace(self, ids=self.ids[:1], probabilities=[], scores=[])

    def divergence(self, target_scores: Tensor, temperature: float) -> Tensor:
        """KL(p ‖ q) of plain softmaxes at each verified slot, (batch, k). target_scores: (batch, k + 1, vocab)."""
        if not self.slots:
            return target_scores.new_zeros(len(target_scores), 0)
        own = torch.stack(self.scores[: self.slots], dim=1)
        return divergence(target_scores[:, :-1], own, temperature or 1.0)
