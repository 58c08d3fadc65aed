"""The threads of one process in training: the draft reads ahead while heads learn, and heads of a sweep learn at once.

They take whatever there is to do, a batch of the draft or a head: a small draft is soon a batch ahead, and then all of
them have heads. Each of these is one thread's own work, done by the operations that it always is: what comes of it has
the same bits on any number of threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, Protocol, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Count = int | Literal["auto"]

MOST_THREADS = 8  # of `auto`: they share Python's lock, and a container may have fewer cores than it shows


def thread_count(threads: Count, *, processes: int) -> int:
    """Threads of each of this host's `processes`. `auto`: its share of cores, at most MOST_THREADS, and at most
    OMP_NUM_THREADS where that is set."""
    return min(share_of_cores(processes), MOST_THREADS) if threads == "auto" else threads


def share_of_cores(processes: int) -> int:
    """Cores of each of this host's `processes`, at most OMP_NUM_THREADS where that is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // processes, int(allowed) if allowed.isdecimal() else cores))


class Threads:
    """count: of them. With one there are none but the caller's."""

    def __init__(self, count: int = 1):
        self.count = count
        # A new thread would split its matrix products over OpenMP's default.
        self.pool = ThreadPoolExecutor(count, "training", torch.set_num_threads, (1,)) if count > 1 else None

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results in the order of the items, without gradients; the caller's autocast does not reach the threads.
        One item is the caller's own. Raises what the first failing one raises."""

        def without_gradients(item: Item) -> Result:
            with torch.no_grad():  # of this thread only
                return work(item)

        if self.pool is None or len(items) == 1:
            return [without_gradients(item) for item in items]
        return list(self.pool.map(without_gradients, items))


class Sized(Protocol):
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


class ReadAhead:
    """The batches of `loader` as `read` makes them, by one of the threads, one batch ahead of who asks for them."""

    def __init__(self, loader: Sized, read: Callable[[Any], Any], threads: Threads):
        self.loader, self.read, self.threads = loader, read, threads

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Raises what `read` raises, at the batch's turn."""
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
