"""Variance of the divergence at verified positions, which predicts later ones (DSDE, docs/theory.md §6)."""

from __future__ import annotations

import torch
from torch import Tensor

DECAY, SHORT, LONG = 0.85, 10, 30


def weighted_variance(history: Tensor, valid: Tensor, decay: float = DECAY) -> Tensor:
    """Var_w = Σ α·(KLD − μ_w)² / Σ α with α = decay^age; the newest value is last and has age 0.

    history: (..., window) divergences in nats; valid: (..., window) bool, at least one True each → (...).
    """
    age = torch.arange(history.shape[-1] - 1, -1, -1, dtype=history.dtype, device=history.device)
    weight = decay**age * valid
    total = weight.sum(-1, keepdim=True)
    mean = (weight * history).sum(-1, keepdim=True) / total
    return (weight * (history - mean).square()).sum(-1) / total.squeeze(-1)


def variance_ratio(history: Tensor, valid: Tensor) -> Tensor:
    """WVIR = Var_w(latest SHORT) / Var_w(all): above 1 if the divergence became less steady; 1 if Var_w(all) is 0.

    history, valid: (..., window) as above → (...).
    """
    latest = weighted_variance(history[..., -SHORT:], valid[..., -SHORT:])
    overall = weighted_variance(history, valid)
    return torch.where(overall > 0, latest / overall.clamp(min=torch.finfo(overall.dtype).tiny), 1.0)
