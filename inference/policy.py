"""The one interface that every stopping policy has.

All tensors have a leading batch dimension; rows are sequences. A policy may look at anything that was drawn so far:
what is drawn is always submitted for verification (keep, then stop), and that is what keeps decoding lossless.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Protocol

from torch import Tensor


class Signal(Enum):
    """What a policy reads of a draft step; the loop hands over nothing that is not asked for."""

    HIDDEN = auto()  # the draft's last hidden state
    DRAFT_SIGNALS = auto()  # log q(Y), entropy and max q


@dataclass(frozen=True)
class DraftStep:
    """The state after drawing Y_depth.

    depth: 1 for the first token of the round. token_ids: (batch,) Y_depth. active: (batch,) bool, rows still drafting.
    fed_hidden: (batch, hidden) or None: the draft's state at the token fed to draw Y_depth, which is Y_{depth−1}, or
    the last verified token when depth is 1. It comes for free; the state at Y_depth would cost one more forward.
    fed_signals: (batch, 3) or None: draft signals of the same token; None when depth is 1. signals: those of Y_depth.
    """

    depth: int
    token_ids: Tensor
    active: Tensor
    fed_hidden: Tensor | None
    fed_signals: Tensor | None
    signals: Tensor | None


@dataclass(frozen=True)
class VerifyOutcome:
    """What verification said. drafted, accepted: (batch,) tokens of this round; live: (batch,) bool."""

    drafted: Tensor
    accepted: Tensor
    live: Tensor


class DraftPolicy(Protocol):
    """Decides, per sequence, whether to draft one more token."""

    needs: frozenset[Signal]
    # `prefix`: scores depend on the prefix alone, so drawn tokens may even be dropped without bias; `proposal`: they
    # depend on the drawn token, which must then be kept.
    scores: Literal["prefix", "proposal"]
    max_draft_tokens: int

    def start_round(self, live: Tensor) -> Tensor:
        """(batch,) int: most tokens each row may draft now; 0 = do not speculate. live: (batch,) bool."""
        ...

    def keep_drafting(self, step: DraftStep) -> Tensor:
        """(batch,) bool, after each drawn token."""
        ...

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from a verified round."""
        ...
