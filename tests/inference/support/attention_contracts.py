"""The contracts of two foreign attention functions in plain torch, because the functions themselves need a GPU.

They follow the documented semantics of flash-attn 2.8 (flash_attn_interface.py, and the checks of its C++ side) and of
torch 2.13 and 2.11 (torch/nn/attention/varlen.py, and the checks of its flash_api.cpp). Calls that those refuse are
refused here, so a call that works here also works there. Sums are float32, in a different order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """q: (batch, new, heads, channels); caches: (batch of the cache, slots, key heads, channels) → as q."""
    refused = (k, v, rotary_cos, rotary_sin, cache_leftpad, block_table, alibi_slopes)
    assert all(each is None for each in refused) and num_splits == 0 and not return_softmax_lse, "not promised here"
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype
    batch, _, heads, channels = q.shape
    assert heads % k_cache.shape[2] == 0 and channels <= 256 and k_cache.shape == v_cache.shape
    check_int32(cache_seqlens, (batch,))
    if cache_batch_idx is not None:
        check_int32(cache_batch_idx, (batch,))
        k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
    assert len(k_cache) == batch
    left, right = window_size
    rows = [
        attend(q[row], k_cache[row], v_cache[row], int(length), left, 0 if causal else right, softmax_scale, softcap)
        for row, length in enumerate(cache_seqlens)
    ]
    return torch.stack(rows)


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """query: (all queries, heads, channels); key, value: (pages, slots of a page, key heads, channels) → as query."""
    assert return_aux is None and num_splits is None and block_table is not None, "not promised here"
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.dtype == key.dtype == value.dtype
    count = len(cu_seq_q) - 1
    check_int32(cu_seq_q, (count + 1,))
    check_int32(cu_seq_k, (count + 1,))  # torch's own kernel asks for it
    check_int32(seqused_k, (count,))
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1 and len(block_table) == count
    assert key.shape[1] % 256 == 0 and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert int(cu_seq_q.diff().max()) <= max_q and int(seqused_k.max()) <= max_k
    rows = []
    for row in range(count):
        keys, values = (pages[block_table[row].long()].flatten(0, 1) for pages in (key, value))
        one = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        rows.append(attend(one, keys, values, int(seqused_k[row]), *window_size, scale, 0.0))
    return torch.cat(rows)


def flash_attention_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
):
    """aten::_flash_attention_forward as it is in torch 2.11: keys in one sequence (tokens, key heads, channels), those
    of row b from cum_seq_k[b] on, seqused_k[b] of them."""
    assert not dropout_p and not return_debug_mask and alibi_slopes is None, "not promised here"
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    count = len(cum_seq_q) - 1
    check_int32(cum_seq_q, (count + 1,))
    check_int32(cum_seq_k, (count + 1,))
    check_int32(seqused_k, (count,))
    assert key.dim() == value.dim() == 3 and query.shape[1] % key.shape[1] == 0
    assert int(cum_seq_q.diff().max()) <= max_q and int(seqused_k.max()) <= max_k
    right = 0 if is_causal else window_size_right
    rows = []
    for row in range(count):
        one, first = query[cum_seq_q[row] : cum_seq_q[row + 1]], cum_seq_k[row]
        keys, values = (each[first : first + max_k] for each in (key, value))
        rows.append(attend(one, keys, values, int(seqused_k[row]), window_size_left, right, scale, 0.0))
    return torch.cat(rows), *(torch.empty(0) for _ in range(4))


def attend(
    q: Tensor, keys: Tensor, values: Tensor, length: int, left: int, right: int, scale: float | None, cap: float
) -> Tensor:
    """One sequence: q (new, heads, channels), keys and values (slots, key heads, channels), of which the first `length`
    count. Query i sees keys i + length − new − left to i + length − new + right, −1 meaning all."""
    assert 0 < length <= len(keys), "the kernel would read beyond the row"
    new, heads, channels = q.shape
    groups = heads // keys.shape[1]
    k, v = (each[:length].float().repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = torch.einsum("qhc,khc->hqk", q.float(), k) * (channels**-0.5 if scale is None else scale)
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    at, key = torch.arange(new)[:, None] + bottom_right(length, new), torch.arange(length)
    seen = torch.ones(new, length, dtype=torch.bool)
    if right >= 0:
        seen &= key <= at + right
    if left >= 0:
        seen &= key >= at - left
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)  # a query that sees nothing gets zeros
    return torch.einsum("hqk,khc->qhc", weights, v).to(q.dtype)


def bottom_right(length: int, new: int) -> int:
    """Where the first query stands among the keys."""
    return length - new


def check_int32(tensor: Tensor, shape: tuple[int, ...]) -> None:
    assert tensor is not None and tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.shape == shape
