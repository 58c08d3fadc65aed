"""The standardised state: principal components with mean 0 and deviation 1, for any channels."""

from __future__ import annotations

import torch

from accept_head import AcceptanceHead, HeadConfig
from accept_head.base import places_of
from accept_head.signals import SIGNALS
from accept_head.training.learn.start import principal_components, standardise, start_heads

CHANNELS = 12


def states(count=5000):
    """As of a real draft: channels far from 0, some of them hundreds of times as loud as others, and correlated."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(count, CHANNELS, generator=generator) @ torch.randn(CHANNELS, CHANNELS, generator=generator)
    return mixed * torch.logspace(-1, 1.5, CHANNELS) + torch.linspace(-30, 30, CHANNELS)


def test_components_are_standardised_and_uncorrelated():
    weight, offset = principal_components(states().split(700), 5)
    found = states() @ weight.t() + offset
    torch.testing.assert_close(found.mean(0), torch.zeros(5), atol=1e-3, rtol=0)
    torch.testing.assert_close(found.t().cov(correction=0), torch.eye(5), atol=2e-3, rtol=0)


def test_they_are_the_largest_ones():
    """The same space as by a singular value decomposition."""
    values = states()
    weight, _ = principal_components(values.split(700), 3)
    _, _, axes = torch.linalg.svd(values.double() - values.double().mean(0), full_matrices=False)
    cosines = torch.nn.functional.normalize(weight.double(), dim=1) @ axes[:3].t()
    torch.testing.assert_close(cosines.abs(), torch.eye(3).double(), atol=1e-3, rtol=0)


def test_what_does_not_vary_is_left_out():
    """Fewer states than channels, or channels that say nothing: rounding is not blown up to deviation 1."""
    few = states(4)
    weight, offset = principal_components([few], CHANNELS)
    found = few @ weight.t() + offset
    assert (weight[3:] == 0).all() and (offset[3:] == 0).all()
    assert found.isfinite().all() and found.abs().max() < 10


def test_heads_start_alike_and_neither_base_nor_standardising_learns():
    count = len(places_of(SIGNALS))
    config = {"hidden_size": CHANNELS, "signals": SIGNALS, "signal_mean": (0.0,) * count, "signal_std": (1.0,) * count}
    config |= {"base": True, "reads": "before"}
    bases = [AcceptanceHead(HeadConfig(depth=0, residual=False, **config)) for _ in range(2)]
    heads = [AcceptanceHead(HeadConfig(depth=depth, width=6, standardised=True, **config)) for depth in (0, 2)]
    start_heads(heads, bases)
    standardise(heads, states().split(700))
    for head, base in zip(heads, bases, strict=True):
        assert torch.equal(head.base.weight, base.base.weight)
        learning = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
        assert not any(name.startswith(("base.", "state_input.")) for name in learning) and "output.weight" in learning
    assert torch.equal(heads[0].state_input.weight, heads[1].state_input.weight)
