# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Triton kernels of the draft's signals and of the head. Imported only where Triton is; `fused_signals` and
`fused_head` say what they compute.

All sums are float32. A row of logits is split among programs, as one row alone has to keep a whole GPU busy: each
reads its part once and leaves an online softmax's statistics of it. Whichever program of a row ends last adds up what
all of them left, in the order of the parts: one launch instead of two, and a result that does not depend on who was
last. It is told by a counter, `done`, which it sets back to zero: two launches on one counter must not overlap.

EARLY: the kernel is launched so that it may begin before the one ahead of it has ended (programmatic dependent launch,
of Hopper and later). What it does then is to read weights, which no kernel writes; it waits before it touches anything
else, and lets the one behind it begin at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_LOG = tl.constexpr(-87.33654475055310)  # signals.LEAST_LOG: log of the smallest normal float32
TINY = tl.constexpr(1.1754943508222875e-38)
WARPS = tl.constexpr(4)  # of a program
MOST_LOG_ODDS = tl.constexpr(14.0)  # base.MOST_LOG_ODDS
LINE, LINES = tl.constexpr(64), tl.constexpr(16)  # of the cache, in bfloat16: 128 bytes; and how many at once


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
    """log q(Y), the entropy and max q, (rows, 3); the log-sum-exp of logits / T, (rows,); and the first most likely
    token, (rows,) int64.

    Grid (rows, splits). logits: (rows, vocab), −inf allowed. temperature: (rows,) if PER_ROW, else not looked at, and
    1. drawn: (rows,) Y; if GREEDY, not looked at: Y is the most likely token. Of each part, with z = (x − top) / T:
    tops, totals Σ exp z, moments Σ z·exp z, (rows, splits) float32, and places of the tops, (rows, splits) int32.
    done: (rows,) int32, 0. SPLITS: a power of two, at least `splits`.
    """
    _begin(EARLY)
    _wait(EARLY)
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
    if _is_last(done + row, splits):
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
    """log q(Y), if DRAWN, the entropy and max q, (rows, 3).

    Grid (rows, splits). q: (rows, vocab) probabilities. Of each part: tops, and moments Σ q·log q, (rows, splits)
    float32. The others as in `logits_signals`.
    """
    _begin(EARLY)
    _wait(EARLY)
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(q + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=0.0).to(tl.float32)
    to = row * splits + split
    tl.store(tops + to, tl.max(p, 0))
    tl.store(moments + to, tl.sum(p * tl.log(tl.maximum(p, TINY)), 0))
    if _is_last(done + row, splits):
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


@triton.jit
def head_input(
    hidden,
    state,
    signals,
    scale,
    shift,
    ids,
    table,
    embedding,
    x,
    rows,
    hidden_size,
    channels,
    hidden_stride,
    table_stride,
    STATE: tl.constexpr,
    SHIFT: tl.constexpr,
    SIGNALS: tl.constexpr,
    TABLE: tl.constexpr,
    EMBEDDING: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """What the blocks of a head start from, x (rows, channels) float32: the state, times `state` (channels,
    hidden_size) if STATE; plus `shift` (channels,) if SHIFT; plus `scale` (SIGNALS, channels), times the three signals,
    or the nine functions of them that a base has, or none; plus, of the drawn token, its row of `table` (vocab,
    channels) if TABLE, or of it (vocab, hidden_size) times `embedding` (channels, hidden_size), if EMBEDDING. Grid
    (channels / CHANNELS, rows / ROWS)."""
    _begin(EARLY)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    written = (row < rows)[:, None] & (channel < channels)[None, :]
    result = tl.zeros((ROWS, CHANNELS), tl.float32)
    if STATE:
        first = _ahead(state, channel, channels, hidden_size, BLOCK, DOT, EARLY)
    _wait(EARLY)
    # What takes two looks into memory comes first, so that the product hides it.
    if TABLE or EMBEDDING:
        token = tl.load(ids + row, mask=row < rows, other=0).to(tl.int64)
    if TABLE:
        at = token[:, None] * table_stride + channel[None, :]
        result += tl.load(table + at, mask=written, other=0.0).to(tl.float32)
    if SHIFT:
        result += tl.load(shift + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for each in tl.static_range(SIGNALS):
        if SIGNALS == 3:
            value = tl.load(signals + row * 3 + each, mask=row < rows, other=0.0).to(tl.float32)
        else:
            value = _base_function(signals, row, row < rows, each)
        by = tl.load(scale + each * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
        result += value[:, None] * by[None, :]
    if STATE:
        result += _product(
            hidden, row.to(tl.int64) * hidden_stride, row < rows, state, first, channel, channels, hidden_size,
            ROWS, CHANNELS, BLOCK, DOT,
        )  # fmt: skip
    else:
        at = row.to(tl.int64)[:, None] * hidden_stride + channel[None, :]
        result += tl.load(hidden + at, mask=written, other=0.0).to(tl.float32)
    if EMBEDDING:
        first = _ahead(embedding, channel, channels, hidden_size, BLOCK, DOT, False)
        result += _product(
            table, token * table_stride, row < rows, embedding, first, channel, channels, hidden_size,
            ROWS, CHANNELS, BLOCK, DOT,
        )  # fmt: skip
    tl.store(x + row[:, None] * channels + channel[None, :], result, mask=written)


@triton.jit
def head_block(
    x,
    weight,
    bias,
    y,
    rows,
    channels,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = x + SiLU(W x + b), (rows, channels) float32. weight: (channels, channels). Grid as in `head_input`."""
    _begin(EARLY)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    written = (row < rows)[:, None] & (channel < channels)[None, :]
    result = _residual(x, weight, bias, row, channel, rows, channels, ROWS, CHANNELS, BLOCK, DOT, EARLY)
    tl.store(y + row[:, None] * channels + channel[None, :], result, mask=written)


@triton.jit
def head_last(
    x,
    weight,
    bias,
    output,
    output_bias,
    signals,
    base,
    parts,
    done,
    scores,
    rows,
    channels,
    OUTPUTS: tl.constexpr,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """sigmoid(w y + c), (rows, OUTPUTS) float32, of the y of a last `head_block`, which is not kept.

    output: (OUTPUTS, channels) w; output_bias: (OUTPUTS,) c. signals, base: what `_base_logit` adds, if BASE. parts:
    (OUTPUTS, rows, tiles) float32, of every program's channels. done: (rows / ROWS,) int32, 0. TILES: a power of two,
    at least channels / CHANNELS. Grid as above.
    """
    _begin(EARLY)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    y = _residual(x, weight, bias, row, channel, rows, channels, ROWS, CHANNELS, BLOCK, DOT, EARLY)
    for each in tl.static_range(OUTPUTS):
        w = tl.load(output + each * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
        tl.store(parts + (each * rows + row) * tiles + tile, tl.sum(y * w[None, :], 1), mask=row < rows)
    if _is_last(done + tl.program_id(1), tiles):
        part = tl.arange(0, TILES)
        used = (row < rows)[:, None] & (part < tiles)[None, :]
        for each in tl.static_range(OUTPUTS):
            at = (each * rows + row)[:, None] * tiles + part[None, :]
            logit = tl.sum(tl.load(parts + at, mask=used, other=0.0, cache_modifier=".cg"), 1)
            logit += tl.load(output_bias + each).to(tl.float32)
            if BASE:
                logit += _base_logit(signals, base, row, row < rows, each, OUTPUTS)
            tl.store(scores + row * OUTPUTS + each, 1.0 / (1.0 + tl.exp(-logit)), mask=row < rows)


@triton.jit
def head_output(
    x,
    output,
    output_bias,
    signals,
    base,
    scores,
    rows,
    channels,
    OUTPUTS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """sigmoid(w x + c), (rows, OUTPUTS) float32: of a head without blocks, or, with 0 channels, of a base alone.
    signals, base: what `_base_logit` adds, if BASE. BLOCK: a power of two, at least `channels`. Grid (rows,)."""
    _begin(EARLY)
    _wait(EARLY)
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    value = tl.load(x + row * channels + channel, mask=inside, other=0.0)
    for each in tl.static_range(OUTPUTS):
        w = tl.load(output + each * channels + channel, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(value * w, 0) + tl.load(output_bias + each).to(tl.float32)
        if BASE:
            logit += _base_logit(signals, base, row, row < rows, each, OUTPUTS)
        tl.store(scores + row * OUTPUTS + each, 1.0 / (1.0 + tl.exp(-logit)))


@triton.jit
def _base_logit(signals, base, row, inside, output, OUTPUTS: tl.constexpr):
    """What a head's base adds to a logit of these rows, but for its offset: its functions of signals (rows, 3), times
    the column `output` of `base` (9, OUTPUTS)."""
    logit = _base_function(signals, row, inside, 0) * tl.load(base + output)
    for each in tl.static_range(1, 9):
        logit += _base_function(signals, row, inside, each) * tl.load(base + each * OUTPUTS + output)
    return logit


@triton.jit
def _base_function(signals, row, inside, WHICH: tl.constexpr):
    """One of base.BASE_FUNCTIONS, of signals (rows, 3)."""
    logprob = tl.load(signals + row * 3, mask=inside, other=-1.0).to(tl.float32)
    entropy = tl.load(signals + row * 3 + 1, mask=inside, other=1.0).to(tl.float32)
    largest = tl.load(signals + row * 3 + 2, mask=inside, other=0.5).to(tl.float32)
    logprob = tl.minimum(tl.maximum(logprob, -MOST_LOG_ODDS), 0.0)
    entropy = tl.maximum(entropy, 0.0)
    log_largest = tl.minimum(tl.maximum(tl.log(largest), -MOST_LOG_ODDS), 0.0)
    if WHICH == 0:
        value = logprob
    elif WHICH == 1:
        value = entropy
    elif WHICH == 2:
        value = largest
    elif WHICH == 3:
        value = tl.exp(logprob)
    elif WHICH == 4:
        value = _log_odds(logprob)
    elif WHICH == 5:
        value = _log_odds(log_largest)
    elif WHICH == 6:
        value = tl.sqrt(entropy)
    elif WHICH == 7:
        value = logprob * entropy
    else:
        value = logprob - log_largest
    return value


@triton.jit
def _log_odds(log_p):
    """log p − log(1 − p), from log p ≤ 0. Near 0 1 − p is its series: the difference would have no digits left."""
    series = -log_p * (1.0 + log_p * (1.0 / 2.0 + log_p * (1.0 / 6.0 + log_p * (1.0 / 24.0))))
    other = tl.where(log_p > -0.03, series, 1.0 - tl.exp(log_p))
    odds = log_p - tl.log(tl.maximum(other, 1e-30))
    return tl.minimum(tl.maximum(odds, -MOST_LOG_ODDS), MOST_LOG_ODDS)


@triton.jit
def _begin(EARLY: tl.constexpr):
    """The kernel behind this one may begin."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Until the kernel ahead of this one has ended, and all that it wrote can be read."""
    if EARLY:
        gdc_wait()


@triton.jit
def _is_last(done, programs):
    """Whether all others of these programs have written what they leave. `done` is 0 again after the last."""
    tl.debug_barrier()  # every thread's stores come before the count, which one thread does for all
    last = tl.atomic_add(done, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(done, 0)
    return last


@triton.jit
def _residual(
    x,
    weight,
    bias,
    row,
    channel,
    rows,
    channels,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x + SiLU(W x + b) of these rows and channels, (ROWS, CHANNELS); 0 outside."""
    first = _ahead(weight, channel, channels, channels, BLOCK, DOT, EARLY)
    _wait(EARLY)
    start = row.to(tl.int64) * channels
    z = _product(x, start, row < rows, weight, first, channel, channels, channels, ROWS, CHANNELS, BLOCK, DOT)
    z += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    return tl.load(x + row[:, None] * channels + channel[None, :], mask=inside, other=0.0) + z / (1.0 + tl.exp(-z))


@triton.jit
def _product(
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
    """Rows of `left`, that begin at `offsets`, times the rows `channel` of `weight` (channels, size), (ROWS, CHANNELS).
    first: what `_ahead` gave.

    Without DOT all products are float32, which is soonest for one row: all its weights are there already. With DOT,
    tensor cores multiply, for which 16 rows are as many as one: each of WARPS warps its share of BLOCK numbers, as one
    product waits for the one before it. Weights are bfloat16 then, and a number of `left` that is not is two such: what
    is nearest to it, and what is left.
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
        parts = tl.zeros((ROWS, CHANNELS, BLOCK), tl.float32)  # added up once, at the end
        w = first
        for start in range(0, size, BLOCK):
            k = start + tl.arange(0, BLOCK)
            a = tl.load(left + offsets[:, None] + k[None, :], mask=valid[:, None] & (k < size)[None, :], other=0.0)
            parts += a.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
            w = _weights(weight, channel, channels, size, start + BLOCK, BLOCK)
        return tl.sum(parts, 2)


@triton.jit
def _ahead(weight, channel, channels, size, BLOCK: tl.constexpr, DOT: tl.constexpr, EARLY: tl.constexpr):
    """The first of these weights; with DOT, they are only on their way to the cache."""
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
    """What is there comes to the L2 cache; nobody waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _weights(weight, channel, channels, size, start, BLOCK: tl.constexpr):
    """From place `start` on, of the rows `channel` of `weight` (channels, size); 0 outside."""
    k = start + tl.arange(0, BLOCK)
    inside = (channel < channels)[:, None] & (k < size)[None, :]
    return tl.load(weight + channel.to(tl.int64)[:, None] * size + k[None, :], mask=inside, other=0.0)
