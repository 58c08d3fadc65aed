"""Policies side by side: rates, throughput by eq. 3.1, gain over the best fixed K, shares of the oracle's
gain and of the informed bound's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accept_head.cost import DecodeCounts, ForwardCosts, oracle_gap_closed, total_time
from accept_head.errors import InputError
from accept_head.inference.replay.bootstrap import RESAMPLES, draws, interval

BOUNDS = ("informed", "oracle")  # rows that no policy decodes with


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one policy did: its counts per prompt, on the same prompts in the same order as every other policy."""

    name: str
    params: dict[str, Any]
    counts: Sequence[DecodeCounts]


def compare(
    measured: Sequence[Measured], costs: ForwardCosts, *, seed: int = 0, resamples: int = RESAMPLES
) -> list[dict[str, Any]]:
    """One row a policy, in the form of `summary.json` (architecture page, "The public surface").

    `measured` must hold `fixed:K` policies and `oracle`. throughput: tokens/s. gain_over_best_fixed and
    oracle_gap_closed are fractions, and so is informed_gap_closed, which is there where `informed` is among them: the
    policy's gain over the best fixed K as a share of the informed bound's. ci95 holds the 95 % bootstrap interval, over
    prompts, of all but block_efficiency; prompts are resampled jointly for all policies, and the best fixed K is chosen
    anew in every resample, as a user would on that data.

    Raises InputError when no fixed policy or no oracle is among them.
    """
    names = [policy.name for policy in measured]
    fixed = [i for i, name in enumerate(names) if name.startswith("fixed:")]
    if not fixed or "oracle" not in names:
        raise InputError("a comparison needs at least one fixed:K policy and the oracle")
    bounds = {f"{name}_gap_closed": names.index(name) for name in ("oracle", "informed") if name in names}
    table = np.array([[_row(count) for count in policy.counts] for policy in measured])  # (policy, prompt, 4)

    everything = _figures(table.sum(1), costs, fixed, bounds)
    drawn = draws(table.shape[1], seed=seed, resamples=resamples)
    resampled = _figures(np.einsum("rn,pnc->rpc", drawn, table), costs, fixed, bounds)
    return [
        {
            "name": policy.name,
            "params": policy.params,
            **{name: float(values[index]) for name, values in everything.items()},
            "block_efficiency": float(1 / everything["verification_rate"][index]),
            "ci95": {name: interval(values[:, index]) for name, values in resampled.items()},
        }
        for index, policy in enumerate(measured)
    ]


def _figures(
    totals: np.ndarray, costs: ForwardCosts, fixed: list[int], bounds: dict[str, int]
) -> dict[str, np.ndarray]:
    """totals: (..., policy, 4), sums over prompts → each figure of `compare`, (..., policy). bounds: the policies whose
    gain others' gains are shares of, by the name of the share."""
    generated, discarded, verified, _ = np.moveaxis(totals, -1, 0)
    speeds = throughputs(totals, costs)
    best = speeds[..., fixed].max(-1, keepdims=True)
    return {
        "discard_rate": discarded / generated,
        "verification_rate": verified / generated,
        "throughput": speeds,
        "speedup": speeds * costs.t_autoregressive,
        "gain_over_best_fixed": speeds / best - 1,
        # A bound below the best fixed K, which the informed one can be where there is nothing to gain, has no gap.
        **{
            name: oracle_gap_closed(speeds, best, np.maximum(speeds[..., [bound]], best))
            for name, bound in bounds.items()
        },
    }


def throughputs(totals: np.ndarray, costs: ForwardCosts) -> np.ndarray:
    """Tokens/s by eq. 3.1; t_autoregressive a token where nothing is drafted. totals: (..., 4), sums of generated and
    discarded tokens, target forwards and draft forwards → (...)."""
    generated, _, verified, drafts = np.moveaxis(totals, -1, 0)
    speculative = total_time(costs, draft_forwards=drafts, target_forwards=verified) / generated
    return 1 / np.where(drafts == 0, costs.t_autoregressive, speculative)


def _row(count: DecodeCounts) -> tuple[float, float, float, float]:
    return count.generated, count.discarded, count.target_forwards, count.draft_forwards
