"""The objectives of `accept-head tune`: tokens/s of all text or of the worst domain, or the discard rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from accept_head.cost import ForwardCosts
from accept_head.errors import InputError
from accept_head.inference.replay.bootstrap import draws
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.walk import Replayed

Objective = Literal["mean", "worst-domain", "discard"]
SURE = 0.975  # the upper end of a 95 % interval


def objective_of(
    objective: Objective, domains: Sequence[str], costs: ForwardCosts, best_fixed: Replayed, *, seed: int = 0
) -> Callable[[Replayed], Any]:
    """The function to maximise over replayed policies. Raises InputError for an unknown objective.

    mean: tokens/s over all responses. worst-domain: tokens/s in the domain where it is lowest. discard: the lowest
    discard rate among policies whose verification rate is at most that of the best fixed length, with confidence `SURE`
    by a bootstrap over responses; if there is none, the lowest verification rate.

    domains: of each response. best_fixed: the fastest fixed draft length. seed: of the bootstrap.
    """
    if objective not in get_args(Objective):
        raise InputError(f"objective is {objective!r}, expected one of {get_args(Objective)}")
    if objective == "discard":
        return _least_discard(best_fixed, seed)
    names = np.array(domains)
    groups = (
        [np.ones(len(names), dtype=bool)] if objective == "mean" else [names == name for name in sorted(set(names))]
    )
    return lambda policy: min(float(throughputs(policy.counts[group].sum(0), costs)) for group in groups)


def _least_discard(best_fixed: Replayed, seed: int) -> Callable[[Replayed], Any]:
    drawn = draws(len(best_fixed.counts), seed=seed)
    limits = _verification_rates(drawn @ best_fixed.counts)

    def value(policy: Replayed) -> tuple[bool, float]:
        ratios = _verification_rates(drawn @ policy.counts) / limits
        sure = bool(np.quantile(ratios, SURE) <= 1)
        return sure, -policy.total.discard_rate if sure else -policy.total.verification_rate

    return value


def _verification_rates(totals: np.ndarray) -> np.ndarray:
    """Target forwards per token. totals: (..., 4), as `Replayed.counts`."""
    return totals[..., 2] / totals[..., 0]
