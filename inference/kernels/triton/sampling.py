# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Triton kernels of top-k, softmax and draws, for a few rows of logits; kernels/sampling.py launches them.

As in signals.py, a row is split among programs, and the last one to end combines the results of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accept_head.inference.kernels.triton.sync import is_last

LEAST = tl.constexpr(float("-inf"))
FEW, CHUNK = tl.constexpr(128), tl.constexpr(1024)  # most numbers to sort; numbers read at a time


@triton.jit
def lower_bound(
    logits, maxima, bound, top, done, vocab, row_stride, k, GROUPS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr
):
    """bound (rows,): the k-th largest of the maxima of groups of logits; −inf if there are fewer than k groups.

    At least k logits of the row reach it, and fewer than k · BLOCK / GROUPS exceed it. top (rows,): the largest logit.

    Grid (rows, splits). maxima: (rows, splits, GROUPS) float32. done: (rows,) int32, 0. ALL: a power of two, at least
    splits · GROUPS.
    """
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=LEAST).to(tl.float32)
    of_group = tl.max(tl.reshape(x, (GROUPS, BLOCK // GROUPS)), 1)
    to = (row * splits + split) * GROUPS + tl.arange(0, GROUPS)
    tl.store(maxima + to, of_group)
    if is_last(done + row, splits):
        at = tl.arange(0, ALL)
        largest = tl.load(
            maxima + row * splits * GROUPS + at, mask=at < splits * GROUPS, other=LEAST, cache_modifier=".cg"
        )
        tl.store(bound + row, _kth(largest, k, ALL))
        tl.store(top + row, tl.max(largest, 0))


@triton.jit
def kth_largest(
    logits, bound, top, candidates, counts, done, kth, inverse, vocab, row_stride, cold, k,
    BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """kth (rows,): the k-th largest logit. inverse (rows,): 1 / Σ exp((x − top) · cold) over all logits x ≥ kth.

    Grid (rows, splits). bound, top: from `lower_bound`. candidates: (rows, MOST) float32, space for all logits above
    the bound. counts: (rows, 2) int32, 0: how many logits are above the bound, and how many equal it. done: (rows,)
    int32, 0.
    """
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=LEAST).to(tl.float32)
    least = tl.load(bound + row)
    above = (x > least).to(tl.int32)
    equal = tl.sum(((x == least) & inside).to(tl.int32), 0)
    count = tl.sum(above, 0)
    if count > 0:
        begin = tl.atomic_add(counts + row * 2, count, sem="relaxed")
        place = row.to(tl.int64) * MOST + begin + tl.cumsum(above, 0) - 1
        tl.store(candidates + place, x, mask=above > 0)
    if equal > 0:
        tl.atomic_add(counts + row * 2 + 1, equal, sem="relaxed")
    if is_last(done + row, splits):
        found = tl.load(counts + row * 2, cache_modifier=".cg")
        equals = tl.load(counts + row * 2 + 1, cache_modifier=".cg")
        begin = candidates + row.to(tl.int64) * MOST
        highest = tl.load(top + row)
        last = least  # when fewer than k logits exceed the bound
        if found >= k:
            if found <= FEW:
                at = tl.arange(0, FEW)
                last = _kth(tl.load(begin + at, mask=at < found, other=LEAST, cache_modifier=".cg"), k, FEW)
            else:
                last = _kth_of_many(begin, found, k)
        total = 0.0
        for chunk in range(0, found, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            x = tl.load(begin + at, mask=at < found, other=LEAST, cache_modifier=".cg")
            total += tl.sum(tl.where((x >= last) & (at < found), tl.exp((x - highest) * cold), 0.0), 0)
        if (found < k) & (least > LEAST):
            total += equals.to(tl.float32) * tl.exp((least - highest) * cold)
        tl.store(kth + row, last)
        tl.store(inverse + row, 1.0 / total)
        tl.store(counts + row * 2, 0)
        tl.store(counts + row * 2 + 1, 0)


@triton.jit
def _kth(x, k, SIZE: tl.constexpr):
    """The k-th largest of SIZE numbers; −inf if there are fewer."""
    in_order = tl.sort(x, 0, True)
    return tl.max(tl.where(tl.arange(0, SIZE) == k - 1, in_order, LEAST), 0)


@triton.jit
def _kth_of_many(numbers, count, k):
    """The k-th largest of `count` numbers in memory, by 32 steps of bisection over integers in the same order."""
    low, high = tl.full((), -2147483648, tl.int64), tl.full((), 2147483647, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        reach = tl.full((), 0, tl.int32)
        for chunk in range(0, count, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            x = tl.load(numbers + at, mask=at < count, other=LEAST, cache_modifier=".cg").to(tl.int32, bitcast=True)
            x = x ^ ((x >> 31) & 0x7FFFFFFF)
            reach += tl.sum(((x.to(tl.int64) >= middle) & (at < count)).to(tl.int32), 0)
        low = tl.where(reach >= k, middle, low)
        high = tl.where(reach >= k, high, middle - 1)
    found = low.to(tl.int32)
    return (found ^ ((found >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def write_softmax(
    logits, kth, top, inverse, largest, signals, q, vocab, row_stride, cold, FILTERED: tl.constexpr, BLOCK: tl.constexpr
):
    """q (rows, vocab): exp((x − top) · cold) · inverse for each logit x; if FILTERED, 0 for x below the k-th.

    If not FILTERED, top is the logit of the token `largest`, and inverse is the third of `signals`, both from
    `logits_signals`. Grid (rows, splits).
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + token, mask=token < vocab, other=LEAST).to(tl.float32)
    if FILTERED:
        share = tl.exp((x - tl.load(top + row)) * cold) * tl.load(inverse + row)
        share = tl.where(x >= tl.load(kth + row), share, 0.0)
    else:
        highest = tl.load(logits + row * row_stride + tl.load(largest + row)).to(tl.float32)
        share = tl.exp((x - highest) * cold) * tl.load(signals + row * 3 + 2)
    tl.store(q + row * vocab + token, share, mask=token < vocab)


@triton.jit
def draw_tokens(
    weights, uniforms, sums, done, ids, vocab, row_stride, uniform_stride, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):
    """ids (rows,): the first token where the cumulative weight exceeds the share `uniforms` (rows,) of the total.

    When rounding leaves no such token: the last one with a positive weight. Sums and uniforms are float64.

    Grid (rows, splits). weights: (rows, vocab), not negative. sums: (rows, splits) float64. done: (rows,) int32, 0.
    SPLITS: a power of two, at least splits.
    """
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    part = tl.arange(0, BLOCK)
    begin = weights + row.to(tl.int64) * row_stride
    token = split * BLOCK + part
    weight = tl.load(begin + token, mask=token < vocab, other=0.0).to(tl.float64)
    tl.store(sums + row * splits + split, tl.sum(weight, 0))
    if is_last(done + row, splits):
        at = tl.arange(0, SPLITS)
        sum_of = tl.load(sums + row * splits + at, mask=at < splits, other=0.0, cache_modifier=".cg")
        chosen, before, threshold = part_of_draw(sum_of, tl.load(uniforms + row * uniform_stride), SPLITS)
        token = chosen * BLOCK + part
        weight = tl.load(begin + token, mask=token < vocab, other=0.0).to(tl.float64)
        tl.store(ids + row, (chosen * BLOCK + token_of_draw(weight, before, threshold, BLOCK)).to(tl.int64))


@triton.jit
def part_of_draw(sum_of, uniform, SPLITS: tl.constexpr):
    """(the part that a draw falls in, the sum of the parts before, the threshold to exceed), from the parts' sums."""
    at = tl.arange(0, SPLITS)
    up_to = tl.cumsum(sum_of, 0)
    threshold = uniform * tl.max(up_to, 0)
    weighty = tl.max(tl.where(sum_of > 0, at, 0), 0)
    chosen = tl.minimum(tl.min(tl.where((up_to > threshold) & (sum_of > 0), at, SPLITS), 0), weighty)
    return chosen, tl.sum(tl.where(at < chosen, sum_of, 0.0), 0), threshold


@triton.jit
def token_of_draw(weight, before, threshold, BLOCK: tl.constexpr):
    """The token of the part that a draw falls on. When rounding leaves none: the last one with a positive weight."""
    part = tl.arange(0, BLOCK)
    reached = (before + tl.cumsum(weight, 0) > threshold) & (weight > 0)
    first = tl.min(tl.where(reached, part, BLOCK), 0)
    return tl.minimum(first, tl.max(tl.where(weight > 0, part, 0), 0))
