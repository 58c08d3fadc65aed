# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Products of a few rows of states with a matrix of weights. Each weight is read once. Used by head.py."""

from __future__ import annotations

import triton
import triton.language as tl

WARPS = tl.constexpr(4)  # per program
LINE, LINES = tl.constexpr(64), tl.constexpr(16)  # bfloat16 numbers in a cache line (128 bytes); lines at once


@triton.jit
def product(
    left,
    offsets,
    valid,
    weight,
    first,
    channel,
    channels,
    size,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
):
    """(ROWS, CHANNELS): rows of `left` that begin at `offsets`, times the rows `channel` of `weight` (channels, size).

    first: the result of `ahead`. Without DOT, all products are float32. This is fastest for one row, because its first
    weights are already loaded. With DOT, tensor cores multiply, and 16 rows take as long as one. Each of WARPS warps
    has its share of BLOCK numbers, because one product waits for the one before. Weights are then bfloat16. A number of
    `left` in another dtype becomes two bfloat16 numbers: the nearest one and the remainder.
    """
    if DOT:
        total = tl.zeros((WARPS, ROWS, CHANNELS), tl.float32)
        share = tl.arange(0, WARPS)[:, None] * (BLOCK // WARPS) + tl.arange(0, BLOCK // WARPS)[None, :]
        from_left = left + offsets[None, :, None]
        from_weight = weight + channel.to(tl.int64)[None, :, None] * size
        for start in range(0, size, BLOCK):
            k = (start + share)[:, None, :]
            a = tl.load(from_left + k, mask=valid[None, :, None] & (k < size), other=0.0)
            w = tl.load(from_weight + k, mask=(channel < channels)[None, :, None] & (k < size), other=0.0)
            w = tl.trans(w, (0, 2, 1))
            near = a.to(w.dtype)
            total = tl.dot(near, w, total)
            if left.dtype.element_ty != weight.dtype.element_ty:
                total = tl.dot((a.to(tl.float32) - near.to(tl.float32)).to(w.dtype), w, total)
        return tl.sum(total, 0)
    else:
        parts = tl.zeros((ROWS, CHANNELS, BLOCK), tl.float32)  # summed once, at the end
        w = first
        for start in range(0, size, BLOCK):
            k = start + tl.arange(0, BLOCK)
            a = tl.load(left + offsets[:, None] + k[None, :], mask=valid[:, None] & (k < size)[None, :], other=0.0)
            parts += a.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
            w = _weights(weight, channel, channels, size, start + BLOCK, BLOCK)
        return tl.sum(parts, 2)


@triton.jit
def ahead(weight, channel, channels, size, BLOCK: tl.constexpr, DOT: tl.constexpr, EARLY: tl.constexpr):
    """Load the first of these weights. With DOT, prefetch the weights into the cache instead, if EARLY."""
    if DOT:
        if EARLY:
            for start in range(0, size, LINES * LINE):
                k = tl.minimum(start + tl.arange(0, LINES) * LINE, size - 1)
                at = tl.minimum(channel, channels - 1).to(tl.int64)[:, None] * size + k[None, :]
                _fetch(weight + at)
        return 0
    else:
        return _weights(weight, channel, channels, size, 0, BLOCK)


@triton.jit
def _fetch(pointers):
    """Prefetch memory into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _weights(weight, channel, channels, size, start, BLOCK: tl.constexpr):
    """BLOCK numbers from place `start` on in the rows `channel` of `weight` (channels, size); 0 outside."""
    k = start + tl.arange(0, BLOCK)
    inside = (channel < channels)[:, None] & (k < size)[None, :]
    return tl.load(weight + channel.to(tl.int64)[:, None] * size + k[None, :], mask=inside, other=0.0)
