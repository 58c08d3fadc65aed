"""The positions that a query may see, for each kind of attention layer, and the models that the ragged cache supports.

A decoder refuses an unsupported model by name, so that no model is silently wrong. First transformers' description of
the layers decides, then a comparison of a few ragged forwards with a plain one (proof.py).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from accept_head.errors import InputError
from accept_head.pair import attention_mask_for


@dataclass(frozen=True)
class AttentionKinds:
    """The kinds of a model's layers. full: whether some layers see all tokens. window: number of tokens that the other
    layers see; None if there are no others."""

    model: PreTrainedModel
    layers: int
    full: bool
    window: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionKinds:
        """Raises InputError, naming model and reason, for layers whose state a lower length cannot roll back."""
        name = f"{type(model).__name__} ({model.config.model_type})"
        text = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise InputError(f"{name} is an encoder-decoder, expected a decoder-only model")
        if getattr(model, "_is_stateful", False):
            raise InputError(f"{name} has a recurrent state, which cannot forget a rejected token; it is not supported")
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise InputError(f"{name} takes no position ids, which rows of different lengths need; it is not supported")
        if getattr(text, "attention_chunk_size", None) is not None or "chunked_attention" in _layer_types(text):
            raise InputError(f"{name} has chunked attention layers, which are not supported")
        layers = DynamicCache(config=model.config).layers  # transformers' own view of the layers
        for layer in layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise InputError(f"{name} has layers with a {type(layer).__name__}, which are not supported")
        windows = {layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)}
        if len(windows) > 1:
            raise InputError(f"{name} has sliding windows of several sizes {sorted(windows)}, which are not supported")
        full = any(type(layer) is DynamicLayer for layer in layers)
        return cls(model, len(layers), full, next(iter(windows), None))

    def masks(self, positions: Tensor, extent: int) -> Tensor | dict[str, Tensor]:
        """The model's masks: which slots below `extent` the queries at `positions` (batch, new) may see. One mask
        (batch, 1, new, extent), or one for each kind of layer."""
        keys = torch.arange(extent, device=positions.device)
        queries = positions[..., None]
        seen = keys <= queries
        full = attention_mask_for(self.model, seen[:, None]) if self.full else None
        if self.window is None:
            return self.named(full, None)
        near = keys > queries - self.window
        return self.named(full, attention_mask_for(self.model, (seen & near)[:, None]))

    def named(self, full: Tensor | None, sliding: Tensor | None) -> Tensor | dict[str, Tensor]:
        """The masks, or plans, in the form that the model takes: one 4-D tensor for a model with one kind of layers, a
        dictionary by these names for two kinds."""
        masks = {"full_attention": full if self.full else None, "sliding_attention": sliding if self.window else None}
        there = {name: mask for name, mask in masks.items() if mask is not None}
        return there if len(there) > 1 else next(iter(there.values()))


def check_rotary(model: PreTrainedModel, max_length: int) -> None:
    """Raises InputError, naming the model, when the rotation of a row's positions depends on other rows' lengths."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and original and max_length > original:
        raise InputError(
            f"{type(model).__name__} ({model.config.model_type}) has rotary frequencies (longrope) that change for the "
            f"whole batch when a row passes {original} tokens, but a row needs {max_length}; use shorter ones"
        )


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])
