"""The acceptance test of one token: its probability, the redraw, and the coupling behind both (docs/theory.md §1, §4).

p is the target's distribution and q the draft's, after sampling processing: float tensors (..., vocab) that sum to 1.
Greedy decoding is the limit in which both are one-hot. Names follow Leviathan et al. 2023 and SpecDec++.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.sampling import draw


def acceptance_probability(p: Tensor, q: Tensor, y: Tensor) -> Tensor:
    """a(y) = min(1, p(y) / q(y)). p, q: (..., vocab); y: (...) ids with q(y) > 0 → (...)."""
    return _ratio(p, q, y).clamp(max=1.0)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """β = Σ_y min(p(y), q(y)) = 1 − TV(p, q) = E_{y∼q}[a(y)]. p, q: (..., vocab) → (...)."""
    return torch.minimum(p, q).sum(-1)


def divergence(target_logits: Tensor, draft_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(p ‖ q) = Σ p·(log p − log q), nats, of two plain softmaxes. Logits: (..., vocab) → (...)."""
    log_p, log_q = (_log_softmax(logits, temperature) for logits in (target_logits, draft_logits))
    p = log_p.exp()
    gap = log_p.sub_(log_q).masked_fill_(p == 0, 0.0)  # −inf − −inf where a token cannot be drawn
    return torch.linalg.vecdot(p, gap).clamp(min=0)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits.float() if temperature == 1 else logits.float() / temperature).log_softmax(-1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[p − q]₊ / Σ[p − q]₊, the distribution that replaces a rejected token. p, q: (..., vocab) → (..., vocab).

    When p and q are equal, nothing is rejected and the residual is undefined. Then p is returned.
    """
    positive = (p - q).clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 0, positive / total.clamp(min=torch.finfo(p.dtype).tiny), p)


class Coupled(NamedTuple):
    """What maximal coupling draws for a given target token. Both fields have the shape of `x`."""

    draft_ids: Tensor  # Y ∼ q
    accepted: Tensor  # bool; where true, Y equals X


def couple_with_target(p: Tensor, q: Tensor, x: Tensor, accept_uniform: Tensor, redraw_uniform: Tensor) -> Coupled:
    """Post-hoc coupling (docs/theory.md §4): given X ∼ p, draw the Y that speculative decoding would have proposed.

    accepted ∼ Bernoulli(min(1, q(X)/p(X))); Y = X if accepted, else Y ∼ [q − p]₊. Then Y ∼ q, P(accepted) = β, and
    P(accepted | Y) = a(Y).

    p, q: (..., vocab); x: (...) ids drawn from p; accept_uniform, redraw_uniform: (...) independent in [0, 1).
    """
    accepted = accept_uniform < _ratio(q, p, x)
    rejected = ~accepted  # the few positions whose residual is needed
    draft_ids = x.clone()
    draft_ids[rejected] = draw(residual(q[rejected], p[rejected]), redraw_uniform[rejected])
    return Coupled(draft_ids, accepted)


def _ratio(numerator: Tensor, denominator: Tensor, y: Tensor) -> Tensor:
    index = y.unsqueeze(-1)
    top, bottom = numerator.gather(-1, index).squeeze(-1), denominator.gather(-1, index).squeeze(-1)
    # x/0 gives 0: when a response is scored in another batch, a token can fall just outside top-k. It is not accepted.
    return torch.where(bottom > 0, top / bottom, torch.zeros_like(top))
