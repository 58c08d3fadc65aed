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
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from accept_head.eagle3.network import Eagle3Drafter


class Step(NamedTuple):
    """What every slot gives out at one step, (batch, slots, hidden) each, after and before the last norm. Slots before
    the number of the step mean nothing: no round began so early."""

    hidden: Tensor
    own: Tensor


def unroll(drafter: Eagle3Drafter, input_ids: Tensor, states: Tensor, steps: int) -> Iterator[Step]:
    """Yield the outputs of the steps, 0 first.

    input_ids: (batch, slots), x_1, x_2, … of the text. states: (batch, slots, hidden), the target's at x_0, x_1, …,
    projected. Padding is on the right.
    """
    body, layer = drafter.model, drafter.model.midlayer
    embedded = layer.input_layernorm(body.embed_tokens(input_ids))
    rotation = body.rotary_emb(states, torch.arange(input_ids.shape[1], device=input_ids.device)[None])
    attention = UnrolledAttention(layer.self_attn, rotation)
    for _ in range(steps):
        normed = layer.hidden_norm(states)
        residual = normed if layer.norm_before_residual else states
        residual = residual + attention(torch.cat([embedded, normed], dim=-1))
        own = residual + layer.mlp(layer.post_attention_layernorm(residual))
        yield Step(body.norm(own), own)
        states = later(own, 1)


class UnrolledAttention:
    """The layer's attention at one step after the other. It keeps the keys and values of all steps."""

    def __init__(self, module: LlamaAttention, rotation: tuple[Tensor, Tensor]):
        self.module, self.rotation = module, rotation
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        """(batch, slots, 2 × hidden) → (batch, slots, hidden)."""
        module, shape = self.module, (*inputs.shape[:-1], -1, self.module.head_dim)
        query, key, value = (
            project(inputs).view(shape).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *self.rotation)
        self.keys.append(repeat_kv(key, module.num_key_value_groups))
        self.values.append(repeat_kv(value, module.num_key_value_groups))
        mixed = self._mixed(query * module.scaling).transpose(1, 2).reshape(*inputs.shape[:-1], -1)
        attended: Tensor = module.o_proj(mixed)
        return attended

    def _mixed(self, query: Tensor) -> Tensor:
        """query: (batch, heads, slots, head_dim) → the values that it attends to, in the same shape."""
        step, slots = len(self.keys) - 1, query.shape[2]
        seen = torch.ones(slots, slots, dtype=torch.bool, device=query.device).tril(-step)
        before = (query @ self.keys[0].transpose(-1, -2)).masked_fill(~seen, torch.finfo(query.dtype).min)
        keys, values = ([later(each, step - number) for number, each in enumerate(kept) if number]
                        for kept in (self.keys, self.values))  # fmt: skip
        within = [(query * key).sum(-1, keepdim=True) for key in keys]
        shares = torch.cat([before, *within], dim=-1).softmax(-1)
        mixed = shares[..., :slots] @ self.values[0]
        for number, value in enumerate(values):
            mixed = mixed + shares[..., slots + number, None] * value
        return mixed


def later(values: Tensor, slots: int) -> Tensor:
    """Each slot has what the slot so many before it had. values: (…, slots, channels)."""
    return values.roll(slots, dims=-2)
