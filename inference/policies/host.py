"""Properties of a decode loop that a cost-aware policy must know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """How a decode loop spends time. padded: the target verifies as many tokens of every row as of the longest draft.
    feeds: the draft's first forward also runs in a round without drafts."""

    padded: bool
    feeds: bool


OURS = Host(padded=True, feeds=False)
VLLM = Host(padded=False, feeds=True)
