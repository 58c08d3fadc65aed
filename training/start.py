"""Where the heads of a run start: at their base, and from the standardised state.

Every process works this out for itself, from the same traces in the same order: all start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accept_head.head import AcceptanceHead
from accept_head.training.batches import DraftBatch, StateBatch, collate
from accept_head.training.data import PackedTraces

TRACES = 512  # that the state's components are taken from, at most
LEAST_VARIANCE = 1e-6  # of a component, as a share of the largest one's: below it is rounding


class StateMoments:
    """Mean and covariance of states."""

    def __init__(self, channels: int):
        self.count = 0
        self.sum = torch.zeros(channels, dtype=torch.float64)
        self.products = torch.zeros(channels, channels, dtype=torch.float64)

    def add(self, states: Tensor) -> None:
        """states: (n, channels)."""
        states = states.double().cpu()
        self.count += len(states)
        self.sum += states.sum(0)
        self.products += states.t() @ states

    def components(self, most: int) -> tuple[Tensor, Tensor]:
        """(weight (most, channels), offset (most,)): the map to the `most` largest principal components, each with mean
        0 and deviation 1; 0 where fewer vary."""
        mean = self.sum / self.count
        variance, axes = torch.linalg.eigh(self.products / self.count - torch.outer(mean, mean))
        variance, axes = variance.flip(0)[:most], axes.flip(1)[:, :most]
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # which of ±v a library gives is chance
        varies = variance > LEAST_VARIANCE * variance[0]
        weight = torch.where(varies, variance.clamp(min=1e-300).rsqrt(), 0.0)[:, None] * axes.t()
        return weight.float(), -(weight @ mean).float()


@torch.no_grad()
def moments_of(traces: PackedTraces, read: Callable[[DraftBatch], StateBatch], *, at_once: int) -> StateMoments:
    """Of the states that heads read in at most TRACES of these, spread over all of them. read: runs the draft."""
    rows = range(0, len(traces), -(-len(traces) // TRACES))
    moments: StateMoments | None = None
    for start in range(0, len(rows), at_once):
        packed, indices = zip(*(traces[0, row] for row in rows[start : start + at_once]), strict=True)
        hidden = read(collate(list(packed), list(indices))).hidden
        moments = moments or StateMoments(hidden.shape[-1])
        moments.add(hidden)
    assert moments is not None
    return moments


@torch.no_grad()
def start_heads(heads: Sequence[AcceptanceHead], bases: Sequence[AcceptanceHead], moments: StateMoments) -> None:
    """Give each head its base, and all of them the same way to standardise states. Neither learns from here on."""
    for head in heads:
        weight, offset = moments.components(head.config.channels)
        head.state_input.weight.copy_(weight)
        head.state_input.bias.copy_(offset)
        head.state_input.requires_grad_(False)
    for head, base in zip(heads, bases, strict=True):
        head.base.load_state_dict(base.base.state_dict())
        head.base.requires_grad_(False)
