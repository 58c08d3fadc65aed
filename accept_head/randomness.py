"""Random numbers that depend only on counters: u = hash(seed, counter₁, counter₂, …).

So a trace, a mixing mask or a decoded row does not depend on the batch, process or order in which it is computed, and a
resumed run needs no generator state. The hash is splitmix64 (Steele, Lea and Flood, 2014), chained over the counters.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class DecodeStream(IntEnum):
    """Uses of random numbers in the decode loop. The other counters are the row's key, the round and the slot."""

    DRAFT = 0
    ACCEPT = 1
    REDRAW = 2
    MATCH = 3
    ALTERNATIVES = 4


class TraceStream(IntEnum):
    """Uses of random numbers in traces. The other counters are the record's index and the step in its response."""

    ACCEPT = 0
    REDRAW = 1
    MIXING = 2
    DEV = 3
    ROLLOUT = 4
    LATER_ALTERNATIVES = 5  # drawn afterwards, for traces without alternatives
    ALTERNATIVES = 6


def uniforms(seed: int, *counters: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1) of 53 random bits, as float64, one per element of the broadcast `counters`.

    `counters` are integers or integer tensors that broadcast against each other; equal (seed, counters) give equal
    numbers on every device.
    """
    tensors = [counter for counter in counters if isinstance(counter, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    # Filled on the device: a copy from the host would make a GPU wait, and a CUDA graph may not contain one.
    state = torch.full((), seed_state(seed), dtype=torch.int64, device=device)
    for counter in counters:
        if not isinstance(counter, Tensor):
            counter = torch.full((), counter, dtype=torch.int64, device=device)
        state = _splitmix64(state ^ counter.to(device, torch.int64))
    return _shift_right(state, 11).double() * 2.0**-53


def seed_state(seed: int) -> int:
    """The initial state of a hash: splitmix64 of the seed alone, as a signed 64-bit number."""
    state, most = (seed + 0x9E3779B97F4A7C15) % (1 << 64), (1 << 64) - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & most
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & most
    return _signed(state ^ (state >> 31))


def _splitmix64(state: Tensor) -> Tensor:
    """One step on int64 tensors. Multiplication and addition wrap, which is arithmetic modulo 2**64."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical right shift. torch's >> on int64 copies the sign bit, so the copies are masked."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
