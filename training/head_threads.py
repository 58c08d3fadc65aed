"""The heads of a sweep on several threads of one process.

A step of `train` runs on one thread, so that its results do not depend on the machine. The heads of a sweep do not
depend on one another either: several at once, each on a thread of its own, have the very bits they have in turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

HeadThreadCount = int | Literal["auto"]


class HeadThreads:
    """count: heads that learn at once. With one there are no threads but the caller's."""

    def __init__(self, count: int = 1):
        self.count = count
        # A new thread would split its matrix products over OpenMP's default.
        self._pool = ThreadPoolExecutor(count, "head", torch.set_num_threads, (1,)) if count > 1 else None

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results in the order of the items, without gradients; the caller's autocast does not reach the threads.
        Raises what the first failing one raises."""

        def without_gradients(item: Item) -> Result:
            with torch.no_grad():  # of this thread only
                return work(item)

        if self._pool is None or len(items) == 1:
            return [without_gradients(item) for item in items]
        return list(self._pool.map(without_gradients, items))


def settled(count: HeadThreadCount, heads: int, *, use_cpu: bool, processes: int) -> int:
    """How many threads the `heads` of a run get, in each of this host's `processes`.

    `auto`: this host's share of cores, of which OMP_NUM_THREADS, where it is set, is the most; never more than heads.
    On a GPU one thread keeps the device busy.
    """
    if not use_cpu:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    most = min(cores // processes, int(allowed) if allowed.isdecimal() else cores) if count == "auto" else count
    return max(1, min(most, heads))
