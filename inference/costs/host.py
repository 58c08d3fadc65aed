"""What a decode loop spends time on, for policies that weigh costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accept_head.cost import Quantity


@dataclass(frozen=True)
class Host:
    """verifies_padding: the target verifies as many tokens of every row as of the longest draft. drafts_stopped: rows
    that have stopped are fed to the draft as well, as long as another row drafts. feeds: the draft's first forward also
    runs in a round without drafts. block: tokens that the target multiplies at once, so that a part of a block may take
    as long as a whole one; only where it verifies no padding."""

    verifies_padding: bool
    drafts_stopped: bool
    feeds: bool
    block: int = 1

    def blocks(self, tokens: int, more: Quantity) -> Quantity:
        """Blocks that so many more tokens begin."""
        return -(-(tokens + more) // self.block) - -(-tokens // self.block)

    def slots(self, rows: int, drafted: np.ndarray) -> int:
        """Drafted tokens to verify, with padding or in whole blocks. drafted: of each row, 0 if it is not live."""
        if self.verifies_padding:
            return rows * int(drafted.max())
        return self.block * self.blocks(rows, int(drafted.sum()))


CPU_BLOCK = 16  # tokens that a CPU's matrix unit takes at once (AMX)
PADDED = Host(verifies_padding=True, drafts_stopped=True, feeds=False)  # our loop, where it has fixed shapes
# Our loop on a CPU. It pads as well, but only in a block that is begun anyway.
PACKED = Host(verifies_padding=False, drafts_stopped=False, feeds=False, block=CPU_BLOCK)
VLLM_V1 = Host(verifies_padding=False, drafts_stopped=True, feeds=False)  # vLLM's model runners
VLLM_V2 = Host(verifies_padding=False, drafts_stopped=True, feeds=True)
