"""Set the draft length by the number of rows that are decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from accept_head.inference.costs.batch_table import checked_table, read_batch_table
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.spec import named
from accept_head.inference.policy import RowPolicy


@named(
    "batch-map",
    "FILE",
    "vLLM's dynamic K: a table from the number of rows to K",
    lambda text: read_batch_table(Path(text)),
)
class BatchMapPolicy(RowPolicy):
    """Draft K tokens in all rows, K by the number of live rows; 0 = do not speculate (Su et al., arXiv 2310.18813;
    vLLM's Dynamic SD). Global by design: the draft length depends on the number of live rows only.

    table: rows (from, to, K) of batch sizes, both ends included. vLLM's rules hold: the first row starts at 1, and rows
    do not overlap. A gap has the K of the row before it; sizes above the last row have the last K.
    """

    capture = Capture(read=("starts", "draft_lengths"))

    def __init__(self, table: Sequence[Sequence[int]]):
        """Raises InputError naming the wrong row of the table."""
        self.table = checked_table(table)
        self.max_draft_tokens = max(k for _, _, k in self.table)
        # draft_lengths[i] holds from starts[i] to the next start; 0 rows draft nothing.
        self.starts = torch.tensor([0, *(start for start, _, _ in self.table)])
        self.draft_lengths = torch.tensor([0, *(k for _, _, k in self.table)])

    def start(self, batch: int, device: torch.device) -> None:
        self.starts, self.draft_lengths = self.starts.to(device), self.draft_lengths.to(device)

    def start_round(self, live: Tensor) -> Tensor:
        rows = live.sum().repeat(len(live))  # a 0-dimensional index would make the host wait for its value
        return self.draft_lengths[torch.searchsorted(self.starts, rows, right=True) - 1]
