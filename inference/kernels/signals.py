"""The draft's signals of a step: log q(Y), the entropy and max q.

torch needs a dozen passes and kernels (softmax, its logarithm, a product, sums, a maximum, a gather). Here one kernel
reads the logits, or q, once. The numbers equal those of `accept_head.signals` up to the order of float32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.inference.kernels.launch import counters, dense, early_options, power_of_two, triton_kernels
from accept_head.inference.kernels.usable import Check, usable
from accept_head.signals import SIGNALS, draft_entropy, draft_logprob, draft_max_prob, signals_of_logits

# Tokens of a part: few when few rows have to fill a GPU, many when there are many rows.
FEW_ROWS, SMALL_PART, LARGE_PART = 4, 1024, 4096


class PlainSoftmax(NamedTuple):
    """A softmax of logits (batch, vocab) that is not computed, because a kernel reads the logits."""

    logits: Tensor


class Signals(NamedTuple):
    """The signals, (batch,) each, or None when not asked for or when Y is not drawn yet.

    together: (batch, 3) in the order of SIGNALS, when a kernel computed all three for a drawn Y; else None.
    """

    logprob: Tensor | None
    entropy: Tensor | None
    max_prob: Tensor | None
    together: Tensor | None


def plain_softmax(logits: Tensor) -> Tensor | PlainSoftmax:
    """The softmax of logits (batch, vocab), in the form that is cheapest for `signals_of`."""
    return PlainSoftmax(logits) if usable(logits, CHECK) else logits.float().softmax(-1)


def signals_of(
    q: Tensor | PlainSoftmax, ids: Tensor | None, *, logprob: bool, entropy: bool, max_prob: bool
) -> Signals:
    """The signals that are asked for, at least one.

    q: (batch, vocab). ids: (batch,), Y, or None before it is drawn; then there is no logprob.
    """
    logprob = logprob and ids is not None
    # A maximum alone is one operation in torch, and a kernel would not be faster.
    if isinstance(q, PlainSoftmax):
        together = logits_signals_by_kernel(q.logits, ids).signals
    elif usable(q, CHECK) and (logprob or entropy):
        together = q_signals_by_kernel(q, ids)
    else:
        return Signals(
            draft_logprob(q, ids) if logprob and ids is not None else None,
            draft_entropy(q) if entropy else None,
            draft_max_prob(q) if max_prob else None,
            None,
        )
    of_logprob, of_entropy, of_max_prob = together.unbind(-1)
    return Signals(
        of_logprob if logprob else None,
        of_entropy if entropy else None,
        of_max_prob if max_prob else None,
        together if ids is not None else None,
    )


class OfLogits(NamedTuple):
    """Results of `logits_signals_by_kernel`.

    signals: (batch, 3) float32, in the order of SIGNALS. lse: (batch,) float32, log Σ exp(logits / T). largest:
    (batch,) int64, the most likely token, the first of equals.
    """

    signals: Tensor
    lse: Tensor
    largest: Tensor


def logits_signals_by_kernel(logits: Tensor, ids: Tensor | None, temperature: Tensor | None = None) -> OfLogits:
    """The signals of q = softmax(logits / temperature), without computing q.

    logits: (batch, vocab), any float dtype, −inf allowed, gaps between rows allowed. ids: (batch,), Y; None: the most
    likely token. temperature: (batch,), above 0; None: 1.
    """
    logits = dense(logits)
    rows, vocab = logits.shape
    part, splits = _parts(rows, vocab)
    tops, totals, moments = torch.empty(3, rows, splits, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    made = OfLogits(
        torch.empty(rows, len(SIGNALS), dtype=torch.float32, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
        torch.empty(rows, dtype=torch.int64, device=logits.device),
    )
    per_row = temperature is not None
    temperature = logits if temperature is None else temperature.float().contiguous()  # a kernel needs a pointer
    drawn = places if ids is None else ids.contiguous()
    with torch.cuda.device_of(logits):
        triton_kernels("signals").logits_signals[(rows, splits)](
            logits, temperature, drawn, tops, totals, moments, places, counters(logits.device, rows), *made, vocab,
            logits.stride(0), PER_ROW=per_row, GREEDY=ids is None, BLOCK=part, SPLITS=power_of_two(splits),
            **early_options(logits.device),
        )  # fmt: skip
    return made


def q_signals_by_kernel(q: Tensor, ids: Tensor | None) -> Tensor:
    """The signals of probabilities q, (batch, vocab) → (batch, 3) float32, in the order of SIGNALS.

    ids: (batch,), Y; None: Y is not drawn yet, and the first signal is not written.
    """
    q = dense(q)
    rows, vocab = q.shape
    part, splits = _parts(rows, vocab)
    tops, moments = torch.empty(2, rows, splits, dtype=torch.float32, device=q.device)
    signals = torch.empty(rows, len(SIGNALS), dtype=torch.float32, device=q.device)
    drawn = tops if ids is None else ids.contiguous()
    with torch.cuda.device_of(q):
        triton_kernels("signals").q_signals[(rows, splits)](
            q, drawn, tops, moments, counters(q.device, rows), signals, vocab, q.stride(0),
            DRAWN=ids is not None, BLOCK=part, SPLITS=power_of_two(splits),
            **early_options(q.device),
        )  # fmt: skip
    return signals


def _parts(rows: int, vocab: int) -> tuple[int, int]:
    """(tokens of a part, parts of a row)."""
    part = SMALL_PART if rows <= FEW_ROWS else LARGE_PART
    return part, -(-vocab // part)


def compare(device: torch.device) -> None:
    """Raises AssertionError when the kernel and torch differ."""
    logits = torch.linspace(-3, 3, 3 * LARGE_PART, device=device).sin().mul(5).view(2, -1)
    ids, ones = logits.argmin(-1), torch.ones(2, device=device)
    expected = torch.stack(signals_of_logits(logits, ones, ids), -1)
    torch.testing.assert_close(logits_signals_by_kernel(logits, ids, ones).signals, expected, rtol=1e-3, atol=1e-3)


CHECK = Check("signals", compare)
