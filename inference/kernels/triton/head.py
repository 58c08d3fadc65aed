# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Triton kernels of a head. kernels/head.py launches them. All sums are float32."""

from __future__ import annotations

import triton
import triton.language as tl

from accept_head.inference.kernels.triton.products import ahead, product
from accept_head.inference.kernels.triton.sync import is_last, let_next_begin, wait_for_previous

MOST_LOG_ODDS = tl.constexpr(14.0)  # base.MOST_LOG_ODDS


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
    """x (rows, channels) float32: the input of a head's first block.

    It is the sum of these terms: the state, multiplied by `state` (channels, hidden_size) if STATE; `shift` (channels,)
    if SHIFT; `scale` (SIGNALS, channels) times the three signals, or times the nine functions of them that a base
    reads, if SIGNALS is not 0; the drawn token's row of `table` (vocab, channels) if TABLE, or its row of `table`
    (vocab, hidden_size) times `embedding` (channels, hidden_size) if EMBEDDING. Grid (channels / CHANNELS, rows /
    ROWS).
    """
    let_next_begin(EARLY)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    written = (row < rows)[:, None] & (channel < channels)[None, :]
    result = tl.zeros((ROWS, CHANNELS), tl.float32)
    if STATE:
        first = ahead(state, channel, channels, hidden_size, BLOCK, DOT, EARLY)
    wait_for_previous(EARLY)
    # The lookup that takes two reads of memory comes first, so that the product hides its latency.
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
        result += product(
            hidden, row.to(tl.int64) * hidden_stride, row < rows, state, first, channel, channels, hidden_size,
            ROWS, CHANNELS, BLOCK, DOT,
        )  # fmt: skip
    else:
        at = row.to(tl.int64)[:, None] * hidden_stride + channel[None, :]
        result += tl.load(hidden + at, mask=written, other=0.0).to(tl.float32)
    if EMBEDDING:
        first = ahead(embedding, channel, channels, hidden_size, BLOCK, DOT, False)
        result += product(
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
    let_next_begin(EARLY)
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
    """scores (rows, OUTPUTS) float32: sigmoid(w y + c), with the y of a last `head_block`, which is not stored.

    output: (OUTPUTS, channels), w. output_bias: (OUTPUTS,), c. signals, base: the inputs of `_base_logit`, if BASE.
    parts: (OUTPUTS, rows, tiles) float32, the sums over each program's channels. done: (rows / ROWS,) int32, 0. TILES:
    a power of two, at least channels / CHANNELS. Grid as in `head_input`.
    """
    let_next_begin(EARLY)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    y = _residual(x, weight, bias, row, channel, rows, channels, ROWS, CHANNELS, BLOCK, DOT, EARLY)
    for each in tl.static_range(OUTPUTS):
        w = tl.load(output + each * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
        tl.store(parts + (each * rows + row) * tiles + tile, tl.sum(y * w[None, :], 1), mask=row < rows)
    if is_last(done + tl.program_id(1), tiles):
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
    """scores (rows, OUTPUTS) float32: sigmoid(w x + c), for a head without blocks, or with 0 channels for a base alone.

    signals, base: the inputs of `_base_logit`, if BASE. BLOCK: a power of two, at least `channels`. Grid (rows,).
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
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
    """The base's part of a logit of these rows, without its offset.

    It is the product of the base functions of signals (rows, 3) with the column `output` of `base` (9, OUTPUTS).
    """
    logit = _base_function(signals, row, inside, 0) * tl.load(base + output)
    for each in tl.static_range(1, 9):
        logit += _base_function(signals, row, inside, each) * tl.load(base + each * OUTPUTS + output)
    return logit


@triton.jit
def _base_function(signals, row, inside, WHICH: tl.constexpr):
    """One of base.BASE_FUNCTIONS for signals (rows, 3)."""
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
    """log p − log(1 − p), from log p ≤ 0. Near log p = 0, 1 − p is computed by its series, to avoid cancellation."""
    series = -log_p * (1.0 + log_p * (1.0 / 2.0 + log_p * (1.0 / 6.0 + log_p * (1.0 / 24.0))))
    other = tl.where(log_p > -0.03, series, 1.0 - tl.exp(log_p))
    odds = log_p - tl.log(tl.maximum(other, 1e-30))
    return tl.minimum(tl.maximum(odds, -MOST_LOG_ODDS), MOST_LOG_ODDS)


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
    """x + SiLU(W x + b) for these rows and channels, (ROWS, CHANNELS); 0 outside."""
    first = ahead(weight, channel, channels, channels, BLOCK, DOT, EARLY)
    wait_for_previous(EARLY)
    start = row.to(tl.int64) * channels
    z = product(x, start, row < rows, weight, first, channel, channels, channels, ROWS, CHANNELS, BLOCK, DOT)
    z += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (channel < channels)[None, :]
    return tl.load(x + row[:, None] * channels + channel[None, :], mask=inside, other=0.0) + z / (1.0 + tl.exp(-z))
