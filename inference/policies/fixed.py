"""Draft the same number of tokens every round; 0 is autoregressive decoding."""

from __future__ import annotations

from accept_head.errors import InputError
from accept_head.inference.policy import RowPolicy


class FixedPolicy(RowPolicy):
    """K draft tokens a round (Leviathan et al. 2023, Chen et al. 2023)."""

    stops_early = False
    carries = ()

    def __init__(self, k: int):
        if k < 0:
            raise InputError(f"fixed:{k}: the number of draft tokens must be 0 or more")
        self.max_draft_tokens = k
