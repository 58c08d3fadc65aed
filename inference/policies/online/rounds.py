"""Single rounds as recalibration keeps them until it learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Bounds on the inputs of the fit. In float32 the next probability above that of MOST_LOG_ODDS is 1.
MOST_SIGNAL, MOST_LOG_ODDS = 6.0, 16.0


class Token(NamedTuple):
    """Inputs of the fit at one depth: z, (batch,), signals, (batch, signals), and state, (batch, state)."""

    z: Tensor
    signals: Tensor | None
    state: Tensor | None


class JudgedRound(NamedTuple):
    """A verified round. depths: number of depths. tokens: (depths, batch, …) each. tenants, judged: (batch,) int.
    labels: (batch, depths)."""

    depths: int
    tokens: Token
    tenants: Tensor
    judged: Tensor
    labels: Tensor


class Gathered(NamedTuple):
    """All tokens of some rounds, (n,) each; x: (n, 1 + signals + state). counts: whether the token was judged. label:
    1 or 0 for accepted or rejected, or a(Y). tenant: of its row. depth: from 0."""

    x: Tensor
    label: Tensor
    counts: Tensor
    tenant: Tensor
    depth: Tensor


def gathered(rounds: Sequence[JudgedRound], normal: Tensor, k_max: int, dtype: torch.dtype) -> Gathered:
    """All tokens of the rounds. normal: (2, signals) mean and deviation of the signals."""
    tokens = [each.tokens for each in rounds]
    tenant, judged = (
        torch.cat([values for each in rounds for values in [getattr(each, name)] * each.depths])
        for name in ("tenants", "judged")
    )
    label = torch.cat([each.labels.t().reshape(-1) for each in rounds]).to(dtype)
    places = torch.arange(k_max, device=tenant.device)
    depth = torch.cat([places[: len(z), None].expand_as(z).reshape(-1) for z, *_ in tokens])
    x = torch.cat([z.reshape(-1) for z, *_ in tokens]).to(dtype).clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)[:, None]
    if normal.shape[1]:
        signals = torch.cat([s.flatten(0, 1) for _, s, _ in tokens if s is not None]).to(dtype)
        x = torch.cat([x, ((signals - normal[0]) / normal[1]).clamp(-MOST_SIGNAL, MOST_SIGNAL)], dim=-1)
    if states := [state.flatten(0, 1) for *_, state in tokens if state is not None]:
        x = torch.cat([x, torch.cat(states).to(dtype)], dim=-1)
    counts = depth < judged
    # Idle rows may hold NaN.
    return Gathered(torch.where(counts[:, None], x, 0.0), torch.where(counts, label, 0.0), counts, tenant, depth)
