"""A forward of rows that have different numbers of new tokens, without padding.

All of a model but its attention treats each token alone. So the tokens of all rows go through it in one sequence, and
only the attention puts them back into rows, each with its own keys. A verification then costs what its tokens cost, not
what the longest draft would cost in every row. Moving tokens between the two forms, in every layer, takes more than
padding does in a block of tokens that is multiplied anyway. So a forward is packed when that saves a block.

On a CPU alone: on an accelerator the number of tokens would be a sync, and captured forwards have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from accept_head.inference.costs.host import PACKED
from accept_head.inference.engine.attention.backend import with_attention
from accept_head.inference.engine.attention.grouped import grouped_attention

NAME = "accept_head_packed"

declined: WeakSet[PreTrainedModel] = WeakSet()  # models that a test found to be wrong when packed


class Packing(NamedTuple):
    """The wanted tokens of a padded forward (rows, width), in one sequence. taken: (tokens,) their places in the
    flattened padded forward. place: (rows × width,) the place in the sequence of each padded one; padding has that of
    another token, so it holds finite numbers."""

    taken: Tensor
    place: Tensor
    rows: int
    width: int

    @classmethod
    def of(cls, wanted: Tensor) -> Packing:
        """wanted: (rows, width) bool, the tokens to feed, at least one."""
        flat = wanted.flatten()
        return cls(flat.nonzero()[:, 0], (flat.cumsum(0) - 1).clamp(min=0), *wanted.shape)

    def of_tokens(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots: (rows, width) → row and slot of each token, (tokens,) each."""
        return self.taken // self.width, slots.flatten()[self.taken]

    def pack(self, padded: Tensor) -> Tensor:
        """(rows, width, …) → (1, tokens, …)."""
        return padded.flatten(0, 1).index_select(0, self.taken)[None]

    def pad(self, packed: Tensor) -> Tensor:
        """(1, tokens, …) → (rows, width, …)."""
        return packed[0].index_select(0, self.place).unflatten(0, (self.rows, self.width))


def pays(wanted: Tensor) -> bool:
    """Whether these tokens, (rows, width) bool, are to be fed packed."""
    padded = PACKED.blocks(0, wanted.numel())
    return padded > 1 and 0 < PACKED.blocks(0, int(wanted.sum())) < padded


_current: ContextVar[Packing] = ContextVar("packing")  # of the forward that is running


def packs(model: PreTrainedModel) -> bool:
    """Whether the model's attention can be replaced by `packed_attention`."""
    own = model.device.type == "cpu" and model.config._attn_implementation == "sdpa"
    return bool(own and model._supports_attention_backend and model not in declined)


def packed_call(model: PreTrainedModel, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a forward of the model, with a Packing before its arguments, which are packed."""
    attended = with_attention(model, NAME, run)

    def packed(packing: Packing, *arguments: Any) -> Any:
        token = _current.set(packing)
        try:
            return attended(*arguments)
        finally:
            _current.reset(token)

    return packed


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **others: Any
) -> tuple[Tensor, None]:
    """query: (1, heads, tokens, channels). key, value: (rows, key heads, slots, channels). attention_mask: (rows, 1,
    width, slots) → (1, tokens, heads, channels)."""
    packing = _current.get()
    padded = packing.pad(query.transpose(1, 2)).transpose(1, 2)
    output, _ = grouped_attention(module, padded, key, value, attention_mask, **others)
    return packing.pack(output), None


AttentionInterface.register(NAME, packed_attention)
