"""The initial weights of a run's heads that are not random: the base, and the standardisation of the state.

Every process computes them from the same traces in the same order, so all start alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from accept_head.head.network import AcceptanceHead

LEAST_VARIANCE = 1e-6  # share of the largest component's variance; a smaller variance is rounding


def principal_components(states: Iterable[Tensor], most: int) -> tuple[Tensor, Tensor]:
    """(weight (most, channels), offset (most,)): the map of states to their `most` largest principal components.

    Each component has mean 0 and deviation 1. Components that do not vary are 0. states: (n, channels) each.
    """
    count, total, products = 0, torch.zeros(()), torch.zeros(())
    for some in states:
        some = some.double().cpu()
        count, total, products = count + len(some), total + some.sum(0), products + some.t() @ some
    mean = total / count
    variance, axes = torch.linalg.eigh(products / count - torch.outer(mean, mean))
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
    weight, offset = principal_components(states, heads[0].config.channels)
    for head in heads:
        head.state_input.weight.copy_(weight)
        head.state_input.bias.copy_(offset)
