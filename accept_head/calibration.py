"""Calibration by depth: corrects a head's P̂ of the first, second, … token of a round.

A round's survival is a product, Π P̂_i. Small errors of the same sign at each depth add up, so each depth has its own
map. `temperature` is DSpark's sequential temperature scaling (arXiv:2607.05147), `isotonic` any monotone map, `affine`
a slope and an intercept, as in online recalibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import read_json, write_json

CALIBRATION_NAME = "calibration.json"
Method = Literal["temperature", "isotonic", "affine"]

MOST_LOG_ODDS = 16.0
FEWEST = 200  # rounds that a depth needs for its own map; deeper depths use the last map
HOTTEST, COLDEST = 8.0, 0.25  # temperatures


@dataclass(frozen=True, kw_only=True)
class DepthCalibration:
    """One map for each depth 1, 2, …; deeper depths use the last map. Stored as `calibration.json` beside the head.

    temperature, affine: logit P̂' = slope·logit P̂ + intercept. For temperature, slope is 1 / temperature and intercepts
    are 0. isotonic: P̂' by linear interpolation between the points (predicted, observed), constant beyond them.
    fitted_on: the traces that the maps were fitted on.
    """

    method: Method
    slopes: tuple[float, ...] = ()
    intercepts: tuple[float, ...] = ()
    predicted: tuple[tuple[float, ...], ...] = ()
    observed: tuple[tuple[float, ...], ...] = ()
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise InputError(f"calibration: method is {self.method!r}, expected one of {get_args(Method)}")
        one_number = {"slopes": self.slopes, "intercepts": self.intercepts}
        many = {"predicted": self.predicted, "observed": self.observed}
        used, unused = (many, one_number) if self.method == "isotonic" else (one_number, many)
        if name := next((name for name, values in unused.items() if len(values)), None):
            raise InputError(f"calibration: {name} is given, expected none with method {self.method!r}")
        if len({len(values) for values in used.values()} - {0}) != 1 or not all(map(len, used.values())):
            raise InputError(f"calibration: expected {' and '.join(used)} of equally many depths, at least one")
        for name, values in one_number.items():
            if not all(_is_finite(value) for value in values):
                raise InputError(f"calibration: {name} is {values}, expected one finite number a depth")
        if not all(slope > 0 for slope in self.slopes):
            raise InputError(f"calibration: slopes is {self.slopes}, expected positive numbers")
        for depth, (xs, ys) in enumerate(zip(self.predicted, self.observed, strict=True), start=1):
            for name, points in (("predicted", xs), ("observed", ys)):
                # Predicted points rise strictly: two points at one place would give two values there.
                if not _rises(points, strictly=name == "predicted"):
                    raise InputError(f"calibration: {name} of depth {depth} is not a rising list of probabilities")
            if len(xs) != len(ys):
                raise InputError(f"calibration: predicted and observed of depth {depth} differ in length")

    def __call__(self, depth: int, probability: Tensor) -> Tensor:
        """P̂ → P̂' for tokens at this depth of their rounds, 1 for the first. Any shape, float32."""
        place = min(depth, self.depths) - 1
        if self.method == "isotonic":
            return _interpolated(probability.float(), self.predicted[place], self.observed[place])
        z = torch.logit(probability.float()).clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
        return torch.sigmoid(self.slopes[place] * z + self.intercepts[place])

    @property
    def depths(self) -> int:
        return len(self.predicted if self.method == "isotonic" else self.slopes)

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
        if "method" not in values:
            raise InputError(f"{path}: field 'method' is missing")
        for name in ("slopes", "intercepts", "predicted", "observed"):
            value = values.get(name, [])
            nested = name in ("predicted", "observed")
            if not isinstance(value, list) or (nested and not all(isinstance(part, list) for part in value)):
                raise InputError(f"{path}: field {name!r} is {value!r}, expected a list{' of lists' * nested}")
            values[name] = tuple(map(tuple, value)) if nested else tuple(value)
        if not isinstance(values.get("fitted_on", {}), dict):
            raise InputError(f"{path}: field 'fitted_on' is {values['fitted_on']!r}, expected an object")
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


def fit_isotonic(rounds: Rounds, fitted_on: dict[str, Any] | None = None) -> DepthCalibration:
    """For each depth the monotone map with the least squared error, over tokens whose predecessors were accepted.

    Calibrated conditional probabilities give a calibrated product. Raises InputError when there are too few rounds.
    """
    from sklearn.isotonic import IsotonicRegression

    predicted, observed = [], []
    for depth in range(_depths(rounds.at_risk)):
        mine = rounds.at_risk[:, depth]
        edge = 1 / (mine.sum() + 2)  # a finite sample gives no probability of 0 or 1
        model = IsotonicRegression(y_min=edge, y_max=1 - edge)
        model.fit(rounds.predicted[mine, depth].astype(np.float64), rounds.acceptance[mine, depth])
        places, where = np.unique(model.X_thresholds_.astype(np.float32), return_index=True)
        predicted.append(tuple(map(float, places)))
        observed.append(tuple(map(float, model.y_thresholds_[where])))
    return DepthCalibration(
        method="isotonic", predicted=tuple(predicted), observed=tuple(observed), fitted_on=fitted_on or {}
    )


def fit_affine(rounds: Rounds, fitted_on: dict[str, Any] | None = None, *, prior: float = 4.0) -> DepthCalibration:
    """One slope, and one intercept per depth, by IRLS with a ridge of `prior` towards slope 1 and intercepts 0.

    Online recalibration on these rounds would approach this. Raises InputError when there are too few rounds.
    """
    depths = _depths(rounds.at_risk)
    where, depth = np.nonzero(rounds.at_risk[:, :depths])
    z, label = _logit(rounds.predicted)[where, depth], rounds.acceptance[where, depth]
    x = np.concatenate([z[:, None], np.eye(depths)[depth]], axis=1)
    change = np.zeros(1 + depths)
    for _ in range(50):
        p = _sigmoid(z + x @ change)
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + prior * np.eye(1 + depths)
        step = np.linalg.solve(hessian, x.T @ (label - p) - prior * change)
        change = change + np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 1e-9:
            break
    slope, *intercepts = map(float, change)
    return DepthCalibration(
        method="affine",
        slopes=(max(1 + slope, 1e-3),) * depths,
        intercepts=tuple(intercepts),
        fitted_on=fitted_on or {},
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


def _interpolated(p: Tensor, xs: Sequence[float], ys: Sequence[float]) -> Tensor:
    x, y = (_on(p.device, tuple(points)) for points in (xs, ys))
    if len(x) == 1:
        return y.expand(p.shape)
    right = torch.searchsorted(x, p.contiguous()).clamp(1, len(x) - 1)
    share = ((p - x[right - 1]) / (x[right] - x[right - 1])).clamp(0, 1)
    return y[right - 1] + share * (y[right] - y[right - 1])


@lru_cache(maxsize=1024)
def _on(device: torch.device, points: tuple[float, ...]) -> Tensor:
    """The points as a tensor on the device. Cached, because each copy to a GPU would make the host wait."""
    with torch.inference_mode(False):
        return torch.tensor(points, dtype=torch.float32, device=device)


def _rises(points: Sequence[Any], *, strictly: bool) -> bool:
    if not len(points) or not all(_is_finite(point) and 0 <= point <= 1 for point in points):
        return False
    steps = [after - before for before, after in pairwise(points)]
    return all(step > 0 if strictly else step >= 0 for step in steps)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
