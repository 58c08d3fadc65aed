"""The draft signals: numbers from the draft's own distribution about a token it drew.

The hidden state at Y_i depends on the token, but not on how likely the draft found it. The signals add this. They are
functions of q and Y_i, which the loop has anyway.

When decoding is greedy, q is one-hot and carries no information: pass the plain softmax
(`Sampling.signal_probabilities`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Stacked in this order everywhere. Each is also a column of a trace.
SIGNALS = ("draft_logprob", "draft_entropy", "draft_max_prob")
LEAST_LOG = math.log(torch.finfo(torch.float32).tiny)  # log q of smaller probabilities is set to this


def draft_signals(q: Tensor, y: Tensor) -> Tensor:
    """All of SIGNALS. q: (..., vocab); y: (...) → (..., 3) float32."""
    return torch.stack(signals_of_q(q, y), dim=-1)


def draft_logprob(q: Tensor, y: Tensor) -> Tensor:
    """log q(Y). q: (..., vocab); y: (...) → (...)."""
    chosen = q.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()


def draft_entropy(q: Tensor) -> Tensor:
    """Entropy in nats. q: (..., vocab) → (...)."""
    # torch.special.entr is five times slower on a CPU. 0 · log 0 counts as 0.
    return -torch.linalg.vecdot(q.clamp(min=torch.finfo(q.dtype).tiny).log_(), q)


def draft_max_prob(q: Tensor) -> Tensor:
    """max q. q: (..., vocab) → (...)."""
    return q.amax(-1)


def signals_of_q(q: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SIGNALS one by one. q: (..., vocab); y: (...) → (...) each."""
    return draft_logprob(q, y), draft_entropy(q), draft_max_prob(q)


def signals_of_logits(logits: Tensor, temperature: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SIGNALS for q = softmax(logits / temperature), without computing q.

    With z = (logits − max) / temperature and s = Σ exp z: log q(Y) = z_Y − log s, H = log s − Σ z·exp z / s,
    max q = 1 / s.

    logits: (batch, vocab), any float dtype, −inf allowed; temperature: (batch,) above 0; y: (batch,) → float32.
    """
    logits = logits.float()
    scaled = (logits - logits.amax(-1, keepdim=True)) * (1 / temperature[:, None])
    # Clamped to avoid 0 · −inf; above the least normal number, as below it a CPU takes ten times as long.
    z = scaled.clamp(min=LEAST_LOG + 1)
    share = z.exp()
    total = share.sum(-1)
    log_total = total.log()
    logprob = scaled.gather(-1, y.unsqueeze(-1)).squeeze(-1) - log_total
    return logprob.clamp(min=LEAST_LOG), log_total - (share * z).sum(-1) / total, 1 / total
