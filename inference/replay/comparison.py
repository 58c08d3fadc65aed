"""Compares policies: rates, throughput by eq. 3.1, gain over the best fixed K, and that gain as a share of the oracle's
and of the informed bound's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accept_head.cost import ForwardCosts, oracle_gap_closed, total_time
from accept_head.errors import InputError
from accept_head.inference.replay.bootstrap import RESAMPLES, draws, interval

BOUNDS = ("informed", "oracle")  # rows that are bounds, not policies


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One policy on n prompts. All compared policies have the same prompts in the same order.

    counts: (n, 4) generated tokens, discarded tokens, target forwards and draft forwards of each response.
    """

    name: str
    params: dict[str, Any]
    counts: np.ndarray


def compare(
    measured: Sequence[Measured], costs: ForwardCosts, *, seed: int = 0, resamples: int = RESAMPLES
) -> list[dict[str, Any]]:
    """One row a policy, in the form of `summary.json` (docs/formats.md).

    measured: must contain `fixed:K` policies and `oracle`. throughput: tokens/s. gain_over_best_fixed,
    oracle_gap_closed and informed_gap_closed are fractions. A gap closed is the policy's gain over the best fixed K as
    a share of the bound's gain; informed_gap_closed is present if `informed` is among the policies. ci95: the 95 %
    bootstrap interval over prompts of all figures but block_efficiency. Prompts are resampled jointly for all policies.
    The best fixed K is chosen anew in every resample, as a user would on that data.

    Raises InputError when there is no fixed policy or no oracle.
    """
    names = [policy.name for policy in measured]
    fixed = [i for i, name in enumerate(names) if name.startswith("fixed:")]
    if not fixed or "oracle" not in names:
        raise InputError("a comparison needs at least one fixed:K policy and the oracle")
    bounds = {f"{name}_gap_closed": names.index(name) for name in ("oracle", "informed") if name in names}
    table = np.array([policy.counts for policy in measured], dtype=float)  # (policy, prompt, 4)

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
    """totals: (..., policy, 4), sums over prompts → each figure of `compare`, (..., policy). bounds: the index of the
    bound for each gap-closed figure."""
    generated, discarded, verified, _ = np.moveaxis(totals, -1, 0)
    speeds = throughputs(totals, costs)
    best = speeds[..., fixed].max(-1, keepdims=True)
    return {
        "discard_rate": discarded / generated,
        "verification_rate": verified / generated,
        "throughput": speeds,
        "speedup": speeds * costs.t_autoregressive,
        "gain_over_best_fixed": speeds / best - 1,
        # If there is nothing to gain, the informed bound can be below the best fixed K. The gap is then 0.
        **{
            name: oracle_gap_closed(speeds, best, np.maximum(speeds[..., [bound]], best))
            for name, bound in bounds.items()
        },
    }


def throughputs(totals: np.ndarray, costs: ForwardCosts) -> np.ndarray:
    """Tokens/s by eq. 3.1; 1 / t_autoregressive if nothing is drafted. totals: (..., 4), sums of generated tokens,
    discarded tokens, target forwards and draft forwards → (...)."""
    generated, _, verified, drafts = np.moveaxis(totals, -1, 0)
    speculative = total_time(costs, draft_forwards=drafts, target_forwards=verified) / generated
    return 1 / np.where(drafts == 0, costs.t_autoregressive, speculative)
