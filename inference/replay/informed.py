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


def replay_informed(traces: CoupledTraces, tables: InformedTables, costs: ForwardCosts) -> Replayed:
    """Replay the bound: after Y_k draft one more iff C_k·β_{k+1} > λ·t_draft, where C_k = Π_{i≤k} a(Y_i) and λ is this
    policy's own throughput."""
    gain = expected_gain(traces, tables)

    def at(speed: float) -> Replayed:
        lengths = myopic_lengths(traces, gain, speed * costs.t_draft)
        return replayed_of(walk_rounds(traces, lengths[:, None]), 0, "informed", {"least": 1})

    return dinkelbach(at, costs)


def expected_gain(traces: CoupledTraces, tables: InformedTables) -> Tensor:
    """C_{k-1}·β_k along the path of a round from each position, (P, k_max): expected tokens from drafting Y_k. 0 after
    the path's end, so that drafting on never pays there."""
    acceptance, overlap = (
        torch.cat([values.double(), torch.zeros(1, dtype=torch.double)])[traces.path]
        for values in (tables.acceptance, tables.overlap)
    )
    before = torch.cat([torch.ones_like(acceptance[:, :1]), acceptance[:, :-1].cumprod(-1)], dim=-1)
    return before * overlap


def myopic_lengths(traces: CoupledTraces, gain: Tensor, price: float) -> Tensor:
    """(P,) tokens before the first that is not worth `price`, at least one if the budget allows. A later rise of the
    gain is ignored."""
    pays = gain > price
    pays[:, 0] = True
    return torch.minimum(pays.long().cumprod(-1).sum(-1), traces.drafts)
