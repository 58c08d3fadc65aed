# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Triton kernels of the draft's signals; kernels/signals.py launches them.

All sums are float32. A row of logits is split among programs, so that one row can use a whole GPU. Each program reads
its part once and stores statistics of an online softmax. The last program of a row to end combines the statistics of
all parts, in the order of the parts. So one launch is enough, and the result does not depend on which program is last.
The counter `done` tells a program that it is last. This program sets the counter back to zero, so two launches with one
counter must not overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accept_head.inference.kernels.triton.sync import is_last, let_next_begin, wait_for_previous

LEAST_LOG = tl.constexpr(-87.33654475055310)  # signals.LEAST_LOG: log of the smallest normal float32
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def logits_signals(
    logits,
    temperature,
    drawn,
    tops,
    totals,
    moments,
    places,
    done,
    signals,
    lse,
    largest,
    vocab,
    row_stride,
    PER_ROW: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """signals (rows, 3): log q(Y), the entropy and max q; lse (rows,): the log-sum-exp of logits / T; largest (rows,)
    int64: the first most likely token.

    Grid (rows, splits). logits: (rows, vocab), −inf allowed. temperature: (rows,) if PER_ROW; else not read, and 1.
    drawn: (rows,), Y; if GREEDY, not read, and Y is the most likely token. For each part, with z = (x − top) / T: tops,
    totals Σ exp z, moments Σ z·exp z, (rows, splits) float32, and places of the tops, (rows, splits) int32. done:
    (rows,) int32, 0. SPLITS: a power of two, at least `splits`.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    cold = 1.0 / tl.load(temperature + row) if PER_ROW else 1.0
    top = tl.max(x, 0)
    there = x > float("-inf")
    z = tl.where(there, (x - tl.where(top > float("-inf"), top, 0.0)) * cold, 0.0)
    share = tl.where(there, tl.exp(z), 0.0)
    to = row * splits + split
    tl.store(tops + to, top)
    tl.store(totals + to, tl.sum(share, 0))
    tl.store(moments + to, tl.sum(share * z, 0))
    tl.store(places + to, tl.min(tl.where(inside & (x == top), token, vocab), 0))
    if is_last(done + row, splits):
        part = tl.arange(0, SPLITS)
        used = part < splits
        at = row * splits + part
        part_top = tl.load(tops + at, mask=used, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(totals + at, mask=used, other=0.0, cache_modifier=".cg")
        moment = tl.load(moments + at, mask=used, other=0.0, cache_modifier=".cg")
        place = tl.load(places + at, mask=used, other=2147483647, cache_modifier=".cg")
        best = tl.max(part_top, 0)
        seen = part_top > float("-inf")
        shift = tl.where(seen, (part_top - best) * cold, 0.0)
        weight = tl.where(seen, tl.exp(shift), 0.0)
        whole = tl.sum(weight * total, 0)
        log_whole = tl.log(whole)
        if GREEDY:
            logprob = -log_whole
        else:
            y = tl.load(logits + row.to(tl.int64) * row_stride + tl.load(drawn + row)).to(tl.float32)
            logprob = tl.maximum((y - best) * cold - log_whole, LEAST_LOG)
        tl.store(signals + row * 3, logprob)
        tl.store(signals + row * 3 + 1, log_whole - tl.sum(weight * (moment + shift * total), 0) / whole)
        tl.store(signals + row * 3 + 2, 1.0 / whole)
        tl.store(lse + row, best * cold + log_whole)
        tl.store(largest + row, tl.min(tl.where(used & (part_top == best), place, 2147483647), 0).to(tl.int64))


@triton.jit
def q_signals(
    q,
    drawn,
    tops,
    moments,
    done,
    signals,
    vocab,
    row_stride,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """signals (rows, 3): log q(Y), only if DRAWN, the entropy and max q.

    Grid (rows, splits). q: (rows, vocab), probabilities. For each part: tops, and moments Σ q·log q, (rows, splits)
    float32. The others as in `logits_signals`.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(q + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=0.0).to(tl.float32)
    to = row * splits + split
    tl.store(tops + to, tl.max(p, 0))
    tl.store(moments + to, tl.sum(p * tl.log(tl.maximum(p, TINY)), 0))
    if is_last(done + row, splits):
        part = tl.arange(0, SPLITS)
        used = part < splits
        at = row * splits + part
        top = tl.load(tops + at, mask=used, other=0.0, cache_modifier=".cg")
        moment = tl.load(moments + at, mask=used, other=0.0, cache_modifier=".cg")
        if DRAWN:
            y = tl.load(q + row.to(tl.int64) * row_stride + tl.load(drawn + row)).to(tl.float32)
            tl.store(signals + row * 3, tl.log(tl.maximum(y, TINY)))
        tl.store(signals + row * 3 + 1, -tl.sum(moment, 0))
        tl.store(signals + row * 3 + 2, tl.max(top, 0))
