"""Out of memory is no reason to stop: the same work in halves, with the same result.

The work must be divisible: `run(start, stop)` of neighbouring ranges must give, one after the other, what it gives of
the whole. respond and score see to that, each in its own way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from accept_head.errors import InputError


class Halving:
    """Does work on a batch of rows, in halves when memory runs out, and remembers how many rows fit.

    doing: what a message calls the work. remedy: what the user can do when not even one row fits.
    """

    def __init__(self, doing: str, remedy: str):
        self.doing, self.remedy = doing, remedy
        self.most: int | None = None  # rows that fit, as far as known

    def __call__(self, rows: int, run: Callable[[int, int], list[Any]]) -> list[Any]:
        """`run(0, rows)`, or the same from smaller ranges. Raises InputError when one row does not fit."""
        done: list[Any] = []
        while len(done) < rows:
            stop = min(rows, len(done) + (self.most or rows))
            part = self._try(run, len(done), stop)
            if part is None:
                self._halve(stop - len(done))
            else:
                done += part
        return done

    def _try(self, run: Callable[[int, int], list[Any]], start: int, stop: int) -> list[Any] | None:
        """The result, or None when memory ran out. The error is dropped on return: its traceback holds tensors."""
        try:
            return run(start, stop)
        except RuntimeError as error:  # a CPU's allocator has no class of its own for it
            if isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error):
                return None
            raise

    def _halve(self, rows: int) -> None:
        clear_device_cache(garbage_collection=True)
        if rows == 1:
            raise InputError(f"out of memory while {self.doing} with a single prompt in the batch: {self.remedy}")
        self.most = rows // 2
        print(
            f"accept-head: out of memory while {self.doing} with {rows} prompts together; going on with {self.most}, "
            "which changes no record",
            file=sys.stderr,
            flush=True,
        )
