"""Values that several positions share. Each is computed once, and its gradients are summed.

All alternatives of a place are drawn from one state, and the same few tokens are drawn often. One product for each
state or embedding is several times cheaper than one for every position.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor


class SharedRows:
    """m values, each read by any number of n positions.

    values: (m, …). index: (n,), the value that each position reads; None: n = m and position i reads value i.
    """

    def __init__(self, values: Tensor, index: Tensor | None = None):
        self.values, self.index = values, index
        if index is not None:
            ascending, self._order = index.sort(stable=True)
            self._starts = torch.searchsorted(ascending, torch.arange(len(values), device=index.device))

    def to(self, dtype: torch.dtype) -> SharedRows:
        """The values in this dtype, read by the same positions."""
        other = copy(self)  # keeps the sorted order of the positions
        other.values = self.values.to(dtype)
        return other

    def spread(self, of_each: Tensor) -> Tensor:
        """(m, channels) → (n, channels): give each position the result for its value."""
        return of_each if self.index is None else of_each.index_select(0, self.index)

    def summed(self, of_positions: Tensor) -> Tensor:
        """(n, channels) → (m, channels): sum over the positions that read each value, in order. 0 if there are none."""
        if self.index is None:
            return of_positions
        if not len(self.index):
            return of_positions.new_zeros(len(self.values), of_positions.shape[-1])
        # The fastest of torch's grouped sums on both CPU and GPU, and the only one with a fixed order on a GPU.
        return F.embedding_bag(self._order, of_positions, self._starts, mode="sum")
