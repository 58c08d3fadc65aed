"""The base of a head: acceptance predicted from the draft's own distribution, in log-odds.

    logit P̂ = base(signals) + residual(state, embedding)

The base is a logistic regression on functions of the draft signals. It is fitted to convergence before the residual
learns (training/learn/base.py). Acceptance is close to linear in log-odds of q(Y) and of max q, and in the entropy. It
is not in the probabilities themselves. A few dozen prompts are enough to fit the base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.signals import SIGNALS

# Log-odds and log-probabilities are clipped here: float32 resolves 1 − q only to about 1e-7.
MOST_LOG_ODDS = 14.0

# Each function, and the signals it needs.
_LOGPROB, _ENTROPY, _MAX = SIGNALS
BASE_FUNCTIONS = {
    "log q": {_LOGPROB},
    "entropy": {_ENTROPY},
    "max q": {_MAX},
    "q": {_LOGPROB},
    "logit q": {_LOGPROB},
    "logit max q": {_MAX},
    "sqrt entropy": {_ENTROPY},
    "log q x entropy": {_LOGPROB, _ENTROPY},
    "log q - log max q": {_LOGPROB, _MAX},
}


def base_functions(signals: Tensor) -> Tensor:
    """All BASE_FUNCTIONS, in their order. signals: (..., 3), as `draft_signals` gives them → (..., 9)."""
    logprob, entropy, largest = signals.unbind(-1)
    logprob, entropy = logprob.clamp(-MOST_LOG_ODDS, 0), entropy.clamp(min=0)
    log_largest = largest.log().clamp(-MOST_LOG_ODDS, 0)
    functions = (
        logprob,
        entropy,
        largest,
        logprob.exp(),
        _logit(logprob),
        _logit(log_largest),
        entropy.sqrt(),
        logprob * entropy,
        logprob - log_largest,
    )
    return torch.stack(functions, dim=-1)


def places_of(signals: tuple[str, ...]) -> list[int]:
    """Indices of the BASE_FUNCTIONS that need no other signals than these."""
    return [place for place, needed in enumerate(BASE_FUNCTIONS.values()) if needed <= set(signals)]


def _logit(log_probability: Tensor) -> Tensor:
    """log p − log(1 − p), from log p ≤ 0."""
    odds = log_probability - (-torch.expm1(log_probability)).clamp(min=1e-30).log()
    return odds.clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
