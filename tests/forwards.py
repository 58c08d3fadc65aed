"""Plain forwards of a model, as references for the product's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from accept_head.pair import Forward, base_model


def forward_with_hidden(model: PreTrainedModel, **inputs: Any) -> Forward:
    """One forward pass that also returns the last hidden state after the final norm, for any architecture.

    Asking for `output_hidden_states` would keep every layer's; recomputing logits from the hidden state would miss
    what some architectures do after it (Gemma's soft-capping). A hook on the base model has neither fault.
    """
    captured: list[Tensor] = []
    handle = base_model(model).register_forward_hook(lambda _module, _inputs, out: captured.append(out[0]))
    try:
        logits = model(**inputs).logits
    finally:
        handle.remove()
    return Forward(logits, captured[0])
