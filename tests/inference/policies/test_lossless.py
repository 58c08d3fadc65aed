"""Every policy keeps the target's distribution under its class's verifiers, and biased rules are detected."""

from __future__ import annotations

import numpy as np
import pytest
from lossless import BIASED, LOSSY, POLICIES

from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.registry import POLICIES as SPECS
from accept_head.inference.policy import BOTH
from accept_head.inference.replay.lossless import (
    PROVED,
    Shape,
    Tables,
    emit,
    enumerate_rounds,
    ratio_test,
    sampler_match,
)

PAIRS, SHAPE = 40, Shape(vocab=3, depth=2, rows=2)  # the benchmark has 400, of two shapes
FIXED_LENGTH = ("fixed", "batch-map")  # for one and the same number of rows


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_lossless_under_both_verifiers(name):
    found = enumerate_rounds(POLICIES[name], pairs=PAIRS, shape=SHAPE)
    assert Drafting(POLICIES[name]()).lossless == BOTH
    assert found.ratio.max() < PROVED and found.match.max() < PROVED
    lengths = np.count_nonzero(found.submitted)
    assert lengths > 1 or name in (*FIXED_LENGTH, "head, lag 1"), "it must have stopped at several lengths"


LONGEST = "budget, retrospective, graph"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == LONGEST else name for name in LOSSY]
)
def test_a_biased_rule_says_so_and_is_found(name):
    shape = Shape(vocab=3, depth=3, rows=3)  # the retrospective rule needs some room
    found = enumerate_rounds(LOSSY[name], pairs=100 if "retro" in name else 30, shape=shape)
    assert LOSSY[name]().lossless == {"match"}
    assert found.ratio.mean() > BIASED / 2 and found.ratio.max() > 0.05
    assert found.match.max() < PROVED


def test_no_policy_is_left_out():
    names = {name.split(",")[0].split(" ")[0] for name in POLICIES}
    assert names == set(SPECS) - {"none"}


def test_the_policies_that_trim_did():
    for name in ("adaspec", "budget"):
        found = enumerate_rounds(POLICIES[name], pairs=30, shape=Shape(vocab=3, depth=3, rows=3))
        assert found.drafted.tolist() != found.submitted.tolist(), name


@pytest.mark.parametrize("test", [ratio_test, sampler_match])
@pytest.mark.parametrize("kept", ["all", "none", "likely"])
def test_one_slot_is_emitted_by_the_formula(test, kept):
    """P(y) = κ(y)·(accepted y) + Σ_x κ(x)·q(x)·(x rejected, y in its place) + Σ_x (1 − κ(x))·q(x)·p(y), for a rule that
    keeps token x with κ(x) (docs/theory.md §9); for the ratio test, accepted y is min(p, q)(y)."""
    random = np.random.default_rng(5)
    for _ in range(20):
        tables = Tables(Shape(vocab=4, depth=1, rows=1), random)
        p, q = tables.p[0, 0], tables.q[0, 0]
        kappa = {"all": np.ones(4), "none": np.zeros(4), "likely": (q > 0.3).astype(float)}[kept]
        out = np.zeros((4, 4))
        for token in range(4):
            emit(out, tables, (token,), int(kappa[token]), float(q[token]), test)
        accepted = np.minimum(p, q) if test is ratio_test else p * q
        rejected = q - accepted
        left = np.maximum(p - q, 0)
        instead = [
            left / left.sum() if test is ratio_test else np.where(np.arange(4) == x, 0, p) / (1 - p[x])
            for x in range(4)
        ]
        expected = kappa * accepted + sum(
            kappa[x] * rejected[x] * instead[x] + (1 - kappa[x]) * q[x] * p for x in range(4)
        )
        assert out.sum(-1) == pytest.approx(expected, abs=1e-12)
        assert out == pytest.approx(out.sum(-1, keepdims=True) * tables.p[0, 1:5], abs=1e-12)  # the target goes on


def test_a_wrong_residual_is_found():
    """The same tables, p in place of the residual."""

    def wrong(p, q, y):
        return ratio_test(p, q, y)[0], p

    tables = Tables(Shape(vocab=3, depth=1, rows=1), np.random.default_rng(0))
    out, target = np.zeros((3, 3)), tables.p[0, 0][:, None] * tables.p[0, 1:4]
    for token in range(3):
        emit(out, tables, (token,), 1, float(tables.q[0, 0, token]), wrong)
    assert np.abs(out - target).sum() / 2 > 1e-3
