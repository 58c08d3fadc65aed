"""Properties of a decode loop that a cost-aware policy must know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """How a decode loop spends time. padded: the target verifies as many tokens of every row as of the longest draft.
    feeds: the draft's first forward also runs in a round without drafts. in_numpy: decide on the CPU with numpy, whose
    operations start faster, because the loop waits for each answer anyway. Else decide with torch on the policy's
    device, so that CUDA graphs can contain the decision."""

    padded: bool
    feeds: bool
    in_numpy: bool = False


OURS = Host(padded=True, feeds=False)
VLLM = Host(padded=False, feeds=True, in_numpy=True)
