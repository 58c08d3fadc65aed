"""The policies that need no training, as `tune` tries them: what their main parameter is, and which values it may have.

batch-map is not among them: for one row at a time it is `fixed`. Nor is max-prob-mean, which is max-prob there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from accept_head.cost import ForwardCosts, PairCosts
from accept_head.errors import InputError
from accept_head.inference.policies import (
    POLICIES,
    AdaEdlPolicy,
    AdaSpecPolicy,
    BanditPolicy,
    BudgetPolicy,
    ConfidencePolicy,
    CumulativeConfidencePolicy,
    DsdePolicy,
    EntropyPolicy,
    GoodputPolicy,
    HfConfidencePolicy,
    HfHeuristicPolicy,
    LeviathanPolicy,
    MaxProbPolicy,
    OnlineLogisticPolicy,
    OnlineSignalsPolicy,
    SvipPolicy,
)
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftPolicy
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.walk import Replayed

# Priced in one pass each (replay_thresholds).
RULES: dict[str, Callable[..., ThresholdPolicy]] = {
    "confidence": ConfidencePolicy,
    "cumulative-confidence": CumulativeConfidencePolicy,
    "max-prob": MaxProbPolicy,
    "entropy": EntropyPolicy,
    "svip": SvipPolicy,
}


class Learner(NamedTuple):
    """A policy that remembers: asked round by round. build: (value, costs, k_max) → policy. param: what `value` is, the
    argument of its SPEC unless `argument` says what that is: then an option. by_row: rows do not look at each other, so
    that all responses can be asked together."""

    build: Callable[[Any, PairCosts, int], DraftPolicy]
    param: str
    values: Sequence[float]
    argument: str = ""
    by_row: bool = False


LEARNERS = {
    "leviathan": Learner(lambda c, _, k: LeviathanPolicy(c, k_max=k), "cost_ratio", LeviathanPolicy.grid, by_row=True),
    "hf-heuristic": Learner(
        lambda first, _, k: HfHeuristicPolicy(first, k_max=k), "first", HfHeuristicPolicy.grid, by_row=True
    ),
    "hf-confidence": Learner(
        lambda theta, _, k: HfConfidencePolicy(theta, k_max=k), "threshold", HfConfidencePolicy.grid
    ),
    "adaedl": Learner(lambda level, _, k: AdaEdlPolicy(level, k_max=k), "threshold", AdaEdlPolicy.grid, by_row=True),
    "online-logistic": Learner(
        lambda level, _, k: OnlineLogisticPolicy(level, k_max=k), "threshold", OnlineLogisticPolicy.grid
    ),
    "online-signals": Learner(
        lambda level, _, k: OnlineSignalsPolicy(level, k_max=k), "threshold", OnlineSignalsPolicy.grid
    ),
    "dsde": Learner(lambda first, _, k: DsdePolicy(first, k_max=k), "k_first", DsdePolicy.grid),
    # 8.4 % slower than the best arm after 1,000 rounds at the authors' constant, 0.5 % at 0.01 (simulated).
    "bandit": Learner(
        lambda constant, *_: BanditPolicy(6, exploration=constant), "exploration", BanditPolicy.grid, argument="6"
    ),
    "goodput": Learner(
        lambda decay, costs, k: GoodputPolicy(costs, decay=decay, k_max=k), "decay", (1.0, 0.99, 0.95), argument="COSTS"
    ),
    "adaspec": Learner(lambda k_max, costs, _: AdaSpecPolicy(costs, k_max=k_max), "k_max", (8,), argument="COSTS"),
    "budget": Learner(lambda k_max, costs, _: BudgetPolicy(costs, k_max=k_max), "k_max", (4, 8), argument="COSTS"),
}
EVERY = (*RULES, *LEARNERS)


def ask(
    traces: CoupledTraces, name: str, value: float, costs: ForwardCosts, k_max: int, pair: PairCosts | None = None
) -> Replayed:
    """A learner's replay with one value, one response at a time unless its rows are independent. pair: what a policy
    predicts seconds by; `costs`, when left out."""
    learner = LEARNERS[name]
    policy = learner.build(value, pair or PairCosts.constant(costs), k_max)
    own = policy.max_draft_tokens
    params = {learner.param: value} | ({"k_max": own} if "k_max" in _options(name) else {})
    shown = f"{name}:{value:g}" if not learner.argument else name
    return replay(traces, policy, shown, params, batch=None if learner.by_row else 1, costs=costs)


def checked_rules(names: Sequence[str] | None) -> tuple[str, ...]:
    """Raises InputError for a name that cannot be tuned."""
    if names is None:
        return EVERY
    for name in names:
        if name not in EVERY:
            raise InputError(f"rules has {name!r}, expected some of {', '.join(EVERY)}")
    return tuple(names)


def spec_of(row: Mapping[str, Any], costs_file: str | None = None) -> str:
    """A row's policy as `--policy` takes it: its name, the file of costs if it takes one, and the parameters that are
    not the usual ones."""
    name, params = row["name"].partition(":")[0], row["params"]
    shown = row["name"]
    if name in LEARNERS and (argument := LEARNERS[name].argument):
        shown = f"{name}:{costs_file or argument if argument == 'COSTS' else argument}"
    if name not in POLICIES:
        return str(shown)
    usual = _options(name)
    options = [f",{key}={params[key]}" for key in usual if key in params and params[key] != usual[key]]
    return "".join([shown, *options])


def _options(name: str) -> dict[str, Any]:
    """A policy's options with their defaults. A head's lag is 1 where it is not said."""
    parameters = inspect.signature(POLICIES[name].policy).parameters.values()
    defaults = {
        parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    }
    return defaults | ({"lag": 1} if name == "head" else {})
