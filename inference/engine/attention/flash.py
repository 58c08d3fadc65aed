"""flash_attn_with_kvcache, from the package flash-attn: bfloat16 or float16 on CUDA, Ampere or newer.

The cache layer writes keys and values before the call. The kernel could write them itself, but only at length, length +
1, …, which can go past a row's slots with the padding of a ragged forward.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from accept_head.inference.engine.attention.backend import Backend, Kernel


def _flash_kernel() -> Kernel:
    return import_module("flash_attn").flash_attn_with_kvcache


def _flash_plan(positions: Tensor, rows: Tensor | None, slots: int, heads: int) -> Tensor:
    """(1, rows, 1, 1): lengths; or (2, rows, 1, 1): lengths, and the cache row of each."""
    lengths = (positions[:, -1] + 1).clamp(max=slots)  # an idle row may point beyond its slots; it is not read
    parts = lengths[None] if rows is None else torch.stack([lengths, rows])
    return parts.to(torch.int32)[:, :, None, None]


def _flash_attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Tensor, scale: float, window: tuple[int, int], cap: float
) -> Tensor:
    # The kernel takes any strides with contiguous channels, so (batch, slots, heads, channels) is a view.
    return FLASH.kernel(  # type: ignore[misc]
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        cache_seqlens=plan[0, :, 0, 0],
        cache_batch_idx=plan[1, :, 0, 0] if len(plan) > 1 else None,
        softmax_scale=scale,
        causal=True,
        window_size=window if window[0] >= 0 else (-1, -1),
        softcap=cap,
    )


FLASH = Backend(
    "flash", "accept_head_kvcache", _flash_kernel, _flash_plan, _flash_attend, "the package flash-attn", caps=True
)
