"""The grid that `tune` tries: thresholds, bounds, lags and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accept_head.errors import InputError
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.replay.thresholds import Setting
from accept_head.inference.tune.objectives import Objective
from accept_head.inference.tune.rules import RULES, checked_rules

Search = Literal["grid", "cost"]
PROBABILITIES = ThresholdPolicy.grid
K_MIN, K_MAX = (1, 2), (4, 8, 20)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings to try.

    thresholds: of heads, and of rules on probabilities. nats: thresholds of entropy. rules: the policies that need no
    training, by name. search: how heads are tuned.
    """

    thresholds: Sequence[float] = PROBABILITIES
    nats: Sequence[float] = EntropyPolicy.grid
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
        own = _own(rule)
        return self.nats if rule == "entropy" else self.thresholds if own == PROBABILITIES else own

    def settings(self, thresholds: Sequence[float]) -> list[Setting]:
        return [Setting(threshold=t, k_min=low, k_max=high) for low, high in self.bounds for t in thresholds]


def checked_grid(
    thresholds: Sequence[float] | None,
    k_min: Sequence[int] | None,
    k_max: Sequence[int] | None,
    lag: Sequence[int] | None,
    rules: Sequence[str] | None,
    search: Search | None,
    objective: Objective,
    *,
    has_heads: bool,
) -> Grid:
    """The grid that the options of the command line ask for. None: the default of `tune`.

    Raises InputError for values out of range, and for values that nothing would read.
    """
    if search is None:
        search = "cost" if thresholds is k_min is None and objective == "mean" else "grid"
    grid = Grid(
        thresholds=_checked("thresholds", thresholds, PROBABILITIES, 0.0, 1.0),
        k_min=_checked("k_min", k_min, K_MIN, 1),
        k_max=_checked("k_max", k_max, K_MAX, 1),
        lags=_checked("lag", lag, (0, 1), 0, 1),
        rules=checked_rules(rules),
        search=search,
    )
    if not grid.bounds:
        raise InputError(f"no k_min of {list(grid.k_min)} is at most any k_max of {list(grid.k_max)}")
    _check_read(grid, has_heads, thresholds=thresholds, k_min=k_min)
    if search == "cost" and objective != "mean":
        raise InputError(f"search is 'cost' and objective {objective!r}, expected 'mean' with it")
    return grid


def _checked(name: str, given: Sequence[Any] | None, default: Sequence[Any], low: float, high: float = 64) -> Any:
    values = tuple(default) if given is None else tuple(given)
    if not values or not all(low <= value <= high for value in values):
        raise InputError(f"{name} is {list(values)}, expected numbers from {low:g} to {high:g}")
    return values


def _check_read(grid: Grid, has_heads: bool, **given: Sequence[float] | None) -> None:
    """Raises InputError for thresholds or a k_min that nothing would read. Heads tuned by cost have neither."""
    readers = {"thresholds": [name for name in RULES if _own(name) == PROBABILITIES], "k_min": list(RULES)}
    for name, values in given.items():
        read = (has_heads and grid.search == "grid") or set(readers[name]) & set(grid.rules)
        if values is not None and not read:
            rules = ", ".join(readers[name])
            raise InputError(
                f"{name} is {values}, but nothing here reads it: expected a --head with --search grid, or one of the "
                f"rules {rules}"
            )


def _own(rule: str) -> Sequence[float]:
    """A rule's default thresholds."""
    own: Sequence[float] = getattr(RULES[rule], "grid", PROBABILITIES)
    return own
