"""Passes draft lengths to vLLM's scheduler, under its V2 model runner.

There each request's draft is a list of placeholders, of which only the length matters. `propose` stores the lengths on
the batch that it was called with. The handler gets the same batch and cuts the lists to these lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.adapters.vllm.settings import KEY, check_hooks

LENGTHS = "accept_head_lengths"


def leave_lengths(input_batch: Any, lengths: Sequence[int]) -> None:
    """Store the lengths on the batch. lengths: drafted tokens of each row to verify."""
    setattr(input_batch, LENGTHS, lengths)


HOOKS = ("set_draft_tokens", "get_draft_tokens")


def check_handler() -> None:
    """Raises InputError when vLLM's model runner has a handler that is not ours. It would have columns verified that no
    row has drawn, which biases sampled output."""
    from vllm.v1.worker.gpu import model_runner

    handler = model_runner.DraftTokensHandler
    if not getattr(handler, "cuts_lists", False):
        check_hooks(handler, HOOKS)
        raise InputError(
            f"{KEY}: {model_runner.__name__} was imported before vLLM loaded its plugins, so that drafts cannot have "
            "lengths of their own; import vllm first"
        )


def ragged_handler(base: Any) -> Any:
    """vLLM's DraftTokensHandler with lists cut to the adapter's lengths; `base` itself if it lacks the methods."""
    if not all(callable(getattr(base, name, None)) for name in HOOKS):
        return base

    class RaggedDraftTokensHandler(base):
        lengths: Sequence[int] | None = None
        cuts_lists = True

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
