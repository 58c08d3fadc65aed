"""Lossless verification of a batch of drafts of different lengths (Leviathan 2023, Alg. 1, docs/theory.md §1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.acceptance import acceptance_probability, residual
from accept_head.inference.kernels import verify as fused_verify
from accept_head.inference.kernels.sampling import draw


class Verified(NamedTuple):
    """accepted: (batch,) draft tokens accepted, from the first on. next_ids: (batch,) the token that follows them.
    acceptance: (batch, k) a(Y) of each, by the ratio test; nothing is said of slots that a row has not drafted."""

    accepted: Tensor
    next_ids: Tensor
    acceptance: Tensor | None = None


def verify(
    p: Tensor, q: Tensor, draft_ids: Tensor, drafted: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor
) -> Verified:
    """Accept Y_i with probability min(1, p(Y_i)/q(Y_i)) until the first rejection; redraw that one from the residual,
    or draw a bonus token from p when all are accepted.

    p: (batch, k + 1, vocab), the target at each draft position and after the last. q: (batch, k, vocab) and draft_ids:
    (batch, k), of which row r uses the first drafted[r]. accept_uniform: (batch, k); redraw_uniform: (batch,).
    """
    k = draft_ids.shape[1]
    if k == 0:
        return Verified(torch.zeros_like(drafted), draw(p[:, 0], redraw_uniform))
    if p.dtype is q.dtype is torch.float32 and len(p) and fused_verify.usable(p):
        return Verified(*fused_verify.by_ratio(p, q, draft_ids, drafted, accept_uniform, redraw_uniform))
    return verify_in_torch(p, q, draft_ids, drafted, accept_uniform, redraw_uniform)


def verify_in_torch(
    p: Tensor, q: Tensor, draft_ids: Tensor, drafted: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor
) -> Verified:
    """The same of one slot at least, where no kernels are."""
    k = draft_ids.shape[1]
    acceptance = acceptance_probability(p[:, :k], q, draft_ids)
    accepted = _leading(accept_uniform < acceptance, drafted)
    row = torch.arange(len(p), device=p.device)
    p_next = p[row, accepted]  # (batch, vocab)
    q_next = q[row, accepted.clamp(max=k - 1)]
    rejected = (accepted < drafted)[:, None]
    next_ids = draw(torch.where(rejected, residual(p_next, q_next), p_next), redraw_uniform)
    return Verified(accepted, next_ids, acceptance)


def verify_match(p: Tensor, draft_ids: Tensor, drafted: Tensor, uniform: Tensor) -> Verified:
    """Sampler match: draw X_i ∼ p at each position and accept Y_i if it is X_i; the first X that is not follows them.
    Acceptance is Σ p·q, lower than the ratio test's, but emitted tokens are the target's own draws whatever was drafted
    or dropped: every policy is lossless.

    p: (batch, k + 1, vocab); uniform: (batch, k + 1), one number a position; the rest as in `verify`.
    """
    return verify_greedy(draw(p, uniform), draft_ids, drafted)


def verify_greedy(target_ids: Tensor, draft_ids: Tensor, drafted: Tensor) -> Verified:
    """The limit of one-hot p and q: a draft token is accepted if it is the target's own choice.

    target_ids: (batch, k + 1), the target's argmax at each draft position and after the last; the rest as in `verify`.
    """
    if draft_ids.numel() and fused_verify.usable(draft_ids):
        return Verified(*fused_verify.by_match(target_ids, draft_ids, drafted))
    return verify_greedy_in_torch(target_ids, draft_ids, drafted)


def verify_greedy_in_torch(target_ids: Tensor, draft_ids: Tensor, drafted: Tensor) -> Verified:
    """The same where no kernels are."""
    accepted = _leading(target_ids[:, :-1] == draft_ids, drafted)
    return Verified(accepted, target_ids.gather(1, accepted[:, None])[:, 0])


def _leading(passed: Tensor, drafted: Tensor) -> Tensor:
    """How many of each row's own drafts passed before the first that did not. passed: (batch, k) → (batch,)."""
    within = torch.arange(passed.shape[1], device=passed.device) < drafted[:, None]
    return (passed & within).long().cumprod(-1).sum(-1)
