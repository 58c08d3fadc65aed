"""Policies by name: a SPEC is `name`, `name:ARGUMENT` or `name:ARGUMENT,option=value,…`.

Every policy that drafts and has no costs of its own takes the option `costs`, which wraps it in a BatchStopPolicy.
Importing all modules of this folder finds the policies.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from transformers import PreTrainedModel

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference import policies
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.spec import (
    POLICIES,
    DraftShape,
    Malformed,
    Options,
    Spec,
    costs,
    is_integer,
    is_number,
)
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import Pair

COSTS = "costs"

for _found in walk_packages(policies.__path__, policies.__name__ + "."):
    if _found.name != __name__:
        import_module(_found.name)
_by_name = sorted(POLICIES.items())
POLICIES.clear()
POLICIES.update(_by_name)


def make_policy(spec: str, draft: Pair | PreTrainedModel | DraftShape) -> DraftPolicy:
    """Build a policy for a draft (or its pair) from its SPEC. Raises InputError naming the wrong part."""
    text, *pairs = spec.split(",")
    name, _, argument = text.partition(":")
    if name not in POLICIES:
        raise InputError(f"policy {spec!r}: unknown, expected one of {', '.join(e.form for e in POLICIES.values())}")
    entry = POLICIES[name]
    options = _parse_options(spec, pairs, entry)
    given, shape = options.pop(COSTS, None), DraftShape.of(draft)
    try:
        policy = entry.make(argument, shape, options)
    except Malformed:
        raise InputError(f"policy {spec!r}: expected {entry.form}") from None
    return policy if given is None else BatchStopPolicy(policy, given)


def for_any_load(spec: str) -> str:
    """The SPEC with costs=auto: a threshold is chosen for one request at a time. Unchanged if its policy has costs or
    takes none, and for lengths that vLLM drafts by itself."""
    name = spec.partition(",")[0].partition(":")[0]
    if name in ("fixed", "batch-map") or not POLICIES[name].takes_costs or f",{COSTS}=" in spec:
        return spec
    return f"{spec},{COSTS}=auto"


def _parse_options(spec: str, pairs: list[str], entry: Spec) -> Options:
    known = entry.option_types
    options: Options = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == COSTS:
            options[key] = _costs_option(spec, value, entry)
            continue
        if key not in known:
            expected = sorted([*known, COSTS] if entry.takes_costs else known)
            raise InputError(f"policy {spec!r}: unknown option {key!r}, expected one of {expected or 'none'}")
        options[key] = parse_option(spec, key, value, known[key])
    return options


def _costs_option(spec: str, value: str, entry: Spec) -> PairCosts | LearntCosts:
    if not entry.takes_costs:
        why = "which drafts nothing" if entry.name == "none" else f"whose argument they are: {entry.form}"
        raise InputError(f"policy {spec!r}: option costs is not for a policy {why}")
    return costs(value)


def parse_option(spec: str, key: str, value: str, kind: type) -> Any:
    """Parse an option's value in a SPEC. Raises InputError when it is not of this kind."""
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is int and is_integer(value):
        return int(value)
    if kind is float and is_number(value):
        return float(value)
    if kind is str:
        return value
    expected = {bool: "true or false", int: "an integer", float: "a number"}[kind]
    raise InputError(f"policy {spec!r}: option {key} is {value!r}, expected {expected}")
