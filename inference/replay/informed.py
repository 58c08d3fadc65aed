"""The informed bound: the cost of a policy that knows the true a(Y_i) and β_{i+1}, but not the coins of verification.

The oracle (theorem 4.1) also knows the coins, which no head can. docs/theory.md says among which policies this bound is
the best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.cost import ForwardCosts
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.dinkelbach import dinkelbach
from accept_head.inference.replay.truth import InformedTables
from accept_head.inference.replay.walk import Replayed, replayed_of, walk_rounds


def replay_informed(
    traces: CoupledTraces, tables: InformedTables, costs: ForwardCosts, least: int = 1, *, foresight: bool = False
) -> Replayed:
    """Replay the bound: after Y_k draft one more iff C_k·β_{k+1} > λ·t_draft, where C_k = Π_{i≤k} a(Y_i) and λ is this
    policy's own throughput. A round has at least `least` tokens, if the budget allows.

    foresight: a looser bound, which also knows all later tokens of the draft. The length n of a round maximises
    Σ_{i≤n} (C_i − λ·t_draft).
    """
    paths = _Paths(traces, tables, least)
    lengths = paths.best_lengths if foresight else paths.myopic_lengths
    params = {"least": least} | ({"foresight": True} if foresight else {})

    def at(speed: float) -> Replayed:
        return replayed_of(walk_rounds(traces, lengths(speed * costs.t_draft)[:, None]), 0, "informed", params)

    return dinkelbach(at, costs)


class _Paths:
    """C and β along the path of a round from each position, (P, k_max). Both are 0 after the path's end, so that
    drafting on never pays there."""

    def __init__(self, traces: CoupledTraces, tables: InformedTables, least: int):
        self.shortest, self.drafts = traces.drafts.clamp(max=least), traces.drafts
        acceptance, overlaps = (
            torch.cat([values.double(), torch.zeros(1, dtype=torch.double)])[traces.path]
            for values in (tables.acceptance, tables.overlap)
        )
        self.survival = acceptance.cumprod(-1)  # C_1, C_2, …
        before = torch.cat([torch.ones_like(self.survival[:, :1]), self.survival[:, :-1]], dim=-1)
        self.gain = before * overlaps  # C_{k-1}·β_k: expected tokens from drafting Y_k

    def myopic_lengths(self, price: float) -> Tensor:
        """(P,) tokens before the first that is not worth `price`. A later rise of the gain is ignored."""
        pays = self.gain > price
        pays |= torch.arange(pays.shape[1]) < self.shortest[:, None]
        return torch.minimum(pays.long().cumprod(-1).sum(-1), self.drafts)

    def best_lengths(self, price: float) -> Tensor:
        """(P,) number of tokens n at which Σ_{k≤n} (C_k − price) is largest."""
        inside = torch.arange(self.gain.shape[1]) < self.drafts[:, None]
        sums = torch.where(inside, self.survival - price, -torch.inf).cumsum(-1)
        sums = torch.cat([torch.zeros_like(sums[:, :1]), sums], dim=-1)  # for 0, 1, 2, … tokens
        sums = torch.where(torch.arange(sums.shape[1]) < self.shortest[:, None], -torch.inf, sums)
        return sums.argmax(-1)
