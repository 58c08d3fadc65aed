"""torch.nn.attention.varlen.varlen_attn of torch; before 2.13, the operation that it calls. bfloat16 or float16 on
CUDA, Ampere or newer, without capped scores."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from inspect import signature

import torch
import torch.nn.attention
from torch import Tensor

from accept_head.inference.engine.attention.backend import Backend, Kernel

PAGE = 256  # a page of its paged cache has a multiple of this many tokens


def _varlen_kernel() -> Kernel:
    kernel = import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" in signature(kernel).parameters:
        return kernel
    operation = torch.ops.aten._flash_attention_forward  # called by varlen_attn, which has no row lengths before 2.13
    if "seqused_k" not in {argument.name for argument in operation.default._schema.arguments}:
        raise ImportError("this torch has no row lengths")
    return partial(packed_varlen, operation)


def packed_varlen(
    operation: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """`varlen_attn` with one page a row, by an operation without pages. The operation takes all keys in one sequence;
    `cu_seq_k` says where each row's keys begin. In this view row b of the cache begins at token b × heads × slots."""
    tokens = key.stride(0) // key.stride(1)  # from a row to the next, in the units of cu_seq_k
    packed = [
        pages.as_strided(((len(pages) - 1) * tokens + pages.shape[1], *pages.shape[2:]), pages.stride()[1:])
        for pages in (key, value)
    ]
    return operation(
        query,
        *packed,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        window_size == (-1, 0),
        return_debug_mask=False,
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
        seqused_k=seqused_k,
    )[0]


def _varlen_plan(positions: Tensor, rows: Tensor | None, slots: int, heads: int) -> Tensor:
    """(4, rows + 1, 1, 1): lengths; each row's page, which is its cache row; where each row's keys begin; where each
    row's queries begin. `packed_varlen` reads the third; with pages the kernel requires it but ignores its values."""
    count, new = positions.shape
    ends = torch.arange(count + 1, device=positions.device)
    lengths = (positions[:, -1] + 1).clamp(max=slots)
    pages = ends[:-1] if rows is None else rows
    padded = torch.nn.functional.pad(torch.stack([lengths, pages, pages * heads * slots]), (0, 1))
    return torch.cat([padded, (ends * new)[None]]).to(torch.int32)[:, :, None, None]


def _varlen_attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Tensor, scale: float, window: tuple[int, int], cap: float
) -> Tensor:
    # One page a row: with pages the kernel splits the keys among multiprocessors, which matters for few rows, and takes
    # any strides. With packed keys it splits nothing.
    count, heads, new, channels = query.shape
    if new == 1 and window[0] < 0:
        window = (-1, -1)  # the same for one query; heads of a group then share reading their keys
    output = VARLEN.kernel(  # type: ignore[misc]
        query.transpose(1, 2).reshape(count * new, heads, channels),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        plan[3, :, 0, 0],
        plan[2, :, 0, 0] if _wants_key_offsets() else None,
        new,
        keys.shape[2],
        scale=scale,
        window_size=window,
        enable_gqa=heads != keys.shape[1],
        seqused_k=plan[0, :count, 0, 0],
        block_table=plan[1, :count, 0, 0][:, None],
    )
    return output.view(count, new, heads, channels)


def _wants_key_offsets() -> bool:
    """Whether the kernel needs the key offsets. torch's own, FlashAttention 2, does; its replacements do not."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return current() in (None, "FA2")


VARLEN = Backend(
    "varlen",
    "accept_head_varlen",
    _varlen_kernel,
    _varlen_plan,
    _varlen_attend,
    "torch.nn.attention.varlen, of torch 2.10,",
    page=PAGE,
    traced=True,
)
