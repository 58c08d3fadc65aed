"""Rounds from every position at once are those that decoding computes one after the other."""

from __future__ import annotations

import pytest
import torch

from accept_head.eagle3 import unroll as module
from accept_head.eagle3.unroll import unroll
from tests.examples import make_eagle3


@pytest.fixture(scope="module")
def target(random_llama):
    return random_llama(1, layers=4)


@pytest.fixture(scope="module")
def text():
    return torch.randint(5, 261, (2, 13), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def states_of(target, drafter, text):
    streams = target(text, output_hidden_states=True).hidden_states
    return drafter.project(torch.cat([streams[number][:, :-1] for number in drafter.layers_read], dim=-1))


@torch.no_grad()
def round_of(drafter, ids, states, start, steps):
    """A single round from a slot, by forwards over all slots so far without a cache → hidden states of its steps."""
    states, hidden = states[:, : start + 1], []
    for step in range(steps):
        slots = start + 1 + step
        output = drafter(ids[:, :slots], states, torch.arange(slots)[None])
        hidden.append(output.hidden[:, -1])
        states = torch.cat([states, output.own[:, -1:]], dim=1)
    return hidden


def farthest(target, drafter, text, steps=4):
    """The largest difference of any slot at any step."""
    states, ids = states_of(target, drafter, text), text[:, 1:]
    found = [step.hidden for step in unroll(drafter, ids, states, steps)]
    differences = [
        (expected - found[step][:, start + step]).abs().max()
        for start in range(ids.shape[1] - steps)
        for step, expected in enumerate(round_of(drafter, ids, states, start, steps))
    ]
    return float(max(differences))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_each_round_is_that_of_forwards_one_after_the_other(target, text, norm_before_residual):
    drafter = make_eagle3(target)
    drafter.model.midlayer.norm_before_residual = norm_before_residual
    assert farthest(target, drafter, text) < 1e-4


def test_it_tells_a_slot_that_attends_to_another_round(target, text, monkeypatch):
    monkeypatch.setattr(module, "later", lambda values, slots: values.roll(slots + (slots > 1), dims=-2))
    assert farthest(target, make_eagle3(target), text) > 1e-2


def test_padding_on_the_right_changes_nothing(target, text):
    drafter = make_eagle3(target)
    states, ids = states_of(target, drafter, text), text[:, 1:]
    alone = [step.hidden[:, :8] for step in unroll(drafter, ids[:, :8], states[:, :8], 3)]
    padded = [step.hidden[:, :8] for step in unroll(drafter, ids, states, 3)]
    for step, (one, other) in enumerate(zip(alone, padded, strict=True)):
        assert torch.allclose(one[:, step:], other[:, step:], atol=1e-5)


def test_slots_that_are_asked_for_are_as_among_all(target, text):
    """Of each text others. The slots before are only read. A step has no round that began before the first of them."""
    drafter = make_eagle3(target)
    states, ids = states_of(target, drafter, text), text[:, 1:]
    asked = torch.tensor([[2], [5]]) + torch.arange(7)
    every = [step.hidden.take_along_dim(asked[..., None], dim=1) for step in unroll(drafter, ids, states, 3)]
    some = [step.hidden for step in unroll(drafter, ids, states, 3, asked)]
    for step, (one, other) in enumerate(zip(every, some, strict=True)):
        assert torch.allclose(one[:, step:], other[:, step:], atol=1e-5)
