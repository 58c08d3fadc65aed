"""The result of one round of the decode loop: the proposals and their verification."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from accept_head.inference.decode.drafted import Drafted
from accept_head.inference.decode.rows import Rows
from accept_head.inference.kernels.verify import Verified
from accept_head.inference.policy import VerifyOutcome


@dataclass(frozen=True)
class Round:
    """What `watch` receives after each round. Copy what you keep: with graphs, the next round overwrites tensors."""

    rows: Rows
    drafted: Drafted
    verified: Verified
    logits: Tensor  # the target's, (batch, k + 1, vocab)
    scores: Tensor  # the same after the processors
    outcome: VerifyOutcome
