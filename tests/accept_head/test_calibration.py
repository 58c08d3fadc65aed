"""Calibration maps by depth: the fits find the true maps, products are calibrated, and files are checked."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from accept_head import InputError
from accept_head.calibration import CALIBRATION_NAME, DepthCalibration, Rounds, fit_temperatures


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def made(slopes, intercepts=(0.0, 0.0, 0.0), count=20_000, seed=0, soft=True):
    """Rounds of three tokens in which P(accepted) = σ(slope·z + intercept), and the head says σ(z)."""
    random = np.random.default_rng(seed)
    z = random.normal(0.5, 2, size=(count, 3))
    a = sigmoid(np.array(slopes) * z + intercepts)
    passed = random.random(a.shape) < a
    at_risk = np.cumprod(np.concatenate([np.ones((count, 1)), passed[:, :-1]], axis=1), axis=1).astype(bool)
    acceptance = np.where(at_risk, a if soft else passed, 0.0)
    return Rounds(predicted=sigmoid(z), acceptance=acceptance, drafted=np.ones_like(at_risk), at_risk=at_risk)


def survivals(rounds, calibration):
    p = torch.from_numpy(rounds.predicted)
    return torch.stack([calibration(d + 1, p[:, d]) for d in range(p.shape[1])], dim=1).cumprod(1).double().numpy()


def gap(rounds, survival):
    """Largest |mean predicted − mean observed| of each depth's survival over five equal groups by predicted."""
    worst = []
    for depth in range(survival.shape[1]):
        groups = np.array_split(np.argsort(survival[:, depth]), 5)
        worst.append(max(abs(survival[g, depth].mean() - rounds.survived[g, depth].mean()) for g in groups))
    return np.array(worst)


def test_temperatures_are_found_in_order():
    fitted = fit_temperatures(made((0.5, 1.0, 2.0)))
    assert fitted.slopes == pytest.approx((0.5, 1.0, 2.0), rel=0.05) and set(fitted.intercepts) == {0.0}


def test_each_temperature_makes_up_for_the_depths_before_it():
    """Where the first depth cannot be put right by a temperature, the second is fitted to the product, not to itself:
    an independent search over the cumulative likelihood finds the same."""
    rounds = made((1.0, 1.0, 1.0), intercepts=(-1.0, 0.0, 0.0))
    fitted = fit_temperatures(rounds)
    z = np.log(rounds.predicted) - np.log1p(-rounds.predicted)

    def loss(log_slope):
        s = sigmoid(fitted.slopes[0] * z[:, 0]) * sigmoid(np.exp(log_slope[0]) * z[:, 1])
        y = rounds.survived[:, 1]
        return -(y * np.log(s) + (1 - y) * np.log1p(-s)).mean()

    found = minimize(loss, [0.0], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10})
    assert fitted.slopes[1] == pytest.approx(np.exp(found.x[0]), rel=1e-3)
    assert abs(fitted.slopes[1] - 1.0) > 0.02, "fitted by itself it would be 1"


def test_survivals_are_calibrated_on_rounds_that_were_not_fitted():
    """Standard errors of a group's mean: at most 0.5 / √4000 = 0.008."""
    truth = {"slopes": (0.5, 0.5, 0.5)}
    fitted, unseen = fit_temperatures(made(**truth, soft=False)), made(**truth, seed=1, soft=False)
    assert (gap(unseen, np.cumprod(unseen.predicted, axis=1)) > 0.1).all(), "they must have been wrong"
    assert (gap(unseen, survivals(unseen, fitted)) < 0.035).all()


def test_a_depth_with_few_rounds_has_the_map_of_the_one_before():
    rounds = made((0.5, 0.5, 0.5))
    rounds.drafted[150:, 2] = rounds.at_risk[150:, 2] = False
    fitted = fit_temperatures(rounds)
    assert len(fitted.slopes) == 2
    p = torch.linspace(0, 1, 11)
    assert torch.equal(fitted(2, p), fitted(3, p)) and torch.equal(fitted(2, p), fitted(9, p))
    assert not torch.equal(fitted(1, p), fitted(2, p))


def test_too_few_rounds_are_refused():
    with pytest.raises(InputError, match="200 rounds, the traces have 50"):
        fit_temperatures(made((1, 1, 1), count=50))


def test_a_file_holds_it_as_plain_numbers(tmp_path):
    fitted = fit_temperatures(made((0.5, 1.0, 1.5), count=1000), {"traces": "abc"})
    assert fitted.save(tmp_path) == tmp_path / CALIBRATION_NAME
    assert DepthCalibration.load(tmp_path) == fitted and fitted.fitted_on == {"traces": "abc"}


def test_probabilities_at_the_ends_stay_probabilities():
    fitted = fit_temperatures(made((0.5, 1.0, 1.5), count=1000))
    for depth in (1, 2, 3):
        mapped = fitted(depth, torch.tensor([0.0, 1e-30, 1.0, 1 - 1e-7]))
        assert ((mapped > 0) & (mapped <= 1)).all()


GOOD = {"method": "affine", "slopes": [1.0], "intercepts": [0.0]}
BAD = [
    ({}, "method"),
    ({**GOOD, "slope": [1.0]}, "'slope'"),
    ({**GOOD, "slopes": [0.0]}, "positive"),
    ({**GOOD, "slopes": ["1"]}, "slopes"),
    ({**GOOD, "slopes": 1.0}, "slopes"),
    ({**GOOD, "intercepts": [0.0, 1.0]}, "equally many"),
    ({**GOOD, "slopes": [], "intercepts": []}, "at least one"),
    ({"method": "affine"}, "'slopes'"),
    ({**GOOD, "intercepts": [True]}, "intercepts"),
    ({**GOOD, "fitted_on": 3}, "fitted_on"),
    ({**GOOD, "method": "isotonic"}, "'isotonic'"),
]


@pytest.mark.parametrize(("values", "word"), BAD, ids=[word for _, word in BAD])
def test_a_file_that_is_not_one_is_refused_by_name(values, word, tmp_path):
    (tmp_path / CALIBRATION_NAME).write_text(json.dumps(values))
    with pytest.raises(InputError, match=CALIBRATION_NAME) as refused:
        DepthCalibration.load(tmp_path)
    assert word in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"calibration\.json: no such file"):
        DepthCalibration.load(tmp_path)
