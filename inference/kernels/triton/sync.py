# mypy: disable-error-code="import-not-found, no-untyped-def"
"""How programs of one launch, and successive launches, wait for each other.

EARLY: the kernel may begin before the previous kernel has ended (programmatic dependent launch, on Hopper and later).
Until then it reads only weights, which no kernel writes. It waits before it touches other memory. It lets the next
kernel begin at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the next kernel begin."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended and its results can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def is_last(done, programs):
    """Whether this is the last of these programs, so that the results of all others can be read. Then resets `done`."""
    tl.debug_barrier()  # all threads' stores come before the count, which one thread does for all
    last = tl.atomic_add(done, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(done, 0)
    return last
