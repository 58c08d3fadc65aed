"""What one round of the decode loop made: proposals, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accept_head.inference.decode.drafted import Drafted
from accept_head.inference.decode.rows import Rows
from accept_head.inference.kernels.verify import Verified
from accept_head.inference.policy import VerifyOutcome


@dataclass(frozen=True)
class Round:
    """What a watcher of the loop sees after each round. What it wants to keep it copies: with graphs, the next round is
    written over it."""

    rows: Rows
    drafted: Drafted
    verified: Verified
    logits: Tensor  # the target's, (batch, k + 1, vocab)
    scores: Tensor  # the same after the processors
    outcome: VerifyOutcome
