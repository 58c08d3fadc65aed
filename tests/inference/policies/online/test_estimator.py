"""The online estimator against a dense Newton solve written from its formulas, and against the true parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from accept_head.inference.policies.online.estimator import AcceptanceEstimator
from accept_head.inference.policy import DraftStep
from tests.inference.support.rounds import outcome
from tests.inference.support.scalar_rules import ScalarEstimator, sigmoid

CPU = torch.device("cpu")


def play(estimator, qs, submitted, accepted, live=None, drafted=None):
    """One round of all rows. qs: (rows, depths) → (rows, depths) predictions."""
    estimator.start_round()
    active = torch.ones(len(qs), dtype=torch.bool)
    steps = [DraftStep(depth=d + 1, token_ids=None, active=active, max_prob=qs[:, d]) for d in range(qs.shape[1])]
    predictions = torch.stack([estimator.predict(step) for step in steps], dim=1)
    drafted = submitted if drafted is None else drafted
    estimator.observe(outcome(drafted, accepted, live, submitted=submitted))
    return predictions


def fitted(estimator):
    return [float(estimator.slope), *estimator.intercepts.tolist()]


def test_every_step_is_that_of_a_dense_newton_solve():
    random = np.random.default_rng(0)
    rows, depths = 5, 4
    estimator, reference = AcceptanceEstimator(depths), ScalarEstimator(depths)
    estimator.start(CPU)
    assert fitted(estimator) == pytest.approx(reference.theta)
    seen = [fitted(estimator)]
    for number in range(1, 301):
        qs = random.beta(2, 1, size=(rows, depths))
        qs[random.random((rows, depths)) < 0.02] = 1.0
        deepest = random.integers(1, depths + 1)  # no row drafts more in this round
        drafted = random.integers(0, deepest + 1, size=rows)
        submitted = random.integers(0, drafted + 1)
        accepted = np.minimum(submitted, np.cumprod(random.random(qs.shape) < qs, axis=1).sum(1))
        live = random.random(rows) < 0.9
        shown = torch.from_numpy(qs[:, :deepest].copy()).float()
        shown[~torch.from_numpy(live)] = float("nan")  # idle rows hold garbage
        predicted = play(estimator, shown, submitted, accepted, live.tolist(), drafted=drafted)
        for row in np.where(live)[0]:
            expected = [reference.probability(d + 1, float(np.float32(qs[row, d]))) for d in range(deepest)]
            assert predicted[row].tolist() == pytest.approx(expected, abs=1e-5)
        reference.round([(np.float32(qs[r]), submitted[r], accepted[r]) for r in np.where(live)[0]])
        assert fitted(estimator) == pytest.approx(reference.theta, rel=1e-5, abs=1e-6)
        if number % 100 == 0:
            seen.append(fitted(estimator))
        assert fitted(estimator) == seen[-1], "nothing may change between two steps"
    moves = np.abs(np.diff(seen, axis=0))
    assert (moves[1:] > 1e-3).all(), "the reference is worth nothing if nothing moves"


def learn(rows=192, rounds=160):
    """Labels from known parameters: each token is accepted with its probability if the one before it was."""
    random = np.random.default_rng(1)
    slope, intercepts = 0.9, np.array([0.6, 0.1, -0.3, -0.7])
    estimator = AcceptanceEstimator(4)
    estimator.INTERVAL = 20
    estimator.start(CPU)
    for _ in range(rounds):
        f = random.normal(1.0, 1.5, size=(rows, 4))
        passed = random.random((rows, 4)) < 1 / (1 + np.exp(-slope * f - intercepts))
        submitted = random.integers(0, 5, size=rows)  # trimming that looks at nothing
        accepted = np.minimum(np.cumprod(passed, axis=1).sum(1), submitted)
        play(estimator, torch.sigmoid(torch.from_numpy(f)).float(), submitted, accepted)
    return np.abs(np.array(fitted(estimator)) - [slope, *intercepts])


def test_it_finds_the_parameters_that_made_the_labels():
    assert (learn() < 0.12).all()


def test_the_slope_never_gets_negative():
    """Labels that fall with confidence would turn it round: such a step is not taken."""
    estimator = AcceptanceEstimator(1)
    estimator.INTERVAL = 1
    estimator.start(CPU)
    qs = torch.tensor([[0.95], [0.9], [0.1], [0.05]]).repeat(50, 1)
    accepted = torch.tensor([0, 0, 1, 1]).repeat(50)
    for _ in range(5):
        play(estimator, qs, torch.ones(200, dtype=torch.long), accepted)
    assert float(estimator.slope) == 0.5
    play(estimator, qs, torch.ones(200, dtype=torch.long), 1 - accepted)
    assert float(estimator.slope) > 0.5


def test_certain_and_impossible_tokens_have_finite_log_odds():
    estimator = AcceptanceEstimator(1)
    estimator.INTERVAL = 1
    estimator.start(CPU)
    qs = torch.tensor([[1.0], [1.0000001], [0.0], [0.5]])
    first = play(estimator, qs, torch.ones(4, dtype=torch.long), torch.tensor([1, 0, 1, 0]))
    assert first[:, 0].tolist() == pytest.approx(
        [sigmoid(19.8), sigmoid(19.8), sigmoid(-20.2), sigmoid(-0.2)], abs=1e-6
    )
    assert all(math.isfinite(value) for value in fitted(estimator))


def test_what_was_learnt_outlives_start_and_a_round_without_drafts_teaches_nothing():
    estimator = AcceptanceEstimator(2)
    estimator.INTERVAL = 1
    estimator.start(CPU)
    play(estimator, torch.full((8, 2), 0.7), torch.full((8,), 2), torch.full((8,), 2))
    learnt = fitted(estimator)
    assert learnt != [0.5, -0.2, -0.2]
    estimator.start(CPU)
    estimator.start_round()
    estimator.observe(outcome([0] * 8, [0] * 8))
    assert fitted(estimator) == learnt
