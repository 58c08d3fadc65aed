# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Kernels for kernels/test_compile.py: two may read data before it is written, and one may not."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def never(x, weight, y):
    tl.store(y, tl.load(x) * tl.load(weight))


@triton.jit
def too_late(x, weight, y):
    product = tl.load(x) * tl.load(weight)
    gdc_wait()
    tl.store(y, product)


@triton.jit
def in_time(x, weight, y):
    w = tl.load(weight)
    gdc_wait()
    tl.store(y, tl.load(x) * w)
