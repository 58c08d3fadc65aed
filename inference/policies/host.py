"""What a decode loop costs a policy that goes by costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """What a decode loop spends besides the policy's wishes. padded: the target verifies as many tokens of every row as
    of the row that drafted most. feeds: the draft's first forward takes place in a round without drafts, too.
    in_numpy: it waits for each answer anyway, so the few numbers of a decision are worked out on the CPU by numpy,
    where an operation takes a third of what it takes torch. Else by torch where the policy is, so that CUDA graphs can
    hold it."""

    padded: bool
    feeds: bool
    in_numpy: bool = False


OURS = Host(padded=True, feeds=False)
VLLM = Host(padded=False, feeds=True, in_numpy=True)
