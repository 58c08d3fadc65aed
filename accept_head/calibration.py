"""Calibration by depth: corrects a head's P̂ of the first, second, … token of a round.

A round's survival is a product, Π P̂_i. Small errors of the same sign at each depth add up, so each depth has its own
map, affine in log-odds. They are fitted here by DSpark's sequential temperature scaling (arXiv:2607.05147), or learnt
online and then frozen.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import is_number, read_json, write_json

CALIBRATION_NAME = "calibration.json"
Method = Literal["temperature", "affine"]

MOST_LOG_ODDS = 16.0
FEWEST = 200  # rounds that a depth needs for its own map; deeper depths use the last map
HOTTEST, COLDEST = 8.0, 0.25  # temperatures


@dataclass(frozen=True, kw_only=True)
class DepthCalibration:
    """One map for each depth 1, 2, …; deeper depths use the last map. Stored as `calibration.json` beside the head.

    logit P̂' = slope·logit P̂ + intercept. With method `temperature`, slope is 1 / temperature and intercepts are 0.
    fitted_on: the traces that the maps were fitted on.
    """

    method: Method
    slopes: tuple[float, ...]
    intercepts: tuple[float, ...]
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise InputError(f"calibration: method is {self.method!r}, expected one of {get_args(Method)}")
        for name in ("slopes", "intercepts"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not all(is_number(value) for value in values):
                raise InputError(f"calibration: {name} is {values!r}, expected a list of one finite number a depth")
            object.__setattr__(self, name, tuple(values))  # JSON gives lists
        if not self.slopes or len(self.slopes) != len(self.intercepts):
            raise InputError("calibration: expected slopes and intercepts of equally many depths, at least one")
        if not all(slope > 0 for slope in self.slopes):
            raise InputError(f"calibration: slopes is {self.slopes}, expected positive numbers")
        if not isinstance(self.fitted_on, dict):
            raise InputError(f"calibration: fitted_on is {self.fitted_on!r}, expected an object")

    def __call__(self, depth: int, probability: Tensor) -> Tensor:
        """P̂ → P̂' for tokens at this depth of their rounds, 1 for the first. Any shape, float32."""
        place = min(depth, len(self.slopes)) - 1
        z = torch.logit(probability.float()).clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
        return torch.sigmoid(self.slopes[place] * z + self.intercepts[place])

    def save(self, folder: Path) -> Path:
        """Write calibration.json beside a head, atomically."""
        path = folder / CALIBRATION_NAME
        write_json(path, {name: value for name, value in asdict(self).items() if len(value)})
        return path

    @classmethod
    def load(cls, folder: Path) -> DepthCalibration:
        """Read calibration.json. Raises InputError, naming file and field, when it is missing or invalid."""
        path = folder / CALIBRATION_NAME
        values = read_json(path)
        if unknown := sorted(set(values) - {each.name for each in fields(cls)}):
            raise InputError(f"{path}: unknown field {unknown[0]!r}")
        if missing := [name for name in ("method", "slopes", "intercepts") if name not in values]:
            raise InputError(f"{path}: field {missing[0]!r} is missing")
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Drafted rounds, (rounds, depths) each.

    predicted: P̂ of each token. acceptance: a(Y) = min(1, p/q) of tokens whose predecessors in the round were all
    accepted; 0 after a rejection. drafted: bool. at_risk: bool, drafted and all predecessors accepted.
    """

    predicted: np.ndarray
    acceptance: np.ndarray
    drafted: np.ndarray
    at_risk: np.ndarray

    @property
    def survived(self) -> np.ndarray:
        """The chance that a round's tokens up to each depth are accepted, given the outcomes of all but the last.

        Its mean over rounds is what the product of `predicted` should be on average.
        """
        return np.where(self.at_risk, self.acceptance, 0.0)


def fit_temperatures(rounds: Rounds, fitted_on: dict[str, Any] | None = None) -> DepthCalibration:
    """Sequential temperature scaling: fit T_1, T_2, … in order.

    T_k maximises the likelihood of the survival Π_{i≤k} σ(z_i / T_i), with the earlier temperatures fixed, over all
    rounds that drafted k tokens, whether or not they were still alive. DSpark minimises the expected calibration error
    on a grid instead. The likelihood has one optimum and no bins.

    Raises InputError when there are too few rounds.
    """
    from scipy.optimize import minimize_scalar

    z, survived = _logit(rounds.predicted), rounds.survived
    slopes: list[float] = []
    before = np.ones(len(z))
    for depth in range(_depths(rounds.drafted)):
        mine = rounds.drafted[:, depth]

        def loss(log_slope: float, depth: int = depth, mine: np.ndarray = mine, before: np.ndarray = before) -> float:
            survival = before[mine] * _sigmoid(np.exp(log_slope) * z[mine, depth])
            return float(_cross_entropy(survived[mine, depth], survival))

        found = minimize_scalar(loss, bounds=(-math.log(HOTTEST), -math.log(COLDEST)), method="bounded")
        slopes.append(float(np.exp(found.x)))
        before = before * _sigmoid(slopes[-1] * z[:, depth])
    return DepthCalibration(
        method="temperature", slopes=tuple(slopes), intercepts=(0.0,) * len(slopes), fitted_on=fitted_on or {}
    )


def _depths(counted: np.ndarray) -> int:
    """How many depths, from the first on, have enough rounds. counted: (rounds, depths) bool."""
    enough = counted.sum(0) >= FEWEST
    if not enough[0]:
        raise InputError(f"calibration needs {FEWEST} rounds, the traces have {int(counted[:, 0].sum())}")
    return int(np.cumprod(enough).sum())


def _cross_entropy(label: np.ndarray, p: np.ndarray) -> float:
    p = np.clip(p, 1e-9, 1 - 1e-9)
    return float(-(label * np.log(p) + (1 - label) * np.log1p(-p)).mean())


def _logit(p: np.ndarray) -> np.ndarray:
    p = np.clip(p.astype(np.float64), 1e-12, 1 - 1e-12)
    return np.clip(np.log(p) - np.log1p(-p), -MOST_LOG_ODDS, MOST_LOG_ODDS)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
