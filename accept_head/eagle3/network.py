"""An EAGLE-3 drafter: one decoder layer that reads what the target has computed (arXiv:2503.01840).

Slot i of its cache takes the token x_{i+1} and a state s_i, and gives the distribution of x_{i+2}. Where the target has
been, s_i is the target's: its residual stream before some of its layers, projected by `fc`. Beyond, s_i is the
drafter's own output at slot i − 1, before its last norm. Its vocabulary is a part of the target's: token d of the
drafter is token d + d2t[d] of the target; the target's other tokens have probability 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (batch, new, head_dim) each


class Eagle3Output(NamedTuple):
    logits: Tensor  # (batch, new, draft vocabulary), of `drafted_ids`
    hidden: Tensor  # (batch, new, hidden), after the last norm
    own: Tensor  # (batch, new, hidden), before it: the states for the next slots


class Eagle3Attention(LlamaAttention):
    """A Llama layer's attention that reads a token's embedding beside the state: twice the width. Its queries may be of
    fewer tokens than its keys."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self, name).out_features
            setattr(self, name, nn.Linear(2 * config.hidden_size, outputs, bias=False))

    def fill(self, inputs: Tensor, rotation: Rotation, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """inputs: (batch, new, 2 × hidden) → keys and values of all slots, (batch, heads, slots, head_dim) each."""
        keys, values = rotated(self.by_head(self.k_proj, inputs), rotation), self.by_head(self.v_proj, inputs)
        return (keys, values) if cache is None else cache.update(keys, values, self.layer_idx)

    def attend(
        self, inputs: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """inputs, rotation: of the tokens that ask → (batch, asking, hidden)."""
        queries = rotated(self.by_head(self.q_proj, inputs), rotation)
        name = self.config._attn_implementation
        attention: Callable[..., tuple[Tensor, Tensor | None]]
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        mixed, _ = attention(self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling)
        attended: Tensor = self.o_proj(mixed.reshape(*inputs.shape[:-1], -1))
        return attended

    def by_head(self, project: nn.Linear, inputs: Tensor) -> Tensor:
        """(batch, new, 2 × hidden) → (batch, heads, new, head_dim)."""
        by_head: Tensor = project(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return by_head


def rotated(values: Tensor, rotation: Rotation) -> Tensor:
    """values: (batch, heads, new, head_dim)."""
    cosines, sines = (each[:, None] for each in rotation)
    return values * cosines + rotate_half(values) * sines


class Eagle3Layer(nn.Module):
    """A Llama layer with that attention."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(width, eps=eps) for _ in range(3)
        )

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        rotation: Rotation,
        last: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        normed = self.hidden_norm(states)
        inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        keys, values = self.self_attn.fill(inputs, rotation, cache)
        residual = normed if self.norm_before_residual else states
        if last is not None:
            row, (cosines, sines) = torch.arange(len(last), device=last.device), rotation
            inputs, residual = inputs[row, last][:, None], residual[row, last][:, None]
            rotation = cosines[row, last][:, None], sines[row, last][:, None]
        residual = residual + self.self_attn.attend(inputs, rotation, keys, values, attention_mask)
        return residual + self.mlp(self.post_attention_layernorm(residual))

    def fill(self, embedded: Tensor, states: Tensor, rotation: Rotation, cache: Cache) -> None:
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        self.self_attn.fill(inputs, rotation, cache)


class Eagle3Body(nn.Module):
    """The drafter without its language-model head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(target_width(config) * len(layers_read(config)), config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor,
        position_ids: Tensor,
        last: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """→ states after and before the last norm, (batch, new, hidden) each, or (batch, 1, hidden) with `last`."""
        rotation, embedded = self.rotary_emb(states, position_ids), self.embed_tokens(input_ids)
        own = self.midlayer(embedded, states, rotation, last, attention_mask, past_key_values)
        return self.norm(own), own

    def fill(self, input_ids: Tensor, states: Tensor, position_ids: Tensor, past_key_values: Cache) -> None:
        """Write these slots' keys and values: all that later slots read of them, as there is one layer."""
        rotation, embedded = self.rotary_emb(states, position_ids), self.embed_tokens(input_ids)
        self.midlayer.fill(embedded, states, rotation, past_key_values)


class Eagle3Drafter(PreTrainedModel):
    """The drafter as a transformers model. saved.py reads and writes its files."""

    config_class = LlamaConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    config: LlamaConfig
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.model = Eagle3Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.post_init()

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Layers of the target before which its residual stream is read."""
        return layers_read(self.config)

    @property
    def output_size(self) -> int:
        """Number of ids that it gives a probability: all of the target's, 0 for those that it lacks."""
        return int(self.config.vocab_size)

    @property
    def lacks_tokens(self) -> bool:
        """Whether it scores only a part of the target's vocabulary."""
        return len(self.d2t) < self.output_size

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_vocabulary(self, ids: Tensor) -> None:
        """Draft over these tokens of the target. ids: (draft_vocab_size,), ascending."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def project(self, states: Tensor) -> Tensor:
        """The target's states, (…, layers × target width) → (…, hidden)."""
        projected: Tensor = self.model.fc(states)
        return projected

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
        last: Tensor | None = None,
    ) -> Eagle3Output:
        """input_ids: (batch, new), x_{i+1} of slots i. states: (batch, new, hidden), s_i. position_ids: i. last:
        (batch,) the place of the one slot of each row whose prediction is wanted; attention_mask is then of these. Of
        the others only keys and values are computed."""
        hidden, own = self.model(input_ids, states, position_ids, last, attention_mask, past_key_values)
        return Eagle3Output(self.lm_head(hidden), hidden, own)

    @property
    def drafted_ids(self) -> Tensor:
        """(draft vocabulary,) the target's ids of its tokens, ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def spread(self, values: Tensor, lacking: float = -torch.inf) -> Tensor:
        """Values of its tokens, (…, draft vocabulary), → of the target's, (…, the target's vocabulary); `lacking` of
        those that it lacks."""
        ids = self.drafted_ids.expand_as(values)
        return values.new_full((*values.shape[:-1], self.output_size), lacking).scatter_(-1, ids, values)


def layers_read(config: LlamaConfig) -> tuple[int, ...]:
    return tuple(config.eagle_config["eagle_aux_hidden_state_layer_ids"])


def target_width(config: LlamaConfig) -> int:
    return int(getattr(config, "target_hidden_size", None) or config.hidden_size)
