# mypy: disable-error-code="import-not-found, no-untyped-def"
"""How programs of one launch, and launches that follow each other, wait for one another.

EARLY: the kernel is launched so that it may begin before the one ahead of it has ended (programmatic dependent launch,
of Hopper and later). Until that has ended it only reads weights, which no kernel writes; it waits before it touches
anything else. It lets the one behind it begin at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The kernel behind this one may begin."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Until the kernel ahead of this one has ended, and all that it wrote can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def is_last(done, programs):
    """Whether all others of these programs have written what they leave. `done` is 0 again after the last."""
    tl.debug_barrier()  # every thread's stores come before the count, which one thread does for all
    last = tl.atomic_add(done, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(done, 0)
    return last
