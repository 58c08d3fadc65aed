"""Random numbers that belong to a place, not to a moment: u = hash(seed, counter₁, counter₂, …).

A trace, a mixing mask or a decoded row is then the same whatever batch, process or order it was computed in, and a
resumed run needs no generator state. The hash is splitmix64 (Steele, Lea and Flood, 2014), chained over the counters.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class DecodeStream(IntEnum):
    """What a random number of the decode loop is for; its other counters are the row's key, the round and the slot."""

    DRAFT = 0
    ACCEPT = 1
    REDRAW = 2
    MATCH = 3
    ALTERNATIVES = 4


class TraceStream(IntEnum):
    """What a random number of traces is for; its other counters are the record's index and the step in its response."""

    ACCEPT = 0
    REDRAW = 1
    MIXING = 2
    DEV = 3
    ROLLOUT = 4
    LATER_ALTERNATIVES = 5  # drawn when a policy asks for them in replay
    ALTERNATIVES = 6


def uniforms(seed: int, *counters: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1) of 53 random bits, as float64, one per element of the broadcast `counters`.

    `counters` are integers or integer tensors that broadcast against each other; equal (seed, counters) give equal
    numbers on every device.
    """
    tensors = [counter for counter in counters if isinstance(counter, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    # Filled, not copied from the host, which a GPU would wait for, and which no CUDA graph may do.
    state = torch.full((), seed_state(seed), dtype=torch.int64, device=device)
    for counter in counters:
        if not isinstance(counter, Tensor):
            counter = torch.full((), counter, dtype=torch.int64, device=device)
        state = _splitmix64(state ^ counter.to(device, torch.int64))
    return _shift_right(state, 11).double() * 2.0**-53


def seed_state(seed: int) -> int:
    """What a hash begins from: splitmix64 of the seed alone, as a signed number of 64 bits."""
    state, most = (seed + 0x9E3779B97F4A7C15) % (1 << 64), (1 << 64) - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & most
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & most
    return _signed(state ^ (state >> 31))


def _splitmix64(state: Tensor) -> Tensor:
    """One step on int64 tensors; multiplication and addition wrap, which is arithmetic modulo 2**64."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit, so mask it away."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
