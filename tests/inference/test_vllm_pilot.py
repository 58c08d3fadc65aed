"""What the side-by-side benchmark makes of its pilot run, without vLLM: costs, vLLM's table, and SPECs that parse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from accept_head.cost import PairCosts
from accept_head.inference import make_policy
from accept_head.inference.batch_table import best_table, tokens_per_round
from accept_head.inference.cost_file import pair_costs
from accept_head.inference.policies.batch_stop import VLLM, BatchStopPolicy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vllm_side_by_side as bench

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
    policies = {name: make_policy(arm.policy, embedded_pair, host=VLLM) for name, arm in arms.items() if arm.policy}
    assert {name for name, policy in policies.items() if isinstance(policy, BatchStopPolicy)} == {
        "head, costs",
        "fixed:8, costs",
    }
    assert all(policy.max_draft_tokens <= bench.K_MAX for policy in policies.values())
    tables = {name: arm.table for name, arm in arms.items() if arm.table is not None}
    assert len(arms) == len(policies) + len(tables) + 1 and arms["none"].policy is arms["none"].table is None
    assert all(len(lookup) == 17 and max(lookup) <= bench.K_MAX for lookup in tables.values())
