"""The side-by-side benchmark's use of its pilot run, without vLLM: costs, vLLM's table, and SPECs that parse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import vllm_side_by_side as bench

from accept_head.cost import PairCosts
from accept_head.inference import make_policy
from accept_head.inference.bench.figures import Cell
from accept_head.inference.bench.measure import Chunk, Timed
from accept_head.inference.costs.batch_table import best_table, tokens_per_round
from accept_head.inference.costs.files import pair_costs
from accept_head.inference.decode.rows import DecodeStats, Finished, Request
from accept_head.inference.policies.batch_stop import BatchStopPolicy

SIZES = [1, 4, 16]


def exact():
    """Costs fitted to rounds that are just as the model says."""
    size, k = (each.ravel() for each in np.meshgrid(SIZES, [k for k in bench.PILOT_LENGTHS if k], indexing="ij"))
    seconds = 8e-3 + 4e-4 * size * (k + 1) + (5e-4 + 1e-5 * size) * k
    return bench._fit(np.stack([np.ones(len(k)), size * (k + 1), k, k * size, seconds], axis=1))


def rounds(gamma_t=8e-3, beta_t=4e-4, gamma_d=5e-4, beta_d=1e-5, none=7e-3):
    """(sizes, lengths) seconds of a round, by the model that is to be found again."""
    size, k = np.array(SIZES)[:, None], np.array(bench.PILOT_LENGTHS)
    seconds = gamma_t + beta_t * size * (k + 1) + (gamma_d + beta_d * size) * k
    return np.where(k == 0, none, seconds)


def observed(deep_row=True):
    """Runs of ten rounds by the same model, but for a startup of the verification that grows with the batch: what a
    line through fixed lengths takes for the price of tokens."""
    found = []
    for size in SIZES:
        startup = 8e-3 + 3e-4 * (size - 1)
        lengths = [(k, size * (k + 1)) for k in bench.PILOT_LENGTHS if k]
        lengths += [(8, size * 2 + 7)] * deep_row
        for steps, tokens in lengths:
            seconds = startup + 1e-4 * tokens + (5e-4 + 1e-4 * size) * steps
            found.append([10, 10 * tokens, 10 * steps, 10 * steps * size, 10 * seconds])
    return np.array(found)


def test_a_deep_row_tells_draft_steps_from_tokens_to_verify():
    """Fixed lengths alone cannot: then the token is charged with what the step costs."""

    def step_of_sixteen(costs):
        draft = costs["batch"]["draft"]
        return draft["gamma"] + 16 * draft["beta"]

    true = 5e-4 + 1e-4 * 16
    assert step_of_sixteen(bench._fit(observed())) == pytest.approx(true, rel=0.2)
    assert step_of_sixteen(bench._fit(observed(deep_row=False))) < 0.5 * true


def test_costs_of_a_batch_size_are_those_of_its_own_runs():
    """Where no line is right for all sizes: a step of four rows is dearer than one of a line from 1 to 16."""
    runs = observed()
    four = runs[:, 3] == 4 * runs[:, 2]
    runs[four, 4] += 1e-3 * runs[four, 2]
    true = 5e-4 + 1e-4 * 4 + 1e-3

    def step_of_four(costs):
        draft = costs["batch"]["draft"]
        return draft["gamma"] + 4 * draft["beta"]

    assert step_of_four(bench._fit(runs, np.where(four, bench.NEAR, 1.0))) == pytest.approx(true, rel=0.1)
    assert step_of_four(bench._fit(runs)) != pytest.approx(true, rel=0.2)


def test_the_fit_finds_the_costs_of_rounds_with_drafts():
    costs = exact()
    draft, target = costs["batch"]["draft"], costs["batch"]["target"]
    assert (draft["gamma"], draft["beta"]) == pytest.approx((5e-4, 1e-5), rel=1e-6)
    assert (target["gamma"], target["beta"]) == pytest.approx((8e-3, 4e-4), rel=1e-6)
    assert (costs["t_draft"], costs["t_target"]) == pytest.approx((5.1e-4, 8.4e-3), rel=1e-6)


@pytest.mark.parametrize("slope", [2e-5, -2e-5])
def test_the_heads_seconds_are_part_of_the_draft_step(tmp_path, slope):
    """A line that falls with the batch, which only noise can make, does not make a row free."""
    costs = exact()
    seconds = [4e-4 + slope * size for size in SIZES]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(bench._with_head(costs, SIZES, seconds)))
    read = pair_costs(path)
    assert isinstance(read, PairCosts)
    expected = 5e-4 + 4e-4 + (1e-5 + max(0.0, slope)) * 8
    assert float(read.draft_seconds(8, 0)) == pytest.approx(expected, rel=1e-6)
    assert float(read.verify_seconds(8, 0)) == pytest.approx(8e-3 + 8 * 4e-4, rel=1e-6)


def test_every_arm_is_a_policy_that_there_is_or_vllms_own(tmp_path, embedded_pair, embedded_pair_folder):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(exact()))
    head = str(embedded_pair_folder / "heads" / "sampled")
    table = [list(row) for row in best_table(rounds(), SIZES, bench.PILOT_LENGTHS, tokens_per_round(np.full(8, 0.5)))]
    arms = bench.make_arms(head, tuple(bench.THRESHOLDS[False].values()), str(path), str(path), table, 16)
    policies = {name: make_policy(arm.policy, embedded_pair) for name, arm in arms.items() if arm.policy}
    assert {name for name, policy in policies.items() if isinstance(policy, BatchStopPolicy)} == {
        "head, costs",
        "fixed:8, costs",
    }
    assert all(policy.max_draft_tokens <= bench.K_MAX for policy in policies.values())
    tables = {name: arm.table for name, arm in arms.items() if arm.table is not None}
    assert len(arms) == len(policies) + len(tables) + 1 and arms["none"].policy is arms["none"].table is None
    assert all(len(lookup) == 17 and max(lookup) <= bench.K_MAX for lookup in tables.values())


# --- a head against a fixed K ----------------------------------------------------------------------------------------


def cell_of(drafted, *, chunks=6, seconds=1.0):
    """Chunks of two requests; `drafted`: of each request, by arm. All accept 20 tokens in 20 rounds and generate 40; a
    run of the head takes so many seconds, one of a fixed K 1."""
    requests = [Request(number, [1], 40, number) for number in range(2 * chunks)]
    parts = [Chunk("code", requests[2 * number : 2 * number + 2]) for number in range(chunks)]
    runs = []
    for number, chunk in enumerate(parts):
        for name, each in drafted.items():
            finished = [
                Finished(
                    request,
                    [0] * 40,
                    DecodeStats(
                        generated=40, drafted=each[request.index], submitted=each[request.index], accepted=20,
                        rounds=20, draft_forwards=each[request.index], seconds=1.0,
                    ),
                )
                for request in chunk.requests
            ]  # fmt: skip
            wall = seconds if name.startswith("head") else 1.0
            runs.append(Timed(0, number, name, wall, wall, 40, finished))
    return Cell(runs, parts, list(drafted), ["fixed:2", "fixed:3"], "fixed:2")


def test_a_matched_head_is_compared_with_its_own_fixed_k_by_ratios_of_sums():
    drafted = {"fixed:2": [30] * 12, "fixed:3": [50] * 12, "head:0.4": [24] * 12, "head:0.65": [30, 50] * 6}
    found = bench.matched(cell_of(drafted, seconds=0.8), {2: 0.4, 3: 0.65, 4: 0.75, 5: 0.85})
    assert [(row["fixed"], row["head"]) for row in found] == [("fixed:2", "head:0.4"), ("fixed:3", "head:0.65")]
    for row, saved in zip(found, (24 / 30 - 1, 40 / 50 - 1), strict=True):
        value, low, high = row["drafted_per_accepted"]
        assert value == pytest.approx(saved) and low == pytest.approx(high) == pytest.approx(saved)  # all chunks alike
        assert row["target_calls_per_token"] == pytest.approx([0, 0, 0])
        assert row["throughput"] == pytest.approx([0.25] * 3)


def test_the_interval_of_a_matched_head_is_that_of_drawing_chunks_anew():
    random, chunks = np.random.default_rng(0), 40
    drafted = {
        "fixed:2": random.integers(25, 60, 2 * chunks).tolist(),
        "head:0.4": random.integers(20, 50, 2 * chunks).tolist(),
    }
    cell = cell_of({**drafted, "fixed:3": drafted["fixed:2"]}, chunks=chunks)
    ((value, low, high),) = [row["drafted_per_accepted"] for row in bench.matched(cell, {2: 0.4})]
    sums = {name: np.array(each).reshape(chunks, 2).sum(1) for name, each in drafted.items()}
    draws = random.integers(chunks, size=(20_000, chunks))
    ratios = sums["head:0.4"][draws].sum(1) / sums["fixed:2"][draws].sum(1) - 1
    assert value == pytest.approx(sums["head:0.4"].sum() / sums["fixed:2"].sum() - 1)
    assert [low, high] == pytest.approx(np.quantile(ratios, [0.025, 0.975]).tolist(), abs=0.01)
    assert high - low > 0.05
