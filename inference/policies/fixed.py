"""Draft the same number of tokens every round; 0 is autoregressive decoding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policy import DraftStep, Signal, VerifyOutcome


class FixedPolicy:
    """K draft tokens a round (Leviathan et al. 2023, Chen et al. 2023)."""

    needs: frozenset[Signal] = frozenset()
    scores: Literal["prefix", "proposal"] = "prefix"

    def __init__(self, k: int):
        if k < 0:
            raise InputError(f"fixed:{k}: the number of draft tokens must be 0 or more")
        self.max_draft_tokens = k

    def start_round(self, live: Tensor) -> Tensor:
        return torch.full_like(live, self.max_draft_tokens, dtype=torch.long)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        return step.active

    def observe(self, outcome: VerifyOutcome) -> None:
        pass
