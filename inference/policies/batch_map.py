"""Draft as many tokens as suit the number of rows that are decoded together."""

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
    """K by the number of live rows, the same for all of them; 0 = do not speculate (Su et al., arXiv 2310.18813; vLLM's
    Dynamic SD). Global by design: what a row drafts depends on how many rows are around it, and on nothing else.

    table: rows (from, to, K) of batch sizes, both ends included, under vLLM's rules: the first starts at 1 and none
    overlap; a gap has the K before it, and what is above the last row has the last K.
    """

    capture = Capture(read=("starts", "draft_lengths"))

    def __init__(self, table: Sequence[Sequence[int]]):
        """Raises InputError naming the row of the table that is wrong."""
        self.table = checked_table(table)
        self.max_draft_tokens = max(k for _, _, k in self.table)
        # Each batch size from a start to the next one; 0 rows draft nothing.
        self.starts = torch.tensor([0, *(start for start, _, _ in self.table)])
        self.draft_lengths = torch.tensor([0, *(k for _, _, k in self.table)])

    def start(self, batch: int, device: torch.device) -> None:
        self.starts, self.draft_lengths = self.starts.to(device), self.draft_lengths.to(device)

    def start_round(self, live: Tensor) -> Tensor:
        rows = live.sum().repeat(len(live))  # an index of no dimension would be read by the host
        return self.draft_lengths[torch.searchsorted(self.starts, rows, right=True) - 1]
