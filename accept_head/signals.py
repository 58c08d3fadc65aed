"""What the draft's own distribution says about a token it drew: cheap evidence next to the hidden state.

The hidden state at Y_i has seen the token, but not how likely the draft thought it; these numbers say just that. They
are functions of q and Y_i that the loop has at hand anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

# In this order wherever they are stacked; each is also a column of a trace.
SIGNALS = ("draft_logprob", "draft_entropy", "draft_max_prob")


def draft_signals(q: Tensor, y: Tensor) -> Tensor:
    """log q(Y), entropy in nats, max q. q: (..., vocab); y: (...) → (..., 3) float32.

    When decoding is greedy, q is one-hot and says nothing: pass the plain softmax (`Sampling.signal_probabilities`).
    """
    chosen = q.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    log_probability = chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()
    return torch.stack([log_probability, torch.special.entr(q).sum(-1), q.max(-1).values], dim=-1)
