"""Draft the same number of tokens every round; 0 is autoregressive decoding."""

from __future__ import annotations

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.spec import integer, named
from accept_head.inference.policy import RowPolicy


@named("fixed", "K", "K draft tokens every round", integer)
class FixedPolicy(RowPolicy):
    """Draft K tokens a round (Leviathan et al. 2023, Chen et al. 2023)."""

    capture = Capture()

    def __init__(self, k: int):
        if k < 0:
            raise InputError(f"fixed:{k}: the number of draft tokens must be 0 or more")
        self.max_draft_tokens = k


@named("none", "", "no drafting: the target alone")
class NoDraftPolicy(FixedPolicy):
    """Draft nothing: K = 0."""

    def __init__(self) -> None:
        super().__init__(0)
