"""Draft lengths on their way to vLLM's scheduler, under its V2 model runner.

There each request's draft travels as a list of placeholders, of which only the length matters. `propose` leaves the
lengths on the batch that it was called with; the handler, which gets the same batch, cuts the lists by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

LENGTHS = "accept_head_lengths"


def leave_lengths(input_batch: Any, lengths: Sequence[int]) -> None:
    """lengths: drafted tokens of each row to verify."""
    setattr(input_batch, LENGTHS, lengths)


def ragged_handler(base: Any) -> Any:
    """vLLM's DraftTokensHandler, with lists as long as the adapter says."""

    class RaggedDraftTokensHandler(base):
        lengths: Sequence[int] | None = None

        def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
            super().set_draft_tokens(input_batch, draft_tokens)
            self.lengths = getattr(input_batch, LENGTHS, None)

        def get_draft_tokens(self) -> Any:
            drafts = super().get_draft_tokens()
            if drafts is not None and self.lengths is not None:
                for ids, length in zip(drafts.draft_token_ids, self.lengths, strict=True):
                    del ids[length:]
            return drafts

    return RaggedDraftTokensHandler
