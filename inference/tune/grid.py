"""The grid that `tune` tries: thresholds, bounds, lags and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accept_head.errors import InputError
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay.thresholds import Setting
from accept_head.inference.tune.objectives import Objective
from accept_head.inference.tune.rules import RULES, checked_rules

Search = Literal["grid", "cost"]
PROBABILITIES = ThresholdPolicy.grid
K_MIN, K_MAX = (1, 2), (4, 8, 20)
MOST = 64  # tokens of a round


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings to try.

    thresholds: of heads, and of rules on probabilities. rules: the policies that need no training, by name. search: how
    heads are tuned.
    """

    thresholds: Sequence[float] = PROBABILITIES
    k_min: Sequence[int] = K_MIN
    k_max: Sequence[int] = K_MAX
    lags: Sequence[int] = (0, 1)
    rules: Sequence[str] = (*RULES, "adaedl")
    search: Search = "grid"

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(low, high) for low in self.k_min for high in self.k_max if low <= high]

    def of(self, rule: str) -> Sequence[float]:
        """The thresholds to try for a rule that needs no training."""
        own = RULES[rule].grid
        return self.thresholds if own is PROBABILITIES else own

    def settings(self, thresholds: Sequence[float]) -> list[Setting]:
        return [Setting(threshold=t, k_min=low, k_max=high) for low, high in self.bounds for t in thresholds]


def checked_grid(
    k_min: Sequence[int] | None,
    k_max: Sequence[int] | None,
    lag: Sequence[int] | None,
    rules: Sequence[str] | None,
    search: Search | None,
    objective: Objective,
    *,
    has_heads: bool,
    longest: int = MOST,
    divergence: bool = True,
) -> Grid:
    """The grid that the options of the command line ask for. None: the default of `tune`. longest: round that the
    traces can replay. divergence: whether they have it.

    Raises InputError for values out of range, and for a k_min that nothing would read.
    """
    if search is None:
        search = "cost" if k_min is None and objective == "mean" else "grid"
    grid = Grid(
        k_min=_checked("k_min", k_min, K_MIN, 1),
        k_max=_checked("k_max", k_max, sorted({min(each, longest) for each in K_MAX}), 1, longest),
        lags=_checked("lag", lag, (0, 1), 0, 1),
        rules=checked_rules(rules, divergence=divergence),
        search=search,
    )
    if not grid.bounds:
        raise InputError(f"no k_min of {list(grid.k_min)} is at most any k_max of {list(grid.k_max)}")
    if k_min is not None and not (has_heads and search == "grid") and not set(RULES) & set(grid.rules):
        raise InputError(
            f"k_min is {k_min}, but nothing here reads it: expected a --head with --search grid, or one of the rules "
            f"{', '.join(RULES)}"
        )
    if search == "cost" and objective != "mean":
        raise InputError(f"search is 'cost' and objective {objective!r}, expected 'mean' with it")
    return grid


def _checked(
    name: str, given: Sequence[int] | None, default: Sequence[int], low: int, high: int = MOST
) -> Sequence[int]:
    values = tuple(default if given is None else given)
    if not values or not all(low <= value <= high for value in values):
        raise InputError(f"{name} is {list(values)}, expected numbers from {low} to {high}")
    return values
