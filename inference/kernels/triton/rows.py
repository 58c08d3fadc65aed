# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Triton kernels of the loop's bookkeeping, with one program per row. All but the random numbers are integers.

kernels/rows.py launches them and has the torch reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN, FIRST, SECOND = (
    tl.constexpr(0x9E3779B97F4A7C15),
    tl.constexpr(0xBF58476D1CE4E5B9),
    tl.constexpr(0x94D049BB133111EB),
)


@triton.jit
def uniform_numbers(
    uniforms, keys, rounds, seed, row_stride, purpose_stride, slots, PURPOSES: tl.constexpr, BLOCK: tl.constexpr
):
    """randomness.uniforms(…, key, round, slot, purpose) of each row, for the first `slots` slots of each purpose.

    Grid (rows,). uniforms: (rows, PURPOSES, ≥ slots) float64. keys, rounds: (rows,). seed: (1,), randomness.seed_state.
    BLOCK: a power of two, at least slots · PURPOSES.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    purpose, slot = place // slots, place % slots
    state = _mixed(tl.load(seed).to(tl.uint64, bitcast=True) ^ tl.load(keys + row).to(tl.uint64, bitcast=True))
    state = _mixed(state ^ tl.load(rounds + row).to(tl.uint64, bitcast=True))
    state = _mixed(state ^ slot.to(tl.int64).to(tl.uint64, bitcast=True))
    state = _mixed(state ^ purpose.to(tl.int64).to(tl.uint64, bitcast=True))
    number = (state >> 11).to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³
    at = row * row_stride + purpose * purpose_stride + slot
    tl.store(uniforms + at, number, mask=purpose < PURPOSES)


@triton.jit
def _mixed(state):
    """splitmix64 on uint64, which wraps."""
    state = state + GOLDEN
    state = (state ^ (state >> 30)) * FIRST
    state = (state ^ (state >> 27)) * SECOND
    return state ^ (state >> 31)


@triton.jit
def last_tokens(tokens, lengths, starts, window, width, columns, back, BLOCK: tl.constexpr):
    """starts (rows,): where the last `back` tokens of each row begin. window (rows, width): the tokens from there on.

    Grid (rows,). tokens: (rows, columns). All are int64. BLOCK: a power of two, at least width.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(lengths + row) - back, 0)
    tl.store(starts + row, start)
    place = tl.arange(0, BLOCK)
    token = tl.load(tokens + row * columns + tl.minimum(start + place, columns - 1), mask=place < width, other=0)
    tl.store(window + row * width + place, token, mask=place < width)


@triton.jit
def after_draw(
    tokens, lengths, ids, ends, budget, active, drawn, now_active, now_drawn, depth, columns, many_ends,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each row's drawn token at its end, count it, and decide whether the row continues to draft.

    Grid (rows,). ids: (rows,), drawn tokens. ends: (many_ends,), end tokens. budget, drawn: (rows,) int64. active:
    (rows,) bool. now_active, now_drawn: the new values of active and drawn. BLOCK: a power of two, at least many_ends.
    """
    row = tl.program_id(0).to(tl.int64)
    token, going = tl.load(ids + row), tl.load(active + row) != 0
    place = tl.minimum(tl.load(lengths + row) + depth - 1, columns - 1)
    tl.store(tokens + row * columns + place, token)
    count = tl.load(drawn + row) + going.to(tl.int64)
    tl.store(now_drawn + row, count)
    end = tl.arange(0, BLOCK)
    is_end = tl.max(
        ((tl.load(ends + end, mask=end < many_ends, other=-1) == token) & (end < many_ends)).to(tl.int32), 0
    )
    tl.store(now_active + row, going & (is_end == 0) & (count < tl.load(budget + row)))


@triton.jit
def accept(
    tokens, lengths, max_lengths, fed, live, ends,
    verified, next_ids, drawn, extra_forwards, submitted_now,
    rounds, drafted, submitted, accepted, forwards,
    round_accepted, kept, was_live, new_lengths,
    width, columns, many_ends,
    DRAFTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`accept_in_torch` for each row. Grid (rows,).

    verified, next_ids: (rows,), number of accepted candidates, and the token after them. drawn, extra_forwards,
    submitted_now: (rows,), counts of this round. kept, was_live, new_lengths: (rows,), the fields of `Accepted`. width:
    the most candidates of a row, plus 1. DRAFTED: whether any row drew a token. WIDTH, BLOCK: powers of two, at least
    width and many_ends.
    """
    row = tl.program_id(0).to(tl.int64)
    length, passed, is_live = tl.load(lengths + row), tl.load(verified + row), tl.load(live + row) != 0
    one = is_live.to(tl.int64)
    next_id, next_place = tl.load(next_ids + row), tl.minimum(length + passed, columns - 1)
    slot, end = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    place = tl.minimum(length + slot, columns - 1)
    token = tl.load(tokens + row * columns + place, mask=slot < width, other=0)
    tl.debug_barrier()  # all threads read before one writes
    tl.store(tokens + row * columns + next_place, next_id)
    token = tl.where(place == next_place, next_id, token)
    end_id = tl.load(ends + end, mask=end < many_ends, other=-1)
    is_end = ((token[:, None] == end_id[None, :]) & (end < many_ends)[None, :]).to(tl.int32)
    emitted = (passed + 1) * one
    is_end = (tl.max(is_end, 1) > 0) & (slot < emitted) & (slot < width)
    first = tl.min(tl.where(is_end, slot, WIDTH), 0)
    ended = first < WIDTH
    emitted = tl.where(ended, first.to(tl.int64) + 1, emitted)
    keeps = tl.minimum(passed, emitted) * one
    own, extra, sent = tl.load(drawn + row), tl.load(extra_forwards + row), tl.load(submitted_now + row)
    if DRAFTED:  # the draft was fed all tokens before the last one it drew
        tl.store(fed + row, length + tl.minimum(passed, own - 1))
    now = length + emitted
    tl.store(lengths + row, now)
    _add(rounds + row, one)
    _add(drafted + row, own)
    _add(submitted + row, sent)
    _add(accepted + row, keeps)
    _add(forwards + row, own + extra)
    tl.store(round_accepted + row, keeps)
    tl.store(kept + row, keeps)
    tl.store(was_live + row, is_live)
    tl.store(new_lengths + row, now)
    tl.store(live + row, is_live & (ended == 0) & (now < tl.load(max_lengths + row)))


@triton.jit
def _add(place, number):
    tl.store(place, tl.load(place) + number)
