"""Forward costs from a file of `accept-head profile`, or from the command line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from accept_head.cost import BatchForwardCost, ForwardCosts, PairCosts
from accept_head.errors import InputError
from accept_head.files import read_json


def read_costs(
    file: str | None, t_draft: float | None, t_target: float | None, target_times: float = 1.0
) -> ForwardCosts:
    """Costs from a file of `accept-head profile` (or of `tune`, which repeats them), or from given seconds.

    target_times: factor for the target's seconds. Raises InputError naming what is missing.
    """
    if not 0 < target_times < math.inf:
        raise InputError(f"target_times is {target_times}, expected a positive number")
    if file is not None and (t_draft is not None or t_target is not None):
        raise InputError("give either --costs, or --t_draft and --t_target")
    if file is not None:
        costs = forward_costs(Path(file))
    elif t_draft is not None and t_target is not None:
        costs = ForwardCosts(t_draft=t_draft, t_target=t_target)
    else:
        raise InputError("the forward costs are missing: give --costs costs.json (accept-head profile writes it), or "
                         "--t_draft and --t_target in seconds")  # fmt: skip
    return replace(
        costs, t_target=costs.t_target * target_times, t_autoregressive=costs.t_autoregressive * target_times
    )


def forward_costs(path: Path) -> ForwardCosts:
    """The costs of one row's forwards. Raises InputError naming the file and the field."""
    values = _values(path)
    for name in ("t_draft", "t_target"):
        if name not in values:
            raise InputError(f"{path}: field {name!r} is missing")
    named = {name: values[name] for name in ("t_draft", "t_target", "t_autoregressive") if name in values}
    for name, value in named.items():
        _check_seconds(path, name, value)
    try:
        return ForwardCosts(**named)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def pair_costs(path: Path) -> PairCosts:
    """The costs for any number of rows, from the field `batch`. Without this field, all numbers of rows cost the same.

    Raises InputError naming the file and the field.
    """
    batch = _values(path).get("batch")
    if batch is None:
        return PairCosts.constant(forward_costs(path))
    fitted = {}
    for model in ("draft", "target"):
        values = batch.get(model) if isinstance(batch, dict) else None
        if not isinstance(values, dict):
            raise InputError(f"{path}: field 'batch.{model}' is {values!r}, expected alpha, beta and gamma")
        for name in ("alpha", "beta", "gamma"):
            _check_seconds(path, f"batch.{model}.{name}", values.get(name))
        r_squared = values.get("r_squared", 1.0)
        _check_seconds(path, f"batch.{model}.r_squared", r_squared)
        terms = {name: float(values[name]) for name in ("alpha", "beta", "gamma")}
        fitted[model] = BatchForwardCost(**terms, r_squared=float(r_squared))
    return PairCosts(**fitted)


def _values(path: Path) -> dict[str, Any]:
    values = read_json(path)
    return values["costs"] if isinstance(values.get("costs"), dict) else values


def _check_seconds(path: Path, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{path}: field {name!r} is {value!r}, expected a number")
