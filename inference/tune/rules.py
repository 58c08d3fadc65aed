"""The policies that need no training, for `tune`: their main parameter and the values to try.

batch-map and max-prob-mean are left out. For one row at a time they equal `fixed` and max-prob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accept_head.cost import ForwardCosts, PairCosts
from accept_head.errors import InputError
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.registry import POLICIES
from accept_head.inference.policies.spec import Spec
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftPolicy, Signal
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.walk import Replayed

# Each is evaluated in one pass for all its thresholds.
RULES: dict[str, type[Any]] = {
    name: spec.policy
    for name, spec in POLICIES.items()
    if issubclass(spec.policy, ThresholdPolicy) and not issubclass(spec.policy, HeadPolicy)
}
# Policies with memory, which are replayed round by round.
LEARNERS = {name: spec.tuning for name, spec in POLICIES.items() if spec.tuning is not None}
EVERY = (*RULES, *LEARNERS)


def ask(
    traces: CoupledTraces, name: str, value: float, costs: ForwardCosts, k_max: int, pair: PairCosts | None = None
) -> Replayed:
    """The replay of a learner with one value, one response at a time unless its rows are independent.

    pair: the costs that a policy predicts seconds with; `costs` when left out.
    """
    learner, spec = LEARNERS[name], POLICIES[name]
    policy = _learner(spec, value, pair or PairCosts.constant(costs), k_max)
    params = {learner.param: value} | ({"k_max": policy.max_draft_tokens} if "k_max" in spec.defaults else {})
    shown = f"{name}:{value:g}" if not learner.argument else name
    return replay(traces, policy, shown, params, batch=None if learner.by_row else 1, costs=costs)


def _learner(spec: Spec, value: float, costs: PairCosts, k_max: int) -> DraftPolicy:
    """The policy with one value of its parameter. costs: for a policy that predicts seconds."""
    tuning = spec.tuning
    assert tuning is not None
    options: dict[str, Any] = {"k_max": k_max} if "k_max" in spec.defaults else {}
    first: Any = value
    if tuning.param in spec.defaults:
        options[tuning.param] = value
        first = costs if tuning.argument == "COSTS" else spec.read(tuning.argument)
    policy: DraftPolicy = spec.policy(first, **options)
    return policy


def checked_rules(names: Sequence[str] | None, *, divergence: bool = True) -> tuple[str, ...]:
    """The names of the rules to tune, by default all; without `divergence`, which traces of a drafter lack, all that do
    not need it. Raises InputError for a name that cannot be tuned."""
    if names is None:
        needs = {name: getattr(POLICIES[name].policy, "needs", ()) for name in EVERY}
        return tuple(name for name in EVERY if divergence or Signal.DIVERGENCE not in needs[name])
    for name in names:
        if name not in EVERY:
            raise InputError(f"rules has {name!r}, expected some of {', '.join(EVERY)}")
    return tuple(names)


def spec_of(row: Mapping[str, Any], costs_file: str | None = None) -> str:
    """The SPEC of a row's policy, as `--policy` takes it.

    It has the name, the file of costs if the policy takes one, and the parameters that differ from their defaults.
    """
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
    """A policy's options with their defaults. The default lag of a head is 1."""
    return POLICIES[name].defaults | ({"lag": 1} if name == "head" else {})
