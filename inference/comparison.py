"""Policies side by side: rates, throughput by eq. 3.1, gain over the best fixed K, share of the oracle gap closed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accept_head.cost import DecodeCounts, ForwardCosts, oracle_gap_closed, total_time
from accept_head.errors import InputError

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one policy did: its counts per prompt, on the same prompts in the same order as every other policy."""

    name: str
    params: dict[str, Any]
    counts: Sequence[DecodeCounts]


def compare(measured: Sequence[Measured], costs: ForwardCosts, *, seed: int = 0) -> list[dict[str, Any]]:
    """One row a policy, in the form of `summary.json` (architecture page, "The public surface").

    `measured` must hold `fixed:K` policies and `oracle`. gain_over_best_fixed and oracle_gap_closed are fractions. ci95
    holds the 95 % bootstrap interval, over prompts, of each of the two; prompts are resampled jointly for all policies,
    and the best fixed K is chosen anew in every resample, as a user would on that data.

    Raises InputError when no fixed policy or no oracle is among them.
    """
    names = [policy.name for policy in measured]
    fixed = [i for i, name in enumerate(names) if name.startswith("fixed:")]
    if not fixed or "oracle" not in names:
        raise InputError("a comparison needs at least one fixed:K policy and the oracle")
    oracle = names.index("oracle")
    table = np.array([[_row(count) for count in policy.counts] for policy in measured])  # (policy, prompt, 3)

    everything = _throughputs(table.sum(1), costs)
    gains, gaps = _against_fixed(everything, fixed, oracle)
    prompts = table.shape[1]
    draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
    resampled = _throughputs(np.einsum("rn,pnc->rpc", draws.astype(float), table), costs)  # (resample, policy)
    gain_draws, gap_draws = _against_fixed(resampled, fixed, oracle)

    rows = []
    for index, policy in enumerate(measured):
        total = DecodeCounts.total(policy.counts)
        rows.append(
            {
                "name": policy.name,
                "params": policy.params,
                "discard_rate": total.discard_rate,
                "verification_rate": total.verification_rate,
                "throughput": float(everything[index]),
                "speedup": float(everything[index] * costs.t_autoregressive),
                "gain_over_best_fixed": float(gains[index]),
                "oracle_gap_closed": float(gaps[index]),
                "ci95": {
                    "gain_over_best_fixed": _interval(gain_draws[:, index]),
                    "oracle_gap_closed": _interval(gap_draws[:, index]),
                },
            }
        )
    return rows


def _row(count: DecodeCounts) -> tuple[float, float, float]:
    return count.generated, count.draft_forwards, count.target_forwards


def _throughputs(totals: np.ndarray, costs: ForwardCosts) -> np.ndarray:
    """totals: (..., policy, 3) → (..., policy) tokens/s: eq. 3.1, or t_autoregressive where nothing is drafted."""
    generated, drafts, verified = np.moveaxis(totals, -1, 0)
    speculative = total_time(costs, draft_forwards=drafts, target_forwards=verified) / generated
    return 1 / np.where(drafts == 0, costs.t_autoregressive, speculative)


def _against_fixed(speeds: np.ndarray, fixed: list[int], oracle: int) -> tuple[np.ndarray, np.ndarray]:
    """(gain over the best fixed K, share of the oracle gap closed), each of the shape of `speeds` (..., policy)."""
    best = speeds[..., fixed].max(-1, keepdims=True)
    return speeds / best - 1, oracle_gap_closed(speeds, best, speeds[..., [oracle]])


def _interval(draws: np.ndarray) -> list[float]:
    return [float(bound) for bound in np.quantile(draws, [0.025, 0.975])]
