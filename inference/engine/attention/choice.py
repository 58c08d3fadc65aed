"""Chooses the attention of a model:

sdpa     torch's scaled_dot_product_attention with an explicit mask; the baseline, for every model and device
flash    see flash.py
varlen   see varlen.py
"""

from __future__ import annotations

from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from accept_head.errors import InputError
from accept_head.inference.engine.attention.backend import Backend, caps_scores
from accept_head.inference.engine.attention.flash import FLASH
from accept_head.inference.engine.attention.varlen import VARLEN

Attention = Literal["auto", "sdpa", "flash", "varlen"]
BACKENDS = (FLASH, VARLEN)  # in the order of preference

# Requirements of the two kernels; tests replace the kernels by a reference on a CPU.
DEVICES: tuple[str, ...] = ("cuda",)
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
COMPUTE_CAPABILITY = (8, 0)
MOST_HEAD_CHANNELS = 256


def choose(model: PreTrainedModel, attention: Attention = "auto", *, traced: bool = False) -> Backend | None:
    """The backend for this model; None for its own attention with an explicit mask.

    `auto` takes the first of flash and varlen that computes the same as the model's `sdpa`. A model loaded with `eager`
    keeps it. traced: torch.compile must be able to trace through the backend. Raises InputError with the reason when
    the requested one does not support the model.
    """
    if attention not in get_args(Attention):
        raise InputError(f"attention is {attention!r}, expected one of {get_args(Attention)}")
    if attention == "sdpa" or (attention == "auto" and model.config._attn_implementation != "sdpa"):
        return None
    for backend in BACKENDS if attention == "auto" else [_named(attention)]:
        reason = refusal(backend, model, traced=traced)
        if reason is None:
            return backend
        if attention != "auto":
            raise InputError(f"attention is {attention!r}, but {reason}; use auto or sdpa")
    return None


def refusal(backend: Backend, model: PreTrainedModel, *, traced: bool = False) -> str | None:
    """Why a backend does not support a model; None if no reason is known before running it."""
    if backend.name in declined.get(model, {}):
        return declined[model][backend.name]
    text = model.config.get_text_config(decoder=True)
    devices = {parameter.device.type for parameter in model.parameters()}
    if backend.kernel is None:
        return f"{backend.needs} is not there"
    if traced and not backend.traced:
        return "torch.compile cannot trace through it; compile=graphs or none can have it"
    if not devices <= set(DEVICES):
        return f"{_described(model)} is on {', '.join(sorted(devices))}, and it runs on {', '.join(DEVICES)}"
    if "cuda" in devices and torch.cuda.get_device_capability(model.device) < COMPUTE_CAPABILITY:
        return "it needs a GPU of compute capability 8.0 or newer"
    if model.dtype not in DTYPES:
        return f"{_described(model)} is {model.dtype}, and it takes {' or '.join(str(dtype) for dtype in DTYPES)}"
    return _refused_layers(backend, model, text)


def _refused_layers(backend: Backend, model: PreTrainedModel, text: Any) -> str | None:
    """As `refusal`, for the computation of the attention layers."""
    name, own = _described(model), model.config._attn_implementation
    if own not in ("sdpa", "eager"):
        return f"{name} has attention implementation {own!r}, expected 'sdpa' or 'eager'"
    if not (model._supports_attention_backend and model._supports_flash_attn):
        return f"{name} does not let its attention be replaced"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return f"{name} has attention sinks"
    if getattr(text, "kv_lora_rank", None) is not None:
        return f"{name} has keys and values of different sizes"
    if getattr(text, "use_bidirectional_attention", None):
        return f"{name} has attention that is not causal"
    channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if channels > MOST_HEAD_CHANNELS or channels % 8:
        return f"{name} has heads of {channels} channels, expected a multiple of 8 up to {MOST_HEAD_CHANNELS}"
    if caps_scores(model) and not backend.caps:
        return f"{name} caps its attention scores"
    return None


# For each model, the backends that failed on it in a test, and the reason.
declined: WeakKeyDictionary[PreTrainedModel, dict[str, str]] = WeakKeyDictionary()


def decline(backend: Backend, model: PreTrainedModel, reason: str) -> None:
    declined.setdefault(model, {})[backend.name] = reason


def _named(name: str) -> Backend:
    return next(backend for backend in BACKENDS if backend.name == name)


def _described(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
