"""The table that the demo prints, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from accept_head import InputError
from accept_head.cost import DecodeCounts, ForwardCosts
from accept_head.inference.comparison import Measured, compare

COSTS = ForwardCosts(t_draft=0.02, t_target=0.1)


def counts(generated, discarded, rounds):
    forwards = generated + discarded - rounds
    return DecodeCounts(generated=generated, discarded=discarded, target_forwards=rounds, draft_forwards=forwards)


def policy(name, *rows, **params):
    return Measured(name=name, params=params, counts=[counts(*row) for row in rows])


def rows():
    return [
        policy("none", (100, 0, 100), (100, 0, 100)),
        policy("fixed:2", (100, 40, 50), (100, 40, 50), k=2),
        policy("fixed:4", (100, 120, 40), (100, 120, 40), k=4),
        policy("oracle", (100, 0, 30), (100, 0, 30)),
        policy("head:0.5", (100, 30, 45), (100, 30, 45), threshold=0.5),
    ]


def test_rates_throughput_gain_and_gap_are_those_of_eq_5_1():
    table = {row["name"]: row for row in compare(rows(), COSTS)}
    # seconds a token = .02·(1 + discard) + .08·verification
    seconds = {
        "none": 0.02 + 0.08,
        "fixed:2": 0.02 * 1.4 + 0.08 * 0.5,  # 0.068
        "fixed:4": 0.02 * 2.2 + 0.08 * 0.4,  # 0.076
        "oracle": 0.02 + 0.08 * 0.3,  # 0.044
        "head:0.5": 0.02 * 1.3 + 0.08 * 0.45,  # 0.062
    }
    for name, value in seconds.items():
        assert table[name]["throughput"] == pytest.approx(1 / value)
        assert table[name]["speedup"] == pytest.approx(0.1 / value)
        assert table[name]["gain_over_best_fixed"] == pytest.approx(0.068 / value - 1)
        gap = (1 / value - 1 / 0.068) / (1 / 0.044 - 1 / 0.068)
        assert table[name]["oracle_gap_closed"] == pytest.approx(gap)
        # All prompts are alike, so the bootstrap has nothing to vary.
        assert table[name]["ci95"]["oracle_gap_closed"] == pytest.approx([gap, gap])


def test_the_interval_widens_when_prompts_differ_and_is_seeded():
    mixed = [
        policy("fixed:2", *[(100, 10 * i, 50) for i in range(8)]),
        policy("oracle", *[(100, 0, 30)] * 8),
        policy("head:0.5", *[(100, 70 - 10 * i, 45) for i in range(8)]),
    ]
    first, again = compare(mixed, COSTS), compare(mixed, COSTS)
    assert first == again
    low, high = first[2]["ci95"]["gain_over_best_fixed"]
    assert low < first[2]["gain_over_best_fixed"] < high and high - low > 0.01


def test_a_comparison_without_baseline_or_oracle_is_refused():
    for missing in ("fixed", "oracle"):
        with pytest.raises(InputError):
            compare([row for row in rows() if not row.name.startswith(missing)], COSTS)
