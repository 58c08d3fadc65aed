"""Values that several positions read: worked on once each, and their gradients summed.

Alternatives are drawn from one state, and the same few tokens are drawn again and again: a product with every state or
embedding once is several times cheaper than one with a copy of it for every position.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor


class SharedRows:
    """values: (m, …), each read by any number of the n positions. index: (n,), which of them each reads; None where
    n is m, and each reads its own."""

    def __init__(self, values: Tensor, index: Tensor | None = None):
        self.values, self.index = values, index
        if index is not None:
            ascending, self._order = index.sort(stable=True)
            self._starts = torch.searchsorted(ascending, torch.arange(len(values), device=index.device))

    def to(self, dtype: torch.dtype) -> SharedRows:
        """The values in that dtype; read by the same positions."""
        other = copy(self)  # who reads what need not be sorted again
        other.values = self.values.to(dtype)
        return other

    def spread(self, of_each: Tensor) -> Tensor:
        """(m, channels) → (n, channels): to each position, what was made of the value that it reads."""
        return of_each if self.index is None else of_each.index_select(0, self.index)

    def summed(self, of_positions: Tensor) -> Tensor:
        """(n, channels) → (m, channels): over the positions that read each value, in their order; 0 where none does."""
        if self.index is None:
            return of_positions
        if not len(self.index):
            return of_positions.new_zeros(len(self.values), of_positions.shape[-1])
        # The fastest of torch's sums by group on both CPU and GPU, and the only one with one order on a GPU.
        return F.embedding_bag(self._order, of_positions, self._starts, mode="sum")
