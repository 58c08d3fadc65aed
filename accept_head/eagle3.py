"""An EAGLE-3 drafter: one decoder layer that reads what the target has computed (arXiv:2503.01840).

Slot i of its cache takes the token x_{i+1} and a state s_i, and gives the distribution of x_{i+2}. Where the target has
been, s_i is the target's: its residual stream before some of its layers, projected by `fc`. Beyond, s_i is the
drafter's own output at slot i − 1, before its last norm. Its vocabulary is a part of the target's: token d of the
drafter is token d + d2t[d] of the target; the target's other tokens have probability 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, write_json

# Options of other drafters of this family, which change what is computed.
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")


class Drafted(NamedTuple):
    logits: Tensor  # (batch, new, vocab) of the target's vocabulary; −inf for tokens that the drafter lacks
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
    """The drafter as a transformers model. `save_pretrained` and `load_eagle3` use the layout that vLLM, SpecForge and
    EAGLE's authors share."""

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
        """Number of ids that it scores: all of the target's."""
        return int(self.config.vocab_size)

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
        return Drafted(self.spread(self.lm_head(hidden)), hidden, own)

    def spread(self, logits: Tensor) -> Tensor:
        """(…, draft vocabulary) → (…, the target's vocabulary)."""
        ids = torch.arange(len(self.d2t), device=logits.device) + self.d2t
        return logits.new_full((*logits.shape[:-1], self.output_size), float("-inf")).index_copy(-1, ids, logits)


def layers_read(config: LlamaConfig) -> tuple[int, ...]:
    return tuple(config.eagle_config["eagle_aux_hidden_state_layer_ids"])


def target_width(config: LlamaConfig) -> int:
    return int(getattr(config, "target_hidden_size", None) or config.hidden_size)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def load_eagle3(folder: Path, target: PreTrainedModel, *, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """Load a drafter for its target, whose input embeddings it shares if it has none of its own.

    Raises InputError naming the file and the field or tensor that is missing, unknown or of another shape.
    """
    config = read_config(folder, target)
    drafter: Any = Eagle3Drafter(config)
    drafter.to(dtype or target.dtype)
    drafter.name_or_path = str(folder)
    expected = {name.removeprefix("model."): tensor for name, tensor in drafter.state_dict().items()}
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(path).items()}
    embeddings: Any = target.get_input_embeddings()
    found.setdefault("embed_tokens.weight", embeddings.weight.detach())
    if config.draft_vocab_size == config.vocab_size:  # then the checkpoint may lack the two maps
        found.setdefault("d2t", torch.zeros_like(drafter.d2t))
        found.setdefault("t2d", torch.ones_like(drafter.t2d))
    for name in sorted(expected.keys() ^ found.keys()):
        if name != "t2d":  # which follows from d2t
            raise InputError(f"{folder}: tensor {name!r} is {'missing' if name in expected else 'unknown'}")
    for name, tensor in expected.items():
        if name in found and found[name].shape != tensor.shape:
            raise InputError(
                f"{folder}: tensor {name!r} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            )
        if name in found:
            tensor.copy_(found[name])
    ids = drafter.d2t + torch.arange(len(drafter.d2t))
    if ids.amin() < 0 or ids.amax() >= config.vocab_size or (ids.diff() <= 0).any():
        raise InputError(f"{folder}: tensor 'd2t' does not map to ascending ids below {config.vocab_size}")
    drafter.set_vocabulary(ids)
    loaded: Eagle3Drafter = drafter.to(target.device).eval().requires_grad_(False)
    return loaded


def read_config(folder: Path, target: PreTrainedModel) -> LlamaConfig:
    """The config.json of EAGLE's authors, SpecForge and vLLM, or of speculators → a LlamaConfig with all fields that
    are read here. Raises InputError naming a field that does not suit."""
    path = folder / "config.json"
    values = read_json(path)
    if isinstance(layer := values.pop("transformer_layer_config", None), dict):
        values = {**layer, **{name: value for name, value in values.items() if name != "speculators_config"}}
    for name in UNSUPPORTED:
        if values.get(name):
            raise InputError(f"{path}: field {name!r} is {values[name]!r}; such drafters are not supported")
    for name, expected in (("model_type", "llama"), ("num_hidden_layers", 1)):
        if values.get(name, expected) != expected:
            raise InputError(f"{path}: field {name!r} is {values[name]!r}, expected {expected!r}")
    text = target.config.get_text_config(decoder=True)
    layers, vocabulary = text.num_hidden_layers, target.get_output_embeddings().weight.shape[0]
    eagle = values.get("eagle_config") or {}
    read = values.pop("eagle_aux_hidden_state_layer_ids", None) or eagle.get("eagle_aux_hidden_state_layer_ids")
    read = read or [2, layers // 2, layers - 3]  # vLLM's default
    if list(read) != sorted({*read} & {*range(layers)}):
        raise InputError(
            f"{path}: field 'eagle_aux_hidden_state_layer_ids' is {read}, expected ascending numbers, 0 to {layers - 1}"
        )
    values["eagle_config"] = {**eagle, "eagle_aux_hidden_state_layer_ids": read}
    values["draft_vocab_size"] = values.get("draft_vocab_size") or values.get("vocab_size")
    for name, expected in (("vocab_size", vocabulary), ("target_hidden_size", text.hidden_size)):
        if (values.get(name) or expected) != expected:
            raise InputError(f"{path}: field {name!r} is {values[name]}, but the target's is {expected}")
        values[name] = expected
    config = LlamaConfig(**values)
    config._attn_implementation = "sdpa"
    return config


def save_eagle3(drafter: Eagle3Drafter, folder: Path, *, embeddings: bool = False) -> None:
    """Write config.json and model.safetensors in the layout that vLLM reads. embeddings: also the input embeddings,
    which are the target's as a rule."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name.removeprefix("model."): tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    if not embeddings:
        del tensors["embed_tokens.weight"]
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    named = {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
    write_json(folder / "config.json", drafter.config.to_diff_dict() | named)
