"""A key/value cache in which every row has its own length, and forgetting tokens is arithmetic.

Keys and values are written at each row's own positions, and the attention mask lets a query at position i see the slots
0..i. A slot beyond a row's length holds nothing or a rejected token, and is overwritten before anyone may look at it.
Rolling back is therefore: start the next write earlier.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from accept_head.pair import Forward, attention_mask_for, base_model, forward_with_hidden


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, (batch, heads, capacity, head_dim); the cache tells it where to write."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.slots: Tensor | None = None  # (batch, new tokens)
        self.extent = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, _ = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (batch, heads, new, head_dim) at `slots`; return all slots below `extent`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.slots is not None
        index = self.slots[:, None, :, None]
        self.keys.scatter_(2, index.expand_as(key_states), key_states)
        self.values.scatter_(2, index.expand_as(value_states), value_states)
        return self.keys[:, :, : self.extent], self.values[:, :, : self.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.extent, 0

    def get_seq_length(self) -> int:
        return self.extent

    def get_max_length(self) -> int:
        return self.capacity


class CachedModel:
    """A model with a ragged cache for a fixed batch. Positions are the caller's business; there is no hidden state.

    Raises InputError through `attention_mask_for` if the model's attention takes no explicit mask.
    """

    def __init__(self, model: PreTrainedModel, max_length: int):
        """max_length: longest row, in tokens."""
        self.model = model
        self.max_length = max_length
        layers = model.config.get_text_config().num_hidden_layers
        # One more slot than tokens: where the padding of a ragged forward is written, and nobody ever looks.
        self.layers = [RaggedLayer(max_length + 1) for _ in range(layers)]
        self.cache = Cache(layers=list(self.layers))

    def prefill(self, input_ids: Tensor, lengths: Tensor) -> None:
        """Fill the cache with the first `lengths` tokens of each row. input_ids: (batch, seq); lengths: (batch,)."""
        width = int(lengths.max())
        if width > 0:
            base_model(self.model)(**self._inputs(input_ids[:, :width], torch.zeros_like(lengths)))

    def forward(self, input_ids: Tensor, starts: Tensor) -> Forward:
        """Feed tokens (batch, new), row r at positions starts[r], starts[r] + 1, … → logits and hidden states."""
        return forward_with_hidden(self.model, **self._inputs(input_ids, starts))

    def _inputs(self, input_ids: Tensor, starts: Tensor) -> dict[str, Any]:
        width = input_ids.shape[1]
        positions = starts[:, None] + torch.arange(width, device=input_ids.device)  # (batch, new)
        # One host sync a forward, to look at no more slots than are in use; static shapes need none (and more compute).
        extent = min(int(starts.max()) + width, self.max_length)
        for layer in self.layers:
            layer.slots = positions.clamp(max=self.max_length)
            layer.extent = extent
        keys = torch.arange(extent, device=input_ids.device)
        return {
            "input_ids": input_ids,
            "position_ids": positions.clamp(max=self.max_length - 1),
            "attention_mask": attention_mask_for(self.model, (keys <= positions[..., None])[:, None]),
            "past_key_values": self.cache,
            "use_cache": True,
        }
