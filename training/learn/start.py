"""The initial weights of a run's heads that are not random: the base, and the standardisation of the state.

Every process computes them from the same traces in the same order, so all start alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from accept_head.head.network import AcceptanceHead

LEAST_VARIANCE = 1e-6  # share of the largest component's variance; a smaller variance is rounding


class StateMoments:
    """Mean and covariance of states."""

    def __init__(self, channels: int):
        self.count = 0
        self.sum = torch.zeros(channels, dtype=torch.float64)
        self.products = torch.zeros(channels, channels, dtype=torch.float64)

    def add(self, states: Tensor) -> None:
        """Add states, (n, channels)."""
        states = states.double().cpu()
        self.count += len(states)
        self.sum += states.sum(0)
        self.products += states.t() @ states

    def components(self, most: int) -> tuple[Tensor, Tensor]:
        """(weight (most, channels), offset (most,)): the map to the `most` largest principal components.

        Each component has mean 0 and deviation 1. Components that do not vary are 0.
        """
        mean = self.sum / self.count
        variance, axes = torch.linalg.eigh(self.products / self.count - torch.outer(mean, mean))
        variance, axes = variance.flip(0)[:most], axes.flip(1)[:, :most]
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # libraries differ in the sign of v
        varies = variance > LEAST_VARIANCE * variance[0]
        weight = torch.where(varies, variance.clamp(min=1e-300).rsqrt(), 0.0)[:, None] * axes.t()
        return weight.float(), -(weight @ mean).float()


@torch.no_grad()
def start_heads(heads: Sequence[AcceptanceHead], bases: Sequence[AcceptanceHead]) -> None:
    """Give each head its base, if there are any. The base and the standardisation of states are not trained."""
    for head in heads:
        head.state_input.requires_grad_(False)
    for head, base in zip(heads, bases, strict=bool(bases)):
        head.base.load_state_dict(base.base.state_dict())
        head.base.requires_grad_(False)


@torch.no_grad()
def standardise(heads: Sequence[AcceptanceHead], states: Iterable[Tensor]) -> None:
    """Give all heads, which have one width, the same standardisation of states. states: (n, channels) each."""
    moments: StateMoments | None = None
    for some in states:
        moments = moments or StateMoments(some.shape[-1])
        moments.add(some)
    assert moments is not None
    weight, offset = moments.components(heads[0].config.channels)
    for head in heads:
        head.state_input.weight.copy_(weight)
        head.state_input.bias.copy_(offset)
