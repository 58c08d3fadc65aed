"""The search: replay every setting of every policy on the same traces, and choose the best setting of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accept_head.cost import ForwardCosts, PairCosts
from accept_head.head.network import AcceptanceHead
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.comparison import BOUNDS, compare, throughputs
from accept_head.inference.replay.cost_aware import cost_aware
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.thresholds import replay_thresholds
from accept_head.inference.replay.truth import InformedTables
from accept_head.inference.replay.walk import Replayed, replay_fixed, replay_oracle
from accept_head.inference.tune.grid import Grid
from accept_head.inference.tune.objectives import Objective, objective_of
from accept_head.inference.tune.rules import LEARNERS, RULES, ask, spec_of


def search_all(
    traces: CoupledTraces,
    heads: Mapping[str, AcceptanceHead],
    costs: ForwardCosts,
    grid: Grid,
    objective: Objective = "mean",
    pair: PairCosts | None = None,
    truth: InformedTables | None = None,
    *,
    seed: int = 0,
) -> Tuned:
    """Replay all settings and choose.

    heads: by their names in a SPEC. pair: for `ask`. truth: for the informed bound. seed: for `objective_of`.
    """
    none, *fixed = replay_fixed(traces, range(traces.k_max + 1))
    families = {name: _replay_head(traces, name, head, grid, costs) for name, head in heads.items()}
    for name in grid.rules:
        if name in RULES:
            families[name] = replay_thresholds(traces, RULES[name](), grid.settings(grid.of(name)), name)
        else:
            families[name] = [ask(traces, name, v, costs, max(grid.k_max), pair) for v in _values(name, costs)]
    value = objective_of(objective, traces.domains, costs, fastest(fixed, costs), seed=seed)
    return Tuned(
        traces=traces,
        costs=costs,
        objective=objective,
        none=none,
        fixed=fixed,
        oracle=replay_oracle(traces),
        families=families,
        chosen={name: max(settings, key=value) for name, settings in families.items()},
        informed=replay_informed(traces, truth, costs) if truth else None,
    )


def _values(name: str, costs: ForwardCosts) -> Sequence[float]:
    """The values to try for a learner. Leviathan's c is known, but other values may do better than its i.i.d. model."""
    values = LEARNERS[name].values
    return sorted({round(costs.ratio, 4), *values}) if name == "leviathan" else values


def _replay_head(
    traces: CoupledTraces, name: str, head: AcceptanceHead, grid: Grid, costs: ForwardCosts
) -> list[Replayed]:
    lags: Iterable[int | None] = (None,) if head.config.reads == "before" else grid.lags
    policies = [HeadPolicy(head, 0.5, lag=lag) for lag in lags]
    if grid.search == "cost":
        return [cost_aware(traces, p, costs, name=f"head:{name}", k_max=max(grid.k_max))[1] for p in policies]
    settings = grid.settings(grid.thresholds)
    return [r for policy in policies for r in replay_thresholds(traces, policy, settings, f"head:{name}")]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The outcome of the search.

    fixed: every draft length. families: all tried settings, by policy. chosen: the best setting of each family.
    informed: None when there is no `truth`.
    """

    traces: CoupledTraces
    costs: ForwardCosts
    objective: Objective
    none: Replayed
    fixed: list[Replayed]
    oracle: Replayed
    families: dict[str, list[Replayed]]
    chosen: dict[str, Replayed]
    informed: Replayed | None = None

    def rows(self, seed: int = 0, costs_file: str | None = None) -> list[dict[str, Any]]:
        """One row per policy. spec: its SPEC for `--policy`, with costs_file if the policy predicts seconds."""
        bounds = [self.informed, self.oracle] if self.informed else [self.oracle]
        policies = [self.none, *self.fixed, *self.chosen.values(), *bounds]
        rows = compare(policies, self.costs, seed=seed)
        return [{**row, **({"spec": spec_of(row, costs_file)} if row["name"] not in BOUNDS else {})} for row in rows]

    @property
    def best_fixed(self) -> Replayed:
        return fastest(self.fixed, self.costs)


def fastest(policies: Sequence[Replayed], costs: ForwardCosts) -> Replayed:
    """The policy with the most tokens/s."""
    return max(policies, key=lambda policy: float(throughputs(policy.counts.sum(0), costs)))
