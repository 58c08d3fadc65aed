"""The search for thresholds against brute force: every setting walked round by round and priced by eq. 3.1."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from accept_head import InputError
from accept_head.cost import ForwardCosts
from accept_head.files import write_json
from accept_head.inference import make_policy
from accept_head.inference.costs.files import read_costs
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.svip import SvipPolicy
from accept_head.inference.replay.cost_aware import cost_aware
from accept_head.inference.replay.informed import replay_informed
from accept_head.inference.replay.truth import InformedTables
from accept_head.inference.tune.files import decoding
from accept_head.inference.tune.grid import Grid
from accept_head.inference.tune.heads import load_heads
from accept_head.inference.tune.search import search_all
from tests.inference.support.made_up import make_sample, walk
from tests.inference.support.rules_by_hand import BEFORE, SIGNALS, decider, theorem_4_1
from tests.inference.support.toy import llama, random_head

COSTS = ForwardCosts(t_draft=0.03, t_target=0.1, t_autoregressive=0.09)
GRID = Grid(thresholds=(0.2, 0.5, 0.8), k_min=(1, 3), k_max=(2, 4, 6))
HEADS = {"heads/drawn": SIGNALS, "heads/before": BEFORE}
# family → the rules of test_replay that it tries
FAMILIES = {
    "heads/drawn": ["head with signals lag 0", "head with signals lag 1"],
    "heads/before": ["head before"],
    **{name: [name] for name in ("confidence", "cumulative-confidence", "entropy", "max-prob", "svip")},
}
OWN = {"cumulative-confidence": CumulativeConfidencePolicy.grid, "entropy": EntropyPolicy.grid, "svip": SvipPolicy.grid}
LEARNERS = ["adaedl"]


@pytest.fixture(scope="module")
def sample():
    """Three quarters of the responses are easy."""
    return make_sample(2, responses=40, domains=("easy", "easy", "easy", "hard"), accept=(0.95, 0.95, 0.95, 0.1))


@pytest.fixture(scope="module")
def traces(sample, tmp_path_factory):
    return sample.couple(tmp_path_factory.mktemp("tune"))


def speed(counts, costs=COSTS):
    """Tokens/s: eq. 3.1, or the target alone."""
    generated, _, verified, drafts = counts.sum(0)
    return generated / (
        costs.t_draft * drafts + costs.t_target * verified if drafts else costs.t_autoregressive * generated
    )


@pytest.fixture(scope="module")
def brute_force(sample):
    """family → [(params, counts)] of every setting."""

    def lag_of(rule):
        return {"lag": int(rule[-1])} if "lag" in rule else {}

    return {
        family: [
            (
                {"threshold": h, "k_min": low, "k_max": high, **lag_of(rule)},
                walk(sample, decider(rule, h, low, high), 6).counts,
            )
            for rule in rules
            for h in OWN.get(family, (0.2, 0.5, 0.8))
            for low in (1, 3)
            for high in (2, 4, 6)
            if low <= high
        ]
        for family, rules in FAMILIES.items()
    }


def by_domain(sample, counts):
    names = np.array([record["domain"] for record in sample.records])
    return [counts[names == name] for name in sorted(set(names))]


OBJECTIVES = {
    "mean": lambda sample, counts, costs: speed(counts, costs),
    "worst-domain": lambda sample, counts, costs: min(speed(part, costs) for part in by_domain(sample, counts)),
}


@pytest.mark.parametrize("times", [1, 5, 30])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_choice_is_the_best_of_all_settings(sample, traces, brute_force, objective, times):
    costs = replace(COSTS, t_target=0.1 * times, t_autoregressive=0.09 * times)
    tuned = search_all(traces, HEADS, costs, GRID, objective)
    assert list(tuned.chosen) == [*FAMILIES, *LEARNERS]
    for family, settings in brute_force.items():
        assert len(tuned.families[family]) == len(settings)
        values = [OBJECTIVES[objective](sample, counts, costs) for _, counts in settings]
        chosen = tuned.chosen[family]
        assert OBJECTIVES[objective](sample, chosen.counts, costs) == pytest.approx(max(values))
        assert np.array_equal(chosen.counts, counts_of(settings, chosen.params))
        assert min(values) < max(values), "all settings are equal"


def test_the_two_objectives_choose_differently(sample, traces):
    """Easy text wants long drafts, hard text short ones; where most text is easy, the mean wants long ones too."""
    chosen = {name: search_all(traces, HEADS, COSTS, GRID, name).chosen for name in OBJECTIVES}
    for family in ("confidence", "entropy"):
        mean, worst = (chosen[name][family] for name in ("mean", "worst-domain"))
        assert length(mean) > length(worst)
        for name, value in OBJECTIVES.items():
            better, other = (mean, worst) if name == "mean" else (worst, mean)
            assert value(sample, better.counts, COSTS) > value(sample, other.counts, COSTS)


def length(replayed):
    """Tokens a round."""
    return replayed.draft_lengths @ np.arange(len(replayed.draft_lengths)) / replayed.draft_lengths.sum()


def test_a_slower_target_wants_longer_drafts(traces):
    lengths = {family: [] for family in FAMILIES}
    fixed = []
    for times in (0.5, 1, 5, 30):
        tuned = search_all(traces, HEADS, replace(COSTS, t_target=0.1 * times), GRID)
        fixed.append(tuned.best_fixed.params["k"])
        for family in FAMILIES:
            lengths[family].append(length(tuned.chosen[family]))
    for values in (fixed, *lengths.values()):
        assert values == sorted(values) and values[0] < values[-1]


def test_rows_are_what_the_slow_walk_and_eq_3_1_say(sample, traces, brute_force):
    tuned = search_all(traces, HEADS, COSTS, GRID)
    rows = tuned.rows()
    names = [row["name"] for row in rows]
    assert names[:7] == ["none", *(f"fixed:{k}" for k in range(1, 7))] and names[-1] == "oracle"
    expected = [f"head:{name}" if "/" in name else name for name in [*FAMILIES, *LEARNERS]]
    assert [name.rpartition(":")[0] for name in names[7:-1]] == expected
    fixed = [walk(sample, lambda tokens, k=k: (min(k, len(tokens)), 0), 6).counts for k in range(7)]
    best = max(speed(counts) for counts in fixed[1:])
    oracle = np.array([theorem_4_1(record) for record in sample.records], dtype=float)
    rows = [row for row in rows if row["name"].partition(":")[0] not in LEARNERS]
    chosen = [
        counts_of(settings, row["params"]) for settings, row in zip(brute_force.values(), rows[7:-1], strict=True)
    ]
    for row, counts in zip(rows, [*fixed, *chosen, oracle], strict=True):
        generated, discarded, verified, _ = counts.sum(0)
        expected = {
            "discard_rate": discarded / generated,
            "verification_rate": verified / generated,
            "throughput": speed(counts),
            "speedup": speed(counts) * 0.09,
            "gain_over_best_fixed": speed(counts) / best - 1,
            "oracle_gap_closed": (speed(counts) - best) / (speed(oracle) - best),
            "block_efficiency": generated / verified,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)
        for name, (low, high) in row["ci95"].items():
            assert low - 1e-9 <= high, name
            # The best fixed length is the best of each resample, so that its own gain cannot be above 0.
            assert name in ("gain_over_best_fixed", "oracle_gap_closed") or low <= row[name] <= high
    assert rows[0]["speedup"] == pytest.approx(1)


def counts_of(settings, params):
    return next(counts for candidate, counts in settings if candidate == params)


def test_intervals_are_seeded(traces):
    tuned = search_all(traces, {}, COSTS, GRID)
    assert tuned.rows(3) == tuned.rows(3) != tuned.rows(4)


def test_every_row_but_the_oracle_names_a_policy_as_the_decode_loop_takes_it(traces, tmp_path):
    draft = llama(1)
    folder = tmp_path / "a.b" / "head"
    head = random_head(16, signals=True)
    head.save_pretrained(folder)
    small = make_sample(1, responses=6)
    made = search_all(small.couple(tmp_path), {str(folder): SIGNALS}, COSTS, Grid(k_min=(2,), k_max=(4,), lags=(0,)))
    rows = made.rows()
    assert "spec" not in rows[-1]
    for row in rows[:-1]:
        policy = make_policy(row["spec"], draft)
        params = row["params"]
        if "threshold" not in params:
            assert policy.max_draft_tokens == params.get("k", 0)
            continue
        bounds = (params["threshold"], params.get("k_min", 1), params["k_max"])
        assert (policy.threshold, policy.k_min, policy.max_draft_tokens) == bounds
        assert row["name"].partition(":")[0] in (*FAMILIES, *LEARNERS, "head")
        assert getattr(policy, "lag", 0) == params.get("lag", 0)


def test_thresholds_with_many_digits_survive_the_spec(tmp_path):
    rows = search_all(make_sample(1, responses=6).couple(tmp_path), {}, COSTS,
                  Grid(thresholds=(0.123456789,), k_max=(4,))).rows()  # fmt: skip
    row = next(row for row in rows if row["name"].startswith("confidence:"))
    assert make_policy(row["spec"], llama(1)).threshold == pytest.approx(row["params"]["threshold"], abs=1e-6)


def test_decoding_json_says_how_to_decode_for_which_costs_and_what_to_expect(sample, traces):
    tuned = search_all(traces, HEADS, COSTS, GRID)
    rows = tuned.rows()
    for name in HEADS:
        values = decoding(tuned, name, rows)
        chosen = tuned.chosen[name]
        assert {key: values[key] for key in chosen.params} == chosen.params
        assert ("lag" in values) == (name == "heads/drawn")
        assert values["expected"]["throughput"] == pytest.approx(speed(chosen.counts))
        assert values["costs"] == {"t_draft": 0.03, "t_target": 0.1, "t_autoregressive": 0.09}
        assert values["objective"] == "mean"
        assert values["traces"] == {
            "fingerprint": sample.config.fingerprint(),
            "prompts": 40,
            "tokens": sum(len(record["response_ids"]) for record in sample.records),
            "sampling": {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0},
            "max_new_tokens": 12,
        }
        fixed = [speed(walk(sample, lambda tokens, k=k: (min(k, len(tokens)), 0), 6).counts) for k in range(1, 7)]
        assert values["best_fixed"] == 1 + int(np.argmax(fixed))


# --- the informed bound, and the search without a grid ---------------------------------------------------------------


def test_the_informed_bound_stands_before_the_oracle_and_adds_a_share(sample, traces):
    truth = InformedTables(acceptance=traces.max_prob, overlap=traces.entropy)
    plain, tuned = (search_all(traces, HEADS, COSTS, GRID, truth=one) for one in (None, truth))
    assert plain.informed is None and list(tuned.chosen) == list(plain.chosen)
    before, rows = plain.rows(), tuned.rows()
    bound = rows.pop(-2)
    assert bound["name"] == "informed" and bound["params"] == {"least": 1} and "spec" not in bound
    assert bound["throughput"] == pytest.approx(speed(replay_informed(traces, truth, COSTS).counts))
    best = max(row["throughput"] for row in rows if row["name"].startswith("fixed:"))
    for row, old in zip(rows, before, strict=True):
        gap = max(0.0, bound["throughput"] - best)
        expected = (row["throughput"] - best) / gap if gap else 0.0
        assert row.pop("informed_gap_closed") == pytest.approx(expected)
        low, high = row["ci95"].pop("informed_gap_closed")
        assert low <= high and row == old
    assert "informed_gap_closed" in decoding(tuned, "heads/drawn", tuned.rows())["expected"]


def test_the_search_by_cost_gives_heads_one_setting_a_lag_and_rules_their_grid(traces):
    by_cost = replace(GRID, search="cost")
    tuned, grid = (search_all(traces, HEADS, COSTS, each) for each in (by_cost, GRID))
    for name in HEADS:
        found = tuned.families[name]
        lags = (0, 1) if name == "heads/drawn" else (None,)
        assert [replayed.params.get("lag") for replayed in found] == list(lags)
        for lag, replayed in zip(lags, found, strict=True):
            policy = HeadPolicy(HEADS[name], 0.5, lag=lag)
            assert replayed.params["threshold"] == cost_aware(traces, policy, COSTS, k_max=6)[0]
            assert (replayed.params["k_min"], replayed.params["k_max"]) == (1, 6)
            assert replayed.name.startswith(f"head:{name}:")
        assert speed(tuned.chosen[name].counts) == max(speed(replayed.counts) for replayed in found)
        values = decoding(tuned, name, tuned.rows())
        assert values["threshold"] == tuned.chosen[name].params["threshold"]
    for name in ("confidence", "entropy"):
        assert len(tuned.families[name]) == len(grid.families[name])
        assert np.array_equal(tuned.chosen[name].counts, grid.chosen[name].counts)


@pytest.mark.parametrize("changes", [{"max_new_tokens": 1}, {"accept": 1.0, "max_new_tokens": 6, "ends": 0.0}])
def test_rows_are_json_even_where_nothing_is_to_be_gained(tmp_path, changes):
    """A single token, or a draft that is always right: the best fixed length is as fast as the oracle."""
    traces = make_sample(1, **changes).couple(tmp_path)
    tuned = search_all(traces, {}, COSTS, GRID)
    write_json(tmp_path / "tuned.json", {"policies": tuned.rows()})


# --- costs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def costs_file(tmp_path):
    def write(text):
        path = tmp_path / "costs.json"
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return str(path)

    return write


def test_costs_come_from_a_file_or_are_typed_in(costs_file):
    profile = {"t_draft": 0.02, "t_target": 0.1, "t_autoregressive": 0.08, "device": "cpu", "fits": [1, 2]}
    expected = ForwardCosts(t_draft=0.02, t_target=0.1, t_autoregressive=0.08)
    assert read_costs(costs_file(profile), None, None) == expected
    assert read_costs(costs_file({"costs": profile}), None, None) == expected
    assert read_costs(None, 0.02, 0.1) == ForwardCosts(t_draft=0.02, t_target=0.1, t_autoregressive=0.1)
    assert read_costs(costs_file({"t_draft": 1, "t_target": 3}), None, None).t_autoregressive == 3


@pytest.mark.parametrize("times", [0.5, 5])
def test_a_target_so_many_times_as_slow_is_slower_at_everything(costs_file, times):
    profile = {"t_draft": 0.02, "t_target": 0.1, "t_autoregressive": 0.08}
    slower = read_costs(costs_file(profile), None, None, times)
    assert (slower.t_draft, slower.t_target, slower.t_autoregressive) == pytest.approx(
        (0.02, 0.1 * times, 0.08 * times)
    )


WRONG_COSTS = {
    "{}": ["costs.json", "'t_draft'"],
    '{"t_draft": 1}': ["costs.json", "'t_target'"],
    '{"t_draft": "1", "t_target": 2}': ["costs.json", "'t_draft'", "'1'"],
    '{"t_draft": true, "t_target": 2}': ["costs.json", "'t_draft'", "True"],
    '{"t_draft": null, "t_target": 2}': ["costs.json", "'t_draft'", "None"],
    '{"t_draft": 1, "t_target": -2}': ["costs.json", "t_target", "-2"],
    '{"t_draft": 0, "t_target": 2}': ["costs.json", "t_draft", "0"],
    '{"t_draft": NaN, "t_target": 2}': ["costs.json", "NaN"],
    '{"t_draft": 1, "t_target": 1e999}': ["costs.json", "1e999"],
    '{"t_draft": 1, "t_target": 2, "t_autoregressive": [1]}': ["costs.json", "'t_autoregressive'"],
    '{"costs": {"t_draft": 1}}': ["costs.json", "'t_target'"],
    '{"costs": 3}': ["costs.json", "'t_draft'"],
    "[1, 2]": ["costs.json", "list"],
    "": ["costs.json", "JSON"],
}


@pytest.mark.parametrize("text", WRONG_COSTS)
def test_wrong_costs_are_refused_by_file_and_field(costs_file, text):
    with pytest.raises(InputError) as caught:
        read_costs(costs_file(text), None, None)
    assert all(words in str(caught.value) for words in WRONG_COSTS[text]) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((None, None, None), ["--costs", "--t_draft", "--t_target"]),
        ((None, 0.1, None), ["--t_target"]),
        ((None, None, 0.1), ["--t_draft"]),
        (("FILE", 0.1, 0.2), ["--costs", "--t_draft"]),
        (("FILE", 0.1, None), ["--costs", "--t_draft"]),
        ((None, -0.1, 0.2), ["t_draft", "-0.1"]),
        ((None, 0.1, math.nan), ["t_target", "nan"]),
        ((None, 0.1, 0.2, 0.0), ["target_times", "0.0"]),
        ((None, 0.1, 0.2, -1.0), ["target_times"]),
        ((None, 0.1, 0.2, math.inf), ["target_times", "inf"]),
        ((None, 0.1, 0.2, math.nan), ["target_times", "nan"]),
        (("nowhere/costs.json", None, None), ["nowhere"]),
    ],
)
def test_missing_or_doubled_costs_are_refused_by_option(costs_file, given, named):
    good = costs_file({"t_draft": 1, "t_target": 2})
    with pytest.raises(InputError) as caught:
        read_costs(*(good if value == "FILE" else value for value in given))
    assert all(words in str(caught.value) for words in named)


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """saved(name, hidden) → folder."""

    def save(name, hidden=16):
        random_head(hidden).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def test_heads_are_loaded_in_the_order_they_are_named(saved):
    names = [saved("b"), saved("a")]
    assert list(load_heads(names, llama(1))) == names
    assert load_heads([], llama(1)) == {}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda saved: [saved("a", hidden=24)], ["24", "16"]),
        (lambda saved: [saved("a"), saved("a")], ["--head", "twice"]),
        (lambda saved: ["no/such/head"], ["no/such/head"]),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(saved, make, named):
    names = make(saved)
    with pytest.raises(InputError) as caught:
        load_heads(names, llama(1))
    assert all(words in str(caught.value) for words in named)


def test_a_grid_has_all_bounds_that_make_sense():
    assert Grid(k_min=(1, 5), k_max=(2, 8)).bounds == [(1, 2), (1, 8), (5, 8)]
    settings = Grid(k_min=(1,), k_max=(2, 8)).settings([0.1, 0.2])
    assert [(s.threshold, s.k_min, s.k_max) for s in settings] == [(0.1, 1, 2), (0.2, 1, 2), (0.1, 1, 8), (0.2, 1, 8)]


def test_best_fixed_is_never_none(traces):
    """However bad the draft is: `none` stands in a row of its own."""
    tuned = search_all(traces, {}, ForwardCosts(t_draft=9.0, t_target=1.0), GRID)
    assert tuned.best_fixed.params == {"k": 1}
    rows = {row["name"]: row for row in tuned.rows()}
    assert rows["none"]["throughput"] > rows["fixed:1"]["throughput"]
    assert SimpleNamespace(**rows["none"]).gain_over_best_fixed > 0
