"""When memory runs out, the same work is done in halves, with the same result.

The work must be divisible: the results of `run(start, stop)` for neighbouring ranges, one after the other, must equal
the result for the whole range. respond and score ensure this, each in its own way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from accept_head.errors import InputError

REMEDY = "lower --max_new_tokens, or spread the target with --device_map auto"


class Halving:
    """Does work on a batch of rows, in halves when memory runs out, and remembers how many rows fit.

    doing: name of the work in messages. remedy: what the user can do when not even one row fits.
    """

    def __init__(self, doing: str, remedy: str):
        self.doing, self.remedy = doing, remedy
        self.most: int | None = None  # most rows to try at once; None: no limit known

    def __call__(self, rows: int, run: Callable[[int, int], list[Any]]) -> list[Any]:
        """`run(0, rows)`, or the same from smaller ranges. Raises InputError when one row does not fit."""
        done: list[Any] = []
        while len(done) < rows:
            stop = min(rows, len(done) + (self.most or rows))
            part = self._try(run, len(done), stop)
            if part is None:
                self.most = half(self.doing, stop - len(done), self.remedy)
            else:
                done += part
        return done

    def _try(self, run: Callable[[int, int], list[Any]], start: int, stop: int) -> list[Any] | None:
        """The result, or None when memory ran out. The error is not kept, because its traceback holds tensors."""
        try:
            return run(start, stop)
        except RuntimeError as error:
            if ran_out_of_memory(error):
                return None
            raise


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether this is an error of an allocator; the CPU's has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def half(doing: str, rows: int, remedy: str) -> int:
    """Half of the rows, for the next attempt. Raises InputError when there is one row."""
    clear_device_cache(garbage_collection=True)
    if rows == 1:
        raise InputError(f"out of memory while {doing} with a single prompt in the batch: {remedy}")
    print(
        f"accept-head: out of memory while {doing} with {rows} prompts together; going on with {rows // 2}",
        file=sys.stderr,
        flush=True,
    )
    return rows // 2
