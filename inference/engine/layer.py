"""One layer's keys and values in the ragged cache, and the place where the next forward writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


@dataclass
class WritePlace:
    """Where the next forward writes; shared by all layers of a model.

    slots: (rows, new). rows: (rows,) the batch rows that take part; None = all. extent: slots in use. whole: give
    attention all slots of all rows, because its kernel selects the visible ones. packed: of a packed forward, the row
    and slot of each token, (tokens,) each.
    """

    slots: Tensor
    rows: Tensor | None = None
    extent: int = 0
    whole: bool = False
    packed: tuple[Tensor, Tensor] | None = None


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, (batch, heads, capacity, head_dim), written at `place`."""

    is_compileable = True

    def __init__(self, batch: int, capacity: int, place: WritePlace):
        super().__init__()
        self.batch, self.capacity, self.place = batch, capacity, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, _ = key_states.shape
        self.keys = key_states.new_zeros(self.batch, heads, self.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(self.batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, new, head_dim), or (1, heads, tokens, head_dim) if packed → the rows' keys and values
        below `extent`, or the `whole` cache."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        slots = self.place.slots.to(key_states.device)  # with a device map, layers are on several devices
        rows = None if self.place.rows is None else self.place.rows.to(slots.device)
        if self.place.packed is not None:
            row, slot = self.place.packed
            where = row, slice(None), slot
            self.keys[where], self.values[where] = (t[0].transpose(0, 1) for t in (key_states, value_states))
        elif rows is None and slots.device.type != "cpu":
            index = slots[:, None, :, None]
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand(value_states.shape), value_states)
        else:  # on a CPU in bfloat16, torch's scatter_ copies all that it writes into
            where = (torch.arange(self.batch) if rows is None else rows)[:, None], slice(None), slots
            self.keys[where], self.values[where] = (t.transpose(1, 2) for t in (key_states, value_states))
        if rows is None or self.place.whole:
            extent = self.capacity if self.place.whole else self.place.extent
            return self.keys[:, :, :extent], self.values[:, :, :extent]
        return self.keys[rows, :, : self.place.extent], self.values[rows, :, : self.place.extent]

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was. The batch may shrink."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = (t.index_select(0, rows.to(t.device)) for t in (self.keys, self.values))
        self.batch = len(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.extent, 0

    def get_seq_length(self) -> int:
        return self.place.extent

    def get_max_length(self) -> int:
        return self.capacity
