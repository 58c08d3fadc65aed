"""Learning policies in `tune`: all their values are tried at the given costs, under the names that the loop takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from accept_head import InputError
from accept_head.cost import ForwardCosts
from accept_head.files import write_json
from accept_head.inference import make_policy
from accept_head.inference.costs.files import pair_costs
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.tune.grid import Grid
from accept_head.inference.tune.rules import EVERY, LEARNERS, RULES, ask, checked_rules, spec_of
from accept_head.inference.tune.search import search_all
from tests.inference.support.made_up import make_sample
from tests.inference.support.toy import llama

COSTS = ForwardCosts(t_draft=0.03, t_target=0.1, t_autoregressive=0.09)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return make_sample(4, responses=12, accept=(0.9, 0.5)).couple(tmp_path_factory.mktemp("rules"))


def test_every_policy_but_the_batch_rules_can_be_tuned():
    from accept_head.inference.policies.registry import POLICIES

    assert set(POLICIES) - set(EVERY) == {"none", "fixed", "head", "batch-map", "max-prob-mean"}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_spec_builds_the_policy_that_was_asked(traces, tmp_path, name):
    """The same counts when the policy is built anew from the row's SPEC."""
    costs_file = str(write_costs(tmp_path))
    longest = traces.k_max
    for value in LEARNERS[name].values:
        if name in ("adaspec", "budget") and value > longest:
            continue
        asked = ask(traces, name, value, COSTS, longest)
        spec = spec_of({"name": asked.name, "params": asked.params}, costs_file)
        policy = make_policy(spec, llama(1))
        batch = None if LEARNERS[name].by_row else 1
        again = replay(traces, policy, name, batch=batch, costs=COSTS)
        assert np.array_equal(asked.counts, again.counts), spec
        assert policy.max_draft_tokens <= longest


def write_costs(folder):
    write_json(folder / "costs.json", {"t_draft": 0.03, "t_target": 0.1, "t_autoregressive": 0.09})
    return folder / "costs.json"


@pytest.mark.parametrize("name", [name for name, learner in LEARNERS.items() if learner.by_row])
def test_rows_that_are_asked_together_do_not_look_at_each_other(traces, name):
    value = LEARNERS[name].values[1]
    together = ask(traces, name, value, COSTS, traces.k_max)
    policy = make_policy(spec_of({"name": together.name, "params": together.params}), llama(1))
    alone = replay(traces, policy, name, batch=1, costs=COSTS)
    assert np.array_equal(together.counts, alone.counts)


def test_the_search_takes_the_best_value_of_each(traces):
    names = ("leviathan", "hf-heuristic", "goodput", "entropy")
    tuned = search_all(traces, {}, COSTS, Grid(k_min=(1,), k_max=(traces.k_max,), rules=names))
    assert tuple(tuned.chosen) == names
    for name in names:
        speeds = [float(throughputs(one.counts.sum(0), COSTS)) for one in tuned.families[name]]
        assert float(throughputs(tuned.chosen[name].counts.sum(0), COSTS)) == max(speeds)
    tried = [one.params["cost_ratio"] for one in tuned.families["leviathan"]]
    assert 0.3 in tried and len(tried) == len(LEARNERS["leviathan"].values), "c of these costs is one of the values"
    rows = tuned.rows(costs_file="c.json")
    specs = [row["spec"] for row in rows if row["name"].startswith("goodput")]
    assert len(specs) == 1 and specs[0].startswith("goodput:c.json,")


def test_unknown_rules_are_refused_by_name():
    assert checked_rules(None) == EVERY and checked_rules(["svip"]) == ("svip",)
    assert set(EVERY) - set(checked_rules(None, divergence=False)) == {"dsde"}
    assert checked_rules(["dsde"], divergence=False) == ("dsde",)  # which is refused where the traces are read
    with pytest.raises(InputError, match="rules has 'fixed', expected some of confidence, "):
        checked_rules([*RULES, "fixed"])


@pytest.mark.parametrize("name", ["goodput", "adaspec", "budget"])
def test_policies_predict_by_the_file_that_their_spec_names(traces, tmp_path, name):
    """Its fit by batch size, too: what is tuned is what decodes."""
    forward = {"alpha": 0.0, "beta": 0.03, "gamma": 0.02}
    path = tmp_path / "costs.json"
    write_json(path, {"t_draft": 0.03, "t_target": 0.1, "batch": {"draft": forward, "target": forward}})
    grid = Grid(k_min=(1,), k_max=(traces.k_max,), rules=(name,))
    values = LEARNERS[name].values if name == "goodput" else (4,)  # the traces' rounds are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEARNERS, name, replace(LEARNERS[name], values=values))
        tuned, other = (search_all(traces, {}, COSTS, grid, pair=pair) for pair in (pair_costs(path), None))
    (row,) = (row for row in tuned.rows(costs_file=str(path)) if row["name"] == name)
    again = replay(traces, make_policy(row["spec"], llama(1)), name, batch=1, costs=COSTS)
    assert np.array_equal(tuned.chosen[name].counts, again.counts)
    assert not np.array_equal(tuned.chosen[name].counts, other.chosen[name].counts)
    assert all("COSTS" in row["spec"] for row in tuned.rows() if row["name"] == name), "no file, no path"
