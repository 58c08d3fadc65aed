"""The positions of a micro-batch that heads learn from, with inputs and labels."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accept_head.head.network import AcceptanceHead
from accept_head.training.learn.batches import StateBatch, sent
from accept_head.training.learn.draws import draws


class SharedRows:
    """m values, each read by any number of n positions. Each is computed once, and its gradients are summed.

    All alternatives of a place are drawn from one state, and the same few tokens are drawn often. One product for each
    state or embedding is several times cheaper than one for every position.

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


@dataclass
class Positions:
    """The n positions of a micro-batch with a label for some prediction. Prompts and padding have none.

    states: rows of (places, hidden_size), any float dtype, or of (places, channels) when standardised. Several tokens
    may have been drawn from one state. signals: (n, inputs), normalised; None when the head reads none. embedded: rows
    of (different tokens, hidden_size), from `AcceptanceHead.embedded`; None when the head reads none. accept, reject:
    (n, predictions), the label a and 1 − a, or their sums when several labels are known. Both are 0 where the
    prediction has no label.
    """

    states: SharedRows
    signals: Tensor | None
    embedded: SharedRows | None
    accept: Tensor
    reject: Tensor


def positions_of(batch: StateBatch, axes: Sequence[int], head: AcceptanceHead) -> Positions:
    """The positions of a micro-batch, for any head with the inputs and normalisation of `head`.

    The host selects them while a GPU runs the draft, and queues their copies behind it. axes: labels that heads are
    trained on.
    """
    drawn, device = draws(batch, axes), batch.hidden.device
    embedded = None
    if head.config.reads_embedding:
        ids, index = drawn.ids.unique(return_inverse=True)
        embedded = SharedRows(head.embedded(sent(ids, device)), sent(index, device))
    # A head without an input layer for the state adds to the state, in float32. Such a layer takes the draft's dtype.
    hidden = batch.hidden.float() if head.config.width is None else batch.hidden
    if head.config.standardised:
        hidden = head.state_input(batch.hidden.float())
    return Positions(
        states=SharedRows(hidden, None if drawn.place is None else sent(drawn.place, device)),
        signals=head.normalised(sent(drawn.signals, device)) if head.config.signals else None,
        embedded=embedded,
        accept=sent(drawn.accept, device),
        reject=sent(drawn.reject, device),
    )
