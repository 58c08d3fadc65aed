"""torch's attention on a CPU for grouped queries: the heads that share keys are further queries of one head.

transformers copies keys and values for each head instead. In bfloat16, 25 rows of 250 tokens with 12 heads on 2 then
take 24 ms a layer for one new token, in place of 1.4 ms: as long as all else of a 1.5B model's layer. From 5.23 on it
does as we do for one query, but not for the several queries of a verification.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "accept_head_grouped"
FEW = 32  # queries; with more, copies take little of the time
CHANGES = ("position_bias", "softcap")  # what else a model can ask of its attention


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' `sdpa`. query: (rows, heads, new, channels). key, value: (rows, key heads, slots, channels).
    attention_mask: (rows, 1, new, slots) → (rows, new, heads, channels)."""
    (_, heads, new, _), shared = query.shape, key.shape[1]
    if heads == shared or new > FEW or any(others.get(name) is not None for name in CHANGES):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    queries = query.unflatten(1, (shared, -1)).flatten(2, 3)  # (rows, key heads, group × new, channels)
    mask = of_groups(attention_mask, heads // shared, query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)
    return output.unflatten(2, (-1, new)).permute(0, 3, 1, 2, 4).flatten(2, 3), None


@lru_cache(maxsize=2)  # one for each kind of layers; tensors are found by identity
def of_groups(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The mask of so many heads at once, to be added. torch would make it from the Boolean one in every layer. mask:
    (rows, 1, new, slots) bool → (rows, 1, group × new, slots)."""
    added = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    return added.repeat(1, 1, group, 1)


AttentionInterface.register(NAME, grouped_attention)


def is_grouped(model: PreTrainedModel) -> bool:
    """Whether the model is on a CPU, and its own attention is torch's with fewer heads of keys than of queries."""
    text: Any = model.config.get_text_config(decoder=True)
    shared = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    own = model.device.type == "cpu" and model.config._attn_implementation == "sdpa"
    return own and model._supports_attention_backend and shared < text.num_attention_heads
