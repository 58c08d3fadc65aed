"""What a decode loop spends time on, for policies that weigh costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """verifies_padding: the target verifies as many tokens of every row as of the longest draft. drafts_stopped: rows
    that have stopped are fed to the draft as well, as long as another row drafts. feeds: the draft's first forward also
    runs in a round without drafts."""

    verifies_padding: bool
    drafts_stopped: bool
    feeds: bool


PADDED = Host(verifies_padding=True, drafts_stopped=True, feeds=False)  # our loop, where it has fixed shapes
PACKED = Host(verifies_padding=False, drafts_stopped=False, feeds=False)  # our loop on a CPU
VLLM_V1 = Host(verifies_padding=False, drafts_stopped=True, feeds=False)  # vLLM's model runners
VLLM_V2 = Host(verifies_padding=False, drafts_stopped=True, feeds=True)
