"""An EAGLE-3 drafter: one decoder layer that reads what the target has computed (arXiv:2503.01840).

Slot i of its cache takes the token x_{i+1} and a state s_i, and gives the distribution of x_{i+2}. Where the target has
been, s_i is the target's: its residual stream before some of its layers, projected by `fc`. Beyond, s_i is the
drafter's own output at slot i − 1, before its last norm. Its vocabulary is a part of the target's: token d of the
drafter is token d + d2t[d] of the target; the target's other tokens have probability 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


class Drafted(NamedTuple):
    logits: Tensor  # (batch, new, draft vocabulary), of `drafted_ids`
    hidden: Tensor  # (batch, new, hidden), after the last norm
    own: Tensor  # (batch, new, hidden), before it: the states for the next slots


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads a token's embedding beside the state."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * width, outputs, bias=False))
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(width, eps=eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, states: Tensor, **attention: Any) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        attended, _ = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], dim=-1), **attention)
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


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
        self, input_ids: Tensor, states: Tensor, position_ids: Tensor, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        """→ states after and before the last norm, (batch, new, hidden) each."""
        rotation = self.rotary_emb(states, position_ids)
        own = self.midlayer(self.embed_tokens(input_ids), states, position_embeddings=rotation, **attention)
        return self.norm(own), own


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
    ) -> Drafted:
        """input_ids: (batch, new), x_{i+1} of slots i. states: (batch, new, hidden), s_i. position_ids: i."""
        attention: dict[str, Any] = {"attention_mask": attention_mask, "past_key_values": past_key_values}
        hidden, own = self.model(input_ids, states, position_ids, **attention)
        return Drafted(self.lm_head(hidden), hidden, own)

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
