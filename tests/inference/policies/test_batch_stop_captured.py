"""The batch's end in CUDA graphs: decisions and learning are the same with and without capture."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from accept_head import Sampling
from accept_head.inference import make_policy
from accept_head.inference.costs.learnt import TRIAL, LearntCosts
from accept_head.inference.decode import drafter
from accept_head.inference.decode import run as run_of_the_loop
from accept_head.inference.decode.captured import read_by_steps
from accept_head.inference.engine import cache
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy
from accept_head.inference.policy import Signal
from tests.inference.support.decoders import GREEDY, LLAMA, SAMPLED, new_decoder, run
from tests.inference.support.replayed import standing_in
from tests.inference.support.scalar_rules import pair_costs
from tests.inference.support.toy import random_head

SUMS = ("sums", "totals")


def test_which_policies_are_captured_within_it():
    costs = pair_costs(0.1)
    assert BatchStopPolicy(FixedPolicy(3), costs).capture and BatchStopPolicy(MaxProbPolicy(0.5), costs).capture
    assert BatchStopPolicy(HeadPolicy(random_head(32), 0.5, lag=1), costs).capture
    learns = make_policy("online-logistic", LLAMA[1])  # what it does with the outcome is not known
    assert BatchStopPolicy(learns, costs).capture is None


# --- in the decode loop, captured ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)


@pytest.fixture(autouse=True)
def padded(monkeypatch):
    """As captured rounds are; another host has another rule."""
    monkeypatch.setattr(cache, "packs", lambda model: False)


INNER = {
    "fixed": lambda: FixedPolicy(4),
    "max-prob": lambda: MaxProbPolicy(0.05, k_max=4),
    "head": lambda: HeadPolicy(random_head(32, signals=True), 0.95, k_max=4),
}
COSTS, DEAR = pair_costs(0.05, 0.01), pair_costs(0.85)


@pytest.mark.parametrize(
    ("name", "sampling", "costs"),
    [(name, sampling, COSTS) for name in INNER for sampling in (SAMPLED, GREEDY)] + [("max-prob", SAMPLED, DEAR)],
)
def test_captured_or_not_it_decodes_and_learns_alike(name, sampling: Sampling, costs):
    """Two runs each; what the first has learnt the second goes by. With dear drafts some rounds have none."""
    plain, captured = (BatchStopPolicy(INNER[name](), costs, probe=4) for _ in "ab")
    decoder = new_decoder(sampling=sampling)
    with standing_in() as backend:
        graphs = new_decoder("graphs", sampling=sampling)
        for _ in range(2):
            captures = backend.captures
            expected = run(decoder, plain, sampling=sampling)
            rounds, drafted = (sum(getattr(stats, name) for *_, stats in expected) for name in ("rounds", "drafted"))
            assert (drafted < rounds) == (costs is DEAR)
            assert run(graphs, captured, sampling=sampling) == expected
            for sums in SUMS:  # predictions are float32, of batches of other sizes
                assert np.allclose(getattr(plain.past, sums), getattr(captured.past, sums), rtol=1e-5)
            assert plain.past.idle == captured.past.idle
        assert captures and backend.captures - captures < captures  # the second run goes on with what was captured
        assert "begin" in {key[0] for each in graphs.captured.policies.values() for key in each.graphs.captured}
        assert not any(each.graphs.refused for each in graphs.captured.policies.values())


class Clock:
    """Every look at it takes a tenth of a second, every third two."""

    def __init__(self):
        self.looks = itertools.count(1)
        self.now = 0.0

    def perf_counter(self):
        self.now += 0.2 if next(self.looks) % 3 == 0 else 0.1
        return self.now


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_costs_that_are_learnt_reach_captured_steps(sampling, monkeypatch):
    """What the host learns between rounds changes what they do, with no new capture. Here it learns of every round."""
    monkeypatch.setattr(run_of_the_loop.Run, "captures", 0)
    plain, captured = (BatchStopPolicy(INNER["max-prob"](), LearntCosts(), probe=4) for _ in "ab")
    decoder, answers = new_decoder(sampling=sampling), []
    with standing_in() as backend:
        graphs = new_decoder("graphs", sampling=sampling)
        for policy, used in ((plain, decoder), (captured, graphs)):
            monkeypatch.setattr(run_of_the_loop, "time", Clock())
            answers.append([run(used, policy, sampling=sampling) for _ in range(3)])
        asked = [key for each in graphs.captured.policies.values() for key in each.graphs.captured]
        assert "begin" in {key[0] for key in asked} and backend.replays > 3 * backend.captures
    assert answers[0] == answers[1]
    assert plain.costs.believed() == captured.costs.believed() and plain.costs.rounds > 3 * len(TRIAL)
    assert captured.costs.on_device.tolist() == captured.costs.coefficients[:4]
    assert captured.costs.on_device[3, 2] == captured.costs.plain.gamma != LearntCosts().plain.gamma
    drafted = [stats.drafted for *_, stats in answers[1][-1]]
    captured.forget()
    assert captured.costs.rounds == 0 and captured.costs.limit == TRIAL[0]
    assert any(drafted)


def test_a_round_in_which_graphs_are_made_tells_nothing_of_costs():
    """All other rounds do: of a second run, which makes none, every one."""
    policy = BatchStopPolicy(INNER["max-prob"](), LearntCosts())
    with standing_in() as backend:
        decoder, before, told = new_decoder("graphs"), 0, []
        for _ in range(3):
            live = list[int]()
            captures = backend.captures
            run(decoder, policy, live=live)
            told.append((policy.costs.rounds - before, len(live), backend.captures - captures))
            before = policy.costs.rounds
    assert all(learnt <= rounds and (learnt < rounds) == (made > 0) for learnt, rounds, made in told), told
    assert told[0][0] < told[0][1]


class Seldom(FixedPolicy):
    """Drafts in every third round."""

    capture = None
    rounds = 0

    def start_round(self, live):
        self.rounds += 1
        return super().start_round(live) * (self.rounds % 3 == 0)


@pytest.mark.parametrize("at_once", [1, 100], ids=["late", "together"])
def test_what_the_draft_has_missed_is_no_part_of_a_rounds_seconds(at_once, monkeypatch):
    """Feeding it takes a thousand seconds here; which are not counted, unless no tokens are ever too many."""
    clock, told = Clock(), []
    monkeypatch.setattr(run_of_the_loop, "time", clock)
    monkeypatch.setattr(drafter, "FED_TOGETHER", at_once)
    fill = drafter.DraftModel.catch_up

    def dear(self):
        clock.now += 1000
        fill(self)

    monkeypatch.setattr(drafter.DraftModel, "catch_up", dear)
    policy = Seldom(3)
    policy.costs, policy.needs = LearntCosts(), frozenset({Signal.SECONDS})
    observe = policy.costs.observe
    monkeypatch.setattr(policy.costs, "observe", lambda outcome: (told.append(outcome), observe(outcome)))
    said = [each[:-1] for each in run(new_decoder(sampling=GREEDY), policy, sampling=GREEDY)]
    assert said == [each[:-1] for each in run(new_decoder(sampling=GREEDY), FixedPolicy(0), sampling=GREEDY)]
    drafted = [outcome for outcome in told if outcome.draft_forwards]
    assert len(drafted) > 1 and max(outcome.seconds for outcome in told) < 2
    assert all(0 < outcome.draft_seconds < outcome.seconds for outcome in drafted)
    assert (clock.now > 1000) == (at_once == 1)


def test_it_forgets_in_the_same_memory():
    policy = BatchStopPolicy(INNER["head"](), COSTS)
    with standing_in() as backend:
        decoder = new_decoder("graphs")
        first = run(decoder, policy)
        told, captures = (policy.told, policy.budget), backend.captures
        assert policy.past.totals[0] > 5
        policy.forget()
        assert policy.past.totals == [1, 1, 0, 0, 0, 0] and not policy.past.sums.any()
        policy.plan([True] * len(policy.budget))
        assert policy.rho[0] == pytest.approx(0.9)  # of depth 2: predictions say how chances fall with depth
        assert run(decoder, policy) == first
        assert all(each is now for each, now in zip(told, (policy.told, policy.budget), strict=True))
        assert backend.captures == captures


def test_what_steps_read_of_the_policy_within_is_compared():
    policy = BatchStopPolicy(INNER["max-prob"](), COSTS)
    before = read_by_steps(policy)
    policy.policy.level = 0.5
    assert read_by_steps(policy)["policy.level"] != before["policy.level"]
    fixed = BatchStopPolicy(INNER["fixed"](), COSTS)
    assert read_by_steps(fixed)["policy.max_draft_tokens"] == 4
    assert "policy.running" not in before and "survival" not in before and "told" in before
