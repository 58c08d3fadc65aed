# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Triton kernels of verification: which candidates are accepted, and which token follows them (docs/theory.md §1).

kernels/verify.py launches them. As in signals.py, a row is split among programs, and the last one to end combines the
results of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accept_head.inference.kernels.triton.sampling import part_of_draw, token_of_draw
from accept_head.inference.kernels.triton.sync import is_last


@triton.jit
def accept_by_ratio(
    p, q, candidates, drafted, uniforms, redraws, acceptance, accepted, ids, sums, done, vocab, slots,
    p_row, p_slot, q_row, q_slot, candidates_row, uniforms_row, redraws_row,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """acceptance (rows, slots): min(1, p(Y) / q(Y)) of each candidate. accepted (rows,): number of candidates before
    the first one whose uniform number is not below its acceptance. ids (rows,): the token after them. It is drawn by
    `redraws` from [p − q]₊ at the rejected candidate, or from p when all are accepted or p is nowhere above q.

    Grid (rows, splits). p: (rows, slots + 1, vocab) float32. q: (rows, slots, vocab) float32. candidates: (rows,
    slots); a row uses the first `drafted` (rows,). uniforms: (rows, slots) float64. redraws: (rows,) float64. sums:
    (rows, 2, splits) float64. done: (rows,) int32, 0. SLOTS, SPLITS: powers of two, at least slots and splits.
    """
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot, count = tl.arange(0, SLOTS), tl.load(drafted + row)
    inside = slot < slots
    y = tl.load(candidates + row * candidates_row + slot, mask=inside, other=0)
    p_of_y = tl.load(p + row * p_row + slot * p_slot + y, mask=inside, other=0.0)
    q_of_y = tl.load(q + row * q_row + slot * q_slot + y, mask=inside, other=1.0)
    ratio = tl.where(q_of_y > 0, tl.div_rn(p_of_y, tl.where(q_of_y > 0, q_of_y, 1.0)), 0.0)
    ratio = tl.minimum(ratio, 1.0)
    number = tl.load(uniforms + row * uniforms_row + slot, mask=inside, other=1.0)
    first = _leading(number < ratio.to(tl.float64), slot, count, slots)

    part = tl.arange(0, BLOCK)
    p_begin = p + row * p_row + first * p_slot
    q_begin = q + row * q_row + tl.minimum(first, slots - 1) * q_slot
    rejected = first < count
    of_p, of_residual = _weights(p_begin, q_begin, split * BLOCK + part, vocab, rejected)
    tl.store(sums + row * 2 * splits + split, tl.sum(of_p, 0))
    tl.store(sums + (row * 2 + 1) * splits + split, tl.sum(of_residual, 0))
    if split == 0:
        tl.store(acceptance + row * slots + slot, ratio, mask=inside)
        tl.store(accepted + row, first.to(tl.int64))
    if is_last(done + row, splits):
        at = tl.arange(0, SPLITS)
        sum_of = tl.load(sums + (row * 2 + 1) * splits + at, mask=at < splits, other=0.0, cache_modifier=".cg")
        from_residual = tl.max(sum_of, 0) > 0
        if not from_residual:
            sum_of = tl.load(sums + row * 2 * splits + at, mask=at < splits, other=0.0, cache_modifier=".cg")
        chosen, before, threshold = part_of_draw(sum_of, tl.load(redraws + row * redraws_row), SPLITS)
        of_p, of_residual = _weights(p_begin, q_begin, chosen * BLOCK + part, vocab, rejected)
        found = token_of_draw(tl.where(from_residual, of_residual, of_p), before, threshold, BLOCK)
        tl.store(ids + row, (chosen * BLOCK + found).to(tl.int64))


@triton.jit
def accept_by_match(
    targets, candidates, drafted, accepted, ids, slots, targets_row, candidates_row, SLOTS: tl.constexpr
):
    """accepted (rows,): number of candidates before the first one that is not the target's token. ids (rows,): the
    target's token there.

    Grid (rows,). targets: (rows, slots + 1). candidates: (rows, slots); a row uses the first `drafted` (rows,). SLOTS:
    a power of two, at least slots.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    theirs = tl.load(targets + row * targets_row + slot, mask=slot < slots, other=-1)
    ours = tl.load(candidates + row * candidates_row + slot, mask=slot < slots, other=-2)
    first = _leading(theirs == ours, slot, tl.load(drafted + row), slots)
    tl.store(accepted + row, first.to(tl.int64))
    tl.store(ids + row, tl.load(targets + row * targets_row + first))


@triton.jit
def _leading(passed, slot, count, slots):
    """How many of a row's `count` candidates passed before the first that did not."""
    return tl.min(tl.where(passed & (slot < count), slots, slot), 0)


@triton.jit
def _weights(p, q, token, vocab, rejected):
    """(p, [p − q]₊ if `rejected`, else 0) of some tokens, in float64."""
    of_p = tl.load(p + token, mask=token < vocab, other=0.0)
    looked_at = tl.where(rejected, vocab, 0)
    of_q = tl.load(q + token, mask=token < looked_at, other=0.0)
    positive = tl.where(token < looked_at, tl.maximum(of_p - of_q, 0.0), 0.0)
    return of_p.to(tl.float64), positive.to(tl.float64)
