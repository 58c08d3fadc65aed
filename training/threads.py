"""The threads of one process in training. One runs the draft a batch ahead, and the heads of a sweep learn in parallel.

A thread takes the next piece of work: a batch of the draft, or one head. A small draft is soon a batch ahead, and then
all threads work on heads. Each piece is computed by one thread with the same operations, so the results have the same
bits for any number of threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader

Item = TypeVar("Item")
Result = TypeVar("Result")
Count = int | Literal["auto"]

MOST_THREADS = 8  # with `auto`: threads share Python's lock, and a container may have fewer cores than it shows


def thread_count(threads: Count, *, processes: int) -> int:
    """Number of threads in each of this host's `processes`.

    `auto`: the process's share of cores, at most MOST_THREADS, and at most OMP_NUM_THREADS if set.
    """
    return min(share_of_cores(processes), MOST_THREADS) if threads == "auto" else threads


def share_of_cores(processes: int) -> int:
    """Cores for each of this host's `processes`, at most OMP_NUM_THREADS if set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // processes, int(allowed) if allowed.isdecimal() else cores))


class Threads:
    """A pool of `count` threads. With a count of 1 the caller's thread does all work."""

    def __init__(self, count: int = 1):
        self.count = count
        # By default, a new thread splits its matrix products over OpenMP's default number of threads.
        self.pool = ThreadPoolExecutor(count, "training", torch.set_num_threads, (1,)) if count > 1 else None

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results in the order of the items, computed without gradients and without the caller's autocast.

        A single item runs in the caller's thread. Raises the error of the first item that fails.
        """

        def without_gradients(item: Item) -> Result:
            with torch.no_grad():  # applies to this thread only
                return work(item)

        if self.pool is None or len(items) == 1:
            return [without_gradients(item) for item in items]
        return list(self.pool.map(without_gradients, items))


class ReadAhead:
    """Applies `read` to the batches of `loader` in one of the threads, one batch ahead of the consumer."""

    def __init__(self, loader: DataLoader, read: Callable[[Any], Any], threads: Threads):
        self.loader, self.read, self.threads = loader, read, threads

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield each result. An error of `read` is raised at its batch's turn."""
        assert self.threads.pool is not None
        ahead: deque[Future[Any]] = deque()
        try:
            for batch in self.loader:
                ahead.append(self.threads.pool.submit(self.read, batch))
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for left in ahead:
                left.cancel()
            wait(ahead)
