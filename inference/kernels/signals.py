"""The draft's signals of a step in one pass over its logits, or over q, where Triton and a GPU are.

What torch does for them in a dozen passes and kernels (softmax, its logarithm, a product, sums, a maximum, a gather)
is then one kernel. The numbers are those of `accept_head.signals`, up to the order of float32 sums.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accept_head.signals import SIGNALS, signals_of_logits

# Tests set it, to run the kernels in Triton's interpreter (TRITON_INTERPRET=1) on a CPU.
ON_ANY_DEVICE = False
# Tokens of a part: small where few rows have to fill a GPU, large where parts are many anyway.
FEW_ROWS, SMALL_PART, LARGE_PART = 4, 1024, 4096
LEAST_COUNTERS = 4096
HOPPER = (9, 0)  # compute capability


class Plain(NamedTuple):
    """Logits (batch, vocab) that stand for their softmax, which nobody has made."""

    logits: Tensor


class OfLogits(NamedTuple):
    """signals: (batch, 3) float32, in the order of SIGNALS. lse: (batch,) float32, log Σ exp(logits / T). largest:
    (batch,) int64, the most likely token, the first of equals."""

    signals: Tensor
    lse: Tensor
    largest: Tensor


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can take it, and work on its device. ACCEPT_HEAD_KERNELS=0 in the environment says no."""
    return (tensor.is_cuda or ON_ANY_DEVICE) and _triton() and _proven(tensor.device)


@cache
def _triton() -> bool:
    return os.environ.get("ACCEPT_HEAD_KERNELS") != "0" and find_spec("triton") is not None


@cache
def _proven(device: torch.device) -> bool:
    """Tried once, against torch: a compiler may be missing, or a GPU be too old for what Triton makes."""
    logits = torch.linspace(-3, 3, 3 * LARGE_PART, device=device).sin().mul(5).view(2, -1)
    ids, ones = logits.argmin(-1), torch.ones(2, device=device)
    expected = torch.stack(signals_of_logits(logits, ones, ids), -1)
    _early[device] = _can_start_early(device)

    def agree() -> None:
        torch.testing.assert_close(signals_at_once(logits, ids, ones).signals, expected, rtol=1e-3, atol=1e-3)

    return holds(agree, "signals", device) or (start_late(device) and holds(agree, "signals", device))


def holds(check: Callable[[], None], what: str, device: torch.device) -> bool:
    """Whether kernels pass a check on that device; the log says why not. Whatever fails, there is another way."""
    try:
        check()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        log = logging.getLogger(__name__)
        log.warning("accept-head: no kernels for %s on %s (%s), hence slower", what, device, reason)
        for each in _counters.get(device, []):
            each.zero_()  # a kernel that broke off has left them as they were then, and others go on with them
        return False
    return True


_early: dict[torch.device, bool] = {}  # kernels begin there before those ahead of them have ended


def _can_start_early(device: torch.device) -> bool:
    """NVIDIA's Hopper and later can. ACCEPT_HEAD_EARLY=0 in the environment says no."""
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get("ACCEPT_HEAD_EARLY") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER


def start_late(device: torch.device) -> bool:
    """From now on kernels begin there when those ahead of them have ended. Whether that is another way than before."""
    before, _early[device] = _early.get(device, False), False
    return before


def launch(device: torch.device) -> dict[str, Any]:
    """How kernels are launched there, see `fused_kernels`."""
    return {"EARLY": True, "launch_pdl": True} if _early.get(device) else {"EARLY": False}


def signals_at_once(logits: Tensor, ids: Tensor | None, temperature: Tensor | None = None) -> OfLogits:
    """Of q = softmax(logits / temperature), which is not made.

    logits: (batch, vocab), any float dtype, −inf allowed; rows need not be close together in memory. ids: (batch,) Y;
    None: the most likely token. temperature: (batch,) above 0; None: 1.
    """
    from accept_head.inference.kernels.triton import signals as kernels

    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    part, splits = _parts(rows, vocab)
    tops, totals, moments = torch.empty(3, rows, splits, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    made = _empty(rows, logits.device)
    per_row = temperature is not None
    temperature = logits if temperature is None else temperature.float().contiguous()  # a pointer is needed
    drawn = places if ids is None else ids.contiguous()
    with torch.cuda.device_of(logits):
        kernels.logits_signals[(rows, splits)](
            logits, temperature, drawn, tops, totals, moments, places, counters(logits.device, rows), *made, vocab,
            logits.stride(0), PER_ROW=per_row, GREEDY=ids is None, BLOCK=part, SPLITS=power_of_two(splits),
            **launch(logits.device),
        )  # fmt: skip
    return made


def signals_of_q_at_once(q: Tensor, ids: Tensor | None) -> Tensor:
    """Of probabilities q, (batch, vocab) → (batch, 3) float32, in the order of SIGNALS. ids: (batch,) Y; None: it is
    not drawn yet, and the first is not written."""
    from accept_head.inference.kernels.triton import signals as kernels

    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, vocab = q.shape
    part, splits = _parts(rows, vocab)
    tops, moments = torch.empty(2, rows, splits, dtype=torch.float32, device=q.device)
    signals = torch.empty(rows, len(SIGNALS), dtype=torch.float32, device=q.device)
    drawn = tops if ids is None else ids.contiguous()
    with torch.cuda.device_of(q):
        kernels.q_signals[(rows, splits)](
            q, drawn, tops, moments, counters(q.device, rows), signals, vocab, q.stride(0),
            DRAWN=ids is not None, BLOCK=part, SPLITS=power_of_two(splits),
            **launch(q.device),
        )  # fmt: skip
    return signals


_counters: dict[torch.device, list[Tensor]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """(at least count,) int32 zeros, which every launch leaves as it found them. One for a device: launches follow each
    other on one stream. Made before a graph is captured, in the run that warms it up; graphs then hold its address, so
    that none is ever given back."""
    made = _counters.setdefault(device, [])
    if not made or len(made[-1]) < count:
        made.append(torch.zeros(max(count, LEAST_COUNTERS), dtype=torch.int32, device=device))
    return made[-1]


def _parts(rows: int, vocab: int) -> tuple[int, int]:
    """Tokens of a part, and parts of a row."""
    part = SMALL_PART if rows <= FEW_ROWS else LARGE_PART
    return part, -(-vocab // part)


def _empty(rows: int, device: torch.device) -> OfLogits:
    return OfLogits(
        torch.empty(rows, len(SIGNALS), dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
