"""The table that the demo prints, against numbers calculated by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from accept_head import InputError
from accept_head.cost import ForwardCosts
from accept_head.inference.replay.comparison import Measured, compare, throughputs

COSTS = ForwardCosts(t_draft=0.02, t_target=0.1)


def policy(name, *rows, **params):
    """rows: generated and discarded tokens and target forwards of each prompt; each drafted token is one forward."""
    counts = [(generated, discarded, rounds, generated + discarded - rounds) for generated, discarded, rounds in rows]
    return Measured(name=name, params=params, counts=np.array(counts))


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


def test_the_informed_bound_makes_another_share_and_changes_nothing_else():
    plain = compare(rows(), COSTS)
    with_bound = compare([*rows(), policy("informed", (100, 10, 40), (100, 10, 40))], COSTS)
    speeds = {"fixed:2": 1 / 0.068, "informed": 1 / (0.02 * 1.1 + 0.08 * 0.4), "head:0.5": 1 / 0.062}
    for before, row in zip(plain, with_bound, strict=False):
        assert "informed_gap_closed" not in {**before, **before["ci95"]}
        share = row.pop("informed_gap_closed"), row["ci95"].pop("informed_gap_closed")
        assert row == before
        if row["name"] in speeds:
            gap = (speeds[row["name"]] - speeds["fixed:2"]) / (speeds["informed"] - speeds["fixed:2"])
            assert (share[0], *share[1]) == pytest.approx((gap, gap, gap))
    assert with_bound[-1]["informed_gap_closed"] == pytest.approx(1)
    assert with_bound[-1]["oracle_gap_closed"] == pytest.approx(
        (speeds["informed"] - 1 / 0.068) / (1 / 0.044 - 1 / 0.068)
    )


def test_an_informed_bound_below_the_best_fixed_length_has_no_gap_to_close():
    table = compare([*rows(), policy("informed", (100, 90, 60), (100, 90, 60))], COSTS)
    assert all(row["informed_gap_closed"] == 0 for row in table)


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


def test_throughput_counts_the_draft_forwards_that_drew_nothing():
    """Eq. 3.1, not its short form 5.1: a head read at lag 0 feeds the draft more tokens than it drafts."""
    plain = policy("head:0.5", (100, 30, 45))
    idle = Measured(name="head:0.5,lag=0", params={}, counts=np.array([[100, 30, 45, 85 + 20]]))
    table = compare([policy("fixed:2", (100, 40, 50)), policy("oracle", (100, 0, 30)), plain, idle], COSTS)
    assert table[2]["throughput"] == pytest.approx(100 / (0.02 * 85 + 0.1 * 45))
    assert table[3]["throughput"] == pytest.approx(100 / (0.02 * 105 + 0.1 * 45))
    assert table[2]["discard_rate"] == table[3]["discard_rate"]


def test_the_target_alone_runs_at_its_own_pace():
    """Where nothing is drafted a token takes t_autoregressive, not a verification."""
    costs = ForwardCosts(t_draft=0.02, t_target=0.1, t_autoregressive=0.08)
    table = {row["name"]: row for row in compare(rows(), costs)}
    none = Measured(name="none", params={}, counts=np.array([[100, 0, 100, 0]]))
    (alone, *_) = compare([none, policy("fixed:2", (100, 40, 50)), policy("oracle", (100, 0, 30))], costs)
    assert (alone["throughput"], alone["speedup"]) == pytest.approx((12.5, 1.0))
    assert table["fixed:2"]["speedup"] == pytest.approx(0.08 / 0.068)


def test_throughputs_of_a_table_are_those_of_its_rows():
    random = np.random.default_rng(0)
    table = random.integers(1, 50, (3, 5, 4)).astype(float)
    table[1, 2, 3] = 0
    values = throughputs(table, COSTS)
    assert values.shape == (3, 5)
    for place in np.ndindex(3, 5):
        generated, _, verified, drafts = table[place]
        seconds = 0.02 * drafts + 0.1 * verified if drafts else 0.1 * generated
        assert values[place] == pytest.approx(generated / seconds)


def many(seed=0, prompts=40):
    """Policies whose counts vary from prompt to prompt, alike for all of them."""
    random = np.random.default_rng(seed)
    hard = random.integers(0, 30, prompts)
    return [
        policy("fixed:2", *[(100, 30 + int(h), 45 + int(h)) for h in hard]),
        policy("fixed:4", *[(100, 80 + 3 * int(h), 25 + 2 * int(h)) for h in hard]),
        policy("oracle", *[(100, 0, 20 + int(h)) for h in hard]),
        policy("head:0.5", *[(100, 20 + int(h), 28 + int(h)) for h in hard]),
    ]


def test_intervals_are_those_of_a_bootstrap_over_prompts():
    """Resampled one at a time, with numbers of its own, and the best fixed length chosen in each resample."""
    measured, random = many(), np.random.default_rng(99)
    (row,) = [row for row in compare(measured, COSTS) if row["name"] == "head:0.5"]
    tables = [one.counts[:, :3] for one in measured]

    def figures(chosen):
        speeds = []
        for table in tables:
            generated, discarded, verified = table[chosen].sum(0)
            speeds.append(1 / (0.02 * (1 + discarded / generated) + 0.08 * verified / generated))
        best = max(speeds[:2])
        return speeds[3], speeds[3] / best - 1, (speeds[3] - best) / (speeds[2] - best)

    draws = np.array([figures(random.integers(0, 40, 40)) for _ in range(3000)])
    for name, column in (("throughput", 0), ("gain_over_best_fixed", 1), ("oracle_gap_closed", 2)):
        low, high = np.quantile(draws[:, column], [0.025, 0.975])
        assert row["ci95"][name] == pytest.approx([low, high], abs=0.12 * (high - low))


def test_prompts_are_resampled_for_all_policies_together():
    """All are slower on hard prompts; their ratio varies far less than if each had resamples of its own."""
    measured = many()
    alone = compare(measured, COSTS)[3]["ci95"]
    shuffled = Measured(name="head:0.5", params={}, counts=measured[3].counts[::-1])
    apart = compare([*measured[:3], shuffled], COSTS)[3]["ci95"]
    widths = [high - low for low, high in (alone["gain_over_best_fixed"], apart["gain_over_best_fixed"])]
    assert widths[1] > 1.5 * widths[0]
    assert alone["throughput"] != apart["throughput"]


def test_seed_and_resamples_decide_the_intervals_and_nothing_else():
    measured = many()
    usual, other, few = (
        compare(measured, COSTS),
        compare(measured, COSTS, seed=1),
        compare(measured, COSTS, resamples=50),
    )
    for changed in (other, few):
        for one, two in zip(usual, changed, strict=True):
            assert one["ci95"] != two["ci95"]
            assert {**one, "ci95": None} == {**two, "ci95": None}


def test_one_prompt_leaves_no_interval():
    rows = compare([policy("fixed:2", (100, 40, 50)), policy("oracle", (100, 0, 30))], COSTS)
    for row in rows:
        for name, (low, high) in row["ci95"].items():
            assert low == pytest.approx(row[name]) == pytest.approx(high)


def test_figures_are_finite_where_the_best_fixed_length_is_as_fast_as_the_oracle():
    """A draft that is never wrong, or responses of one token."""
    measured = [policy("fixed:2", (100, 0, 34)), policy("oracle", (100, 0, 34)), policy("head:0.5", (100, 0, 50))]
    with np.errstate(all="ignore"):
        rows = compare(measured, COSTS)
    assert all(value is None or math.isfinite(value) for row in rows for value in (row["oracle_gap_closed"],))
