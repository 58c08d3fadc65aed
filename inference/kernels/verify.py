"""Lossless verification of a batch of drafts of different lengths (Leviathan 2023, Alg. 1, docs/theory.md §1).

In torch the ratio test takes thirty operations per round, and a match ten. All but one work on a few numbers per row.
The other one reads whole distributions three times. A kernel reads them once, with enough programs to fill a GPU. It
accepts exactly the tokens that torch accepts. Its redraws equal those of `accept_head.sampling` up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.acceptance import acceptance_probability, residual
from accept_head.inference.kernels.launch import counters, dense, power_of_two, triton_kernels
from accept_head.inference.kernels.sampling import FEW_ROWS, LARGE_PART, PART, draw
from accept_head.inference.kernels.usable import Check, usable


class Verified(NamedTuple):
    """Results of a verification.

    accepted: (batch,), number of accepted draft tokens. next_ids: (batch,), the token after them. acceptance: (batch,
    k), a(Y) of each draft token, by the ratio test only. Slots that a row has not drafted have arbitrary values.
    """

    accepted: Tensor
    next_ids: Tensor
    acceptance: Tensor | None = None


def by_ratio(
    p: Tensor, q: Tensor, draft_ids: Tensor, drafted: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor
) -> Verified:
    """Accept Y_i with probability min(1, p(Y_i)/q(Y_i)) until the first rejection.

    The rejected token is redrawn from the residual. If all are accepted, a bonus token is drawn from p.

    p: (batch, k + 1, vocab), the target at each draft position and after the last. q: (batch, k, vocab). draft_ids:
    (batch, k). Row r uses the first drafted[r] slots. accept_uniform: (batch, k). redraw_uniform: (batch,).
    """
    if draft_ids.shape[1] == 0:
        return Verified(torch.zeros_like(drafted), draw(p[:, 0], redraw_uniform))
    if p.dtype is q.dtype is torch.float32 and len(p) and usable(p, CHECK):
        return ratio_by_kernel(p, q, draft_ids, drafted, accept_uniform, redraw_uniform)
    return ratio_in_torch(p, q, draft_ids, drafted, accept_uniform, redraw_uniform)


def ratio_in_torch(
    p: Tensor, q: Tensor, draft_ids: Tensor, drafted: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor
) -> Verified:
    """`by_ratio` in torch, for at least one slot."""
    k = draft_ids.shape[1]
    acceptance = acceptance_probability(p[:, :k], q, draft_ids)
    accepted = _leading(accept_uniform < acceptance, drafted)
    row = torch.arange(len(p), device=p.device)
    p_next = p[row, accepted]  # (batch, vocab)
    q_next = q[row, accepted.clamp(max=k - 1)]
    rejected = (accepted < drafted)[:, None]
    next_ids = draw(torch.where(rejected, residual(p_next, q_next), p_next), redraw_uniform)
    return Verified(accepted, next_ids, acceptance)


def ratio_by_kernel(
    p: Tensor, q: Tensor, draft_ids: Tensor, drafted: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor
) -> Verified:
    """`by_ratio` by a kernel, for at least one slot. Raises ValueError when p or q is not float32."""
    if p.dtype is not torch.float32 or q.dtype is not torch.float32:
        raise ValueError(f"p is {p.dtype} and q {q.dtype}, expected float32")
    p, q, draft_ids, accept_uniform = (dense(each) for each in (p, q, draft_ids, accept_uniform.double()))
    redraw_uniform = redraw_uniform.double()
    (batch, slots), vocab, device = draft_ids.shape, p.shape[-1], p.device
    part = PART if batch <= FEW_ROWS else LARGE_PART
    splits = -(-vocab // part)
    sums = torch.empty(batch, 2, splits, dtype=torch.float64, device=device)
    acceptance = torch.empty(batch, slots, dtype=torch.float32, device=device)
    accepted, ids = torch.empty(2, batch, dtype=torch.int64, device=device)
    with torch.cuda.device_of(p):
        triton_kernels("verify").accept_by_ratio[(batch, splits)](
            p, q, draft_ids, drafted, accept_uniform, redraw_uniform, acceptance, accepted, ids, sums,
            counters(device, batch), vocab, slots, p.stride(0), p.stride(1), q.stride(0), q.stride(1),
            draft_ids.stride(0), accept_uniform.stride(0), redraw_uniform.stride(0),
            BLOCK=part, SPLITS=power_of_two(splits), SLOTS=power_of_two(slots),
        )  # fmt: skip
    return Verified(accepted, ids, acceptance)


def by_match(target_ids: Tensor, draft_ids: Tensor, drafted: Tensor) -> Verified:
    """`by_ratio` in the limit of one-hot p and q: a draft token is accepted if it is the target's argmax.

    target_ids: (batch, k + 1), the target's argmax at each draft position and after the last. The rest as in
    `by_ratio`.
    """
    if draft_ids.numel() and usable(draft_ids, CHECK):
        return match_by_kernel(target_ids, draft_ids, drafted)
    return match_in_torch(target_ids, draft_ids, drafted)


def match_in_torch(target_ids: Tensor, draft_ids: Tensor, drafted: Tensor) -> Verified:
    accepted = _leading(target_ids[:, :-1] == draft_ids, drafted)
    return Verified(accepted, target_ids.gather(1, accepted[:, None])[:, 0])


def match_by_kernel(target_ids: Tensor, draft_ids: Tensor, drafted: Tensor) -> Verified:
    target_ids, draft_ids = dense(target_ids), dense(draft_ids)
    batch, slots = draft_ids.shape
    accepted, ids = torch.empty(2, batch, dtype=torch.int64, device=draft_ids.device)
    with torch.cuda.device_of(draft_ids):
        triton_kernels("verify").accept_by_match[(batch,)](
            target_ids, draft_ids, drafted, accepted, ids, slots, target_ids.stride(0), draft_ids.stride(0),
            SLOTS=power_of_two(slots),
        )  # fmt: skip
    return Verified(accepted, ids)


def _leading(passed: Tensor, drafted: Tensor) -> Tensor:
    """How many of each row's draft tokens passed before the first that did not. passed: (batch, k) → (batch,)."""
    within = torch.arange(passed.shape[1], device=passed.device) < drafted[:, None]
    return (passed & within).long().cumprod(-1).sum(-1)


def compare(device: torch.device, batch: int = 5, vocab: int = 2 * PART + 7) -> None:
    """Raises AssertionError when the kernels and torch differ.

    Inputs: drafts of different lengths of which all, none or some tokens are accepted, from models that agree, differ,
    or drop tokens that the other keeps.
    """
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
        drafted[:2], ids[:2, slots - 1] = slots, q[:2, slots - 1].argmin(-1)  # a token that q drops
        numbers = torch.rand(2, batch, slots, generator=random, dtype=torch.float64).to(device)
        given = p, q, ids, drafted, numbers[0], numbers[1, :, 0]
        _same(ratio_by_kernel(*given), ratio_in_torch(*given))
        targets = torch.cat([ids, ids[:, :1]], dim=1)
        targets[2:] = torch.randint(0, 3, targets[2:].shape, generator=random).to(device)
        few = ids.where(torch.arange(batch, device=device)[:, None] < 2, ids % 3)
        _same(match_by_kernel(targets, few, drafted), match_in_torch(targets, few, drafted))


def _same(found: Verified, expected: Verified) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


CHECK = Check("verification", compare)
