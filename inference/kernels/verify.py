"""Verification in one kernel, where Triton and a GPU are.

In torch the ratio test is thirty operations a round and a match ten, all but one on a few numbers a row; the one that
is not reads whole distributions three times over. Here they are read once, by as many programs as a GPU has room for.

What is accepted is what `verify` says to the bit. Tokens are redrawn as `accept_head.sampling` draws, up to rounding.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from accept_head.inference.kernels import signals as fused_signals
from accept_head.inference.kernels.sampling import FEW_ROWS, LARGE_PART, PART
from accept_head.inference.kernels.signals import counters, holds, power_of_two


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can take it, and work on its device. ACCEPT_HEAD_KERNELS=0 in the environment says no."""
    return (tensor.is_cuda or fused_signals.ON_ANY_DEVICE) and fused_signals._triton() and _proven(tensor.device)


def by_ratio(
    p: Tensor, q: Tensor, draft_ids: Tensor, drafted: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `verify.verify`, of float32 and one slot at least → (batch,) accepted, (batch,) ids, (batch, k) acceptance.

    Raises ValueError where p or q are of another type: pointers have one.
    """
    from accept_head.inference.kernels.triton import verify as kernels

    if p.dtype is not torch.float32 or q.dtype is not torch.float32:
        raise ValueError(f"p is {p.dtype} and q {q.dtype}, expected float32")
    p, q, draft_ids, accept_uniform = (_close(each) for each in (p, q, draft_ids, accept_uniform.double()))
    redraw_uniform = redraw_uniform.double()
    (batch, slots), vocab, device = draft_ids.shape, p.shape[-1], p.device
    part = PART if batch <= FEW_ROWS else LARGE_PART
    splits = -(-vocab // part)
    sums = torch.empty(batch, 2, splits, dtype=torch.float64, device=device)
    acceptance = torch.empty(batch, slots, dtype=torch.float32, device=device)
    accepted, ids = torch.empty(2, batch, dtype=torch.int64, device=device)
    with torch.cuda.device_of(p):
        kernels.accept_by_ratio[(batch, splits)](
            p, q, draft_ids, drafted, accept_uniform, redraw_uniform, acceptance, accepted, ids, sums,
            counters(device, batch), vocab, slots, p.stride(0), p.stride(1), q.stride(0), q.stride(1),
            draft_ids.stride(0), accept_uniform.stride(0), redraw_uniform.stride(0),
            BLOCK=part, SPLITS=power_of_two(splits), SLOTS=power_of_two(slots),
        )  # fmt: skip
    return accepted, ids, acceptance


def by_match(target_ids: Tensor, draft_ids: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """See `verify.verify_greedy` → (batch,) accepted, (batch,) ids."""
    from accept_head.inference.kernels.triton import verify as kernels

    target_ids, draft_ids = _close(target_ids), _close(draft_ids)
    batch, slots = draft_ids.shape
    accepted, ids = torch.empty(2, batch, dtype=torch.int64, device=draft_ids.device)
    with torch.cuda.device_of(draft_ids):
        kernels.accept_by_match[(batch,)](
            target_ids, draft_ids, drafted, accepted, ids, slots, target_ids.stride(0), draft_ids.stride(0),
            SLOTS=power_of_two(slots),
        )  # fmt: skip
    return accepted, ids


def _close(tensor: Tensor) -> Tensor:
    """Its last dimension without gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@cache
def _proven(device: torch.device) -> bool:
    """Tried once, against torch."""
    return holds(lambda: agree(device), "verification", device)


def agree(device: torch.device, batch: int = 5, vocab: int = 2 * PART + 7) -> None:
    """Raises AssertionError where the kernels say anything else than torch does: of drafts of different lengths, of
    which all, none or some are accepted, from models that agree, do not, or drop tokens that the other keeps."""
    from accept_head.inference.decode.verify import verify_greedy_in_torch, verify_in_torch

    random = torch.Generator().manual_seed(0)
    for slots in (1, 3, 4, 6):
        p = torch.randn(batch, slots + 1, vocab, generator=random).mul(2)
        q = (
            p[:, :slots]
            + torch.randn(batch, slots, vocab, generator=random) * torch.linspace(0, 2, batch)[:, None, None]
        )
        q = q.masked_fill(torch.rand(q.shape, generator=random) < 0.3, -torch.inf).to(device)
        p, q = p.to(device).softmax(-1), q.softmax(-1)
        p[0, :slots] = q[0]
        ids = q.cpu().flatten(0, 1).multinomial(1, generator=random).view(batch, slots).to(device)
        drafted = torch.randint(0, slots + 1, (batch,), generator=random).to(device)
        drafted[:2], ids[:2, slots - 1] = slots, q[:2, slots - 1].argmin(-1)  # which q does not keep
        numbers = torch.rand(2, batch, slots, generator=random, dtype=torch.float64).to(device)
        given = p, q, ids, drafted, numbers[0], numbers[1, :, 0]
        _same(by_ratio(*given), verify_in_torch(*given))
        targets = torch.cat([ids, ids[:, :1]], dim=1)
        targets[2:] = torch.randint(0, 3, targets[2:].shape, generator=random).to(device)
        few = ids.where(torch.arange(batch, device=device)[:, None] < 2, ids % 3)
        _same(by_match(targets, few, drafted), verify_greedy_in_torch(targets, few, drafted))


def _same(found: tuple[Tensor, ...], expected: tuple[Tensor | None, ...]) -> None:
    for mine, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
