"""Rounds of an EAGLE-3 drafter from every position of a text at once, each token taken from the text.

In a round that begins with slot i, step 0 reads the target's state at slot i, and step d reads the drafter's own output
of step d − 1. So a slot t has another output at every step: that of the round that began at slot t − d. It attends to
the slots up to t − d as they are at step 0, and to the later ones as they are at their own steps of that round. This is
EAGLE-3's training-time test (arXiv:2503.01840, §3.2), and what decoding computes one round after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

from accept_head.eagle3.network import Eagle3Attention, Eagle3Drafter, Rotation, rotated


class Step(NamedTuple):
    """What every slot gives out at one step, (batch, asked, hidden) each, after and before the last norm. The first
    ones, as many as the number of the step, mean nothing: their rounds began before any of these slots."""

    hidden: Tensor
    own: Tensor


def unroll(
    drafter: Eagle3Drafter, input_ids: Tensor, states: Tensor, steps: int, asked: Tensor | None = None
) -> Iterator[Step]:
    """Yield the outputs of the steps, 0 first.

    input_ids: (batch, slots), x_1, x_2, … of the text. states: (batch, slots, hidden), the target's at x_0, x_1, …,
    projected. Padding is on the right. asked: (batch, asked), the slots whose outputs are wanted, one after the other;
    all when left out.
    """
    body, layer = drafter.model, drafter.model.midlayer
    slots = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    if asked is None:
        asked = slots.expand_as(input_ids)
    embedded = layer.input_layernorm(body.embed_tokens(input_ids))
    inputs = torch.cat([embedded, layer.hidden_norm(states)], dim=-1)
    attention = UnrolledAttention(layer.self_attn, inputs, body.rotary_emb(states, slots), asked)
    embedded, states = (each.take_along_dim(asked[..., None], dim=1) for each in (embedded, states))
    for step in range(steps):
        normed = layer.hidden_norm(states)
        residual = normed if layer.norm_before_residual else states
        residual = residual + attention(torch.cat([embedded, normed], dim=-1), step)
        own = residual + layer.mlp(layer.post_attention_layernorm(residual))
        yield Step(body.norm(own), own)
        states = later(own, 1)


class UnrolledAttention:
    """The layer's attention at one step after the other. It keeps the keys and values of all slots at step 0, and of
    those that are asked for at later steps."""

    def __init__(self, module: Eagle3Attention, inputs: Tensor, rotation: Rotation, asked: Tensor):
        """inputs: (batch, slots, 2 × hidden), of step 0."""
        self.module, self.asked = module, asked
        self.filled = [self._fill(inputs, rotation)]
        cosines, sines = rotation
        self.rotation = cosines[0][asked], sines[0][asked]

    def __call__(self, inputs: Tensor, step: int) -> Tensor:
        """(batch, asked, 2 × hidden) → (batch, asked, hidden)."""
        if step:
            self.filled.append(self._fill(inputs, self.rotation))
        query = rotated(self.module.by_head(self.module.q_proj, inputs), self.rotation)
        mixed = self._mixed(query * self.module.scaling, step).transpose(1, 2).reshape(*inputs.shape[:-1], -1)
        attended: Tensor = self.module.o_proj(mixed)
        return attended

    def _fill(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values for every head of queries."""
        keys, values = self.module.fill(inputs, rotation, None)
        return repeat_kv(keys, self.module.num_key_value_groups), repeat_kv(values, self.module.num_key_value_groups)

    def _mixed(self, query: Tensor, step: int) -> Tensor:
        """query: (batch, heads, asked, head_dim) → the values that it attends to, in the same shape."""
        (keys, values), *own = self.filled
        slots = keys.shape[2]
        seen = torch.arange(slots, device=query.device) <= (self.asked - step)[..., None]
        before = (query @ keys.transpose(-1, -2)).masked_fill(~seen[:, None], torch.finfo(query.dtype).min)
        # A slot's own round is at step d where the slot so many before is at step d − 1, and so on.
        own = [(later(key, step - at), later(value, step - at)) for at, (key, value) in enumerate(own, start=1)]
        shares = torch.cat([before, *((query * key).sum(-1, keepdim=True) for key, _ in own)], dim=-1).softmax(-1)
        mixed = shares[..., :slots] @ values
        for at, (_, value) in enumerate(own, start=slots):
            mixed = mixed + shares[..., at, None] * value
        return mixed


def later(values: Tensor, slots: int) -> Tensor:
    """Each slot has what the slot so many before it had. values: (…, slots, channels)."""
    return values.roll(slots, dims=-2)
