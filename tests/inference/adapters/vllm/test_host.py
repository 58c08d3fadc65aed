"""PolicyHost: in a foreign draft loop, a policy makes the same decisions as a scalar reference of its rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accept_head import InputError
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference.adapters.vllm.host import Ending, Verdict
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.dsde import DsdePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy
from accept_head.inference.policy import RowPolicy, Signal
from accept_head.signals import draft_signals
from tests.inference.support.foreign import HIDDEN, VOCAB, Engine, host_of, names
from tests.inference.support.rounds import Verified
from tests.inference.support.scalar_rules import ScalarAdaEdl, product_rule
from tests.inference.support.toy import random_head

CPU = torch.device("cpu")


# --- lengths are what the rule says, row by row ---------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.floats(0.2, 0.95), st.integers(0, 10**6))
def test_a_rule_on_drawn_tokens_keeps_the_token_it_stops_at(batch, limit, threshold, seed):
    engine = Engine(batch, limit, seed)
    lengths, forwards = engine.round(host_of(MaxProbPolicy(threshold), limit=limit), names(batch))
    expected = []
    for row in range(batch):
        below = [k + 1 for k in range(limit) if float(engine.q[k, row].max()) < threshold]
        expected.append(below[0] if below else limit)
    assert lengths == expected
    assert forwards == max(expected)  # not one in vain


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.floats(0.2, 0.9), st.integers(0, 10**6))
def test_a_rule_that_peeks_ends_before_the_token(batch, limit, level, seed):
    engine = Engine(batch, limit, seed)
    lengths, _ = engine.round(host_of(AdaEdlPolicy(level), limit=limit), names(batch))
    for row in range(batch):
        entropy = [float(-(q[row] * q[row].log()).sum()) for q in engine.q]
        declined = [k for k in range(1, limit) if 1 - math.sqrt(0.2 * entropy[k]) < level]
        assert lengths[row] == (declined[0] if declined else limit)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([("drawn", 0), ("drawn", 1), ("before", None)]),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 8),
    st.floats(0.1, 0.9),
    st.integers(0, 10**6),
)
def test_heads_read_the_state_that_they_were_trained_on(reading, signals, batch, limit, threshold, seed):
    reads, lag = reading
    head = random_head(HIDDEN, signals=signals, reads=reads)
    engine = Engine(batch, limit, seed)
    lengths, forwards = engine.round(host_of(HeadPolicy(head, threshold, lag=lag), limit=limit), names(batch))
    expected = [scalar_head(head, lag, engine, row, limit, threshold) for row in range(batch)]
    assert lengths == expected
    longest = max(expected)
    assert forwards == longest + (reads == "drawn" and lag == 0 and longest < limit)


def test_signals_are_read_at_a_tokens_place_and_its_embedding_by_its_id():
    """As of an EAGLE-3 drafter whose vocabulary is a part of the target's."""
    table = torch.randn(VOCAB + 40, HIDDEN, generator=torch.Generator().manual_seed(3))
    head = random_head(HIDDEN, signals=True, reads="before", embeddings=table)
    engine = Engine(8, 6, seed=0, first=40)
    lengths, _ = engine.round(host_of(HeadPolicy(head, 0.8), limit=6), names(8))
    assert lengths == [scalar_head(head, 0, engine, row, 6, 0.8) for row in range(8)]
    assert len(set(lengths)) > 2


def scalar_head(head, lag, engine, row, limit, threshold):
    """How many tokens are drafted. Y_k is drawn from q[k − 1], which came with hidden[k − 1]; hidden[k] is at it."""
    hidden = engine.hidden[:-1] if head.config.reads == "before" else engine.hidden[1:]
    signals = draft_signals(engine.q[:, row], engine.places[:, row])[:limit] if head.config.signals else None
    probabilities = head.probability(hidden[:limit, row], signals=signals, token_ids=engine.ids[:limit, row]).tolist()
    return product_rule(probabilities, threshold, limit, lag=lag or 0)


def test_a_head_that_read_the_wrong_state_would_be_seen():
    head, differences = random_head(HIDDEN, reads="before"), 0
    for seed in range(20):
        engine = Engine(4, 6, seed)
        lengths, _ = engine.round(host_of(HeadPolicy(head, 0.5), limit=6), names(4))
        engine.hidden = engine.hidden.roll(1, dims=0)
        differences += lengths != [scalar_head(head, 0, engine, row, 6, 0.5) for row in range(4)]
    assert differences >= 15


# --- budgets --------------------------------------------------------------------------------------------------------


def test_the_host_and_the_engine_limit_what_is_drafted():
    engine = Engine(3, 12, 0)
    assert engine.round(host_of(FixedPolicy(5), limit=4), names(3))[0] == [4, 4, 4]
    assert engine.round(host_of(FixedPolicy(5), limit=8), names(3), limit=2)[0] == [2, 2, 2]
    assert engine.round(host_of(FixedPolicy(5)), names(3), live=[True, False, True])[0] == [5, 0, 5]


def test_nothing_is_drafted_where_nothing_is_wanted_yet_the_draft_is_fed():
    host = host_of(BatchMapPolicy([[1, 2, 3], [3, 8, 0]]))
    assert Engine(3, 4, 0).round(host, names(3)) == ([0, 0, 0], 1)
    assert host.forwards == 1
    assert Engine(2, 4, 0).round(host, names(2)) == ([3, 3], 3)


# --- rows are requests ----------------------------------------------------------------------------------------------


def test_a_requests_state_follows_it_through_joins_departures_and_moves():
    random, policy = np.random.default_rng(3), AdaEdlPolicy(0.5, k_max=6)
    host = host_of(policy, rows=6, limit=6)
    scalars, running, made, drafted, verdict = {}, [], 0, {}, None
    for number in range(60):
        if running:
            random.shuffle(running)
            del running[: int(random.integers(0, 3))]
        while len(running) < 6 and random.random() < 0.6:
            running.append(f"request-{made}")
            scalars[running[-1]] = ScalarAdaEdl(0.5, 6)
            made += 1
        if not running:
            continue
        verified = {name: length for name, length in drafted.items() if name in running}
        accepted = {name: int(random.integers(0, length + 1)) for name, length in verified.items()}
        verdict = Verdict(
            [verified.get(name, 0) for name in running],
            [accepted.get(name, 0) for name in running],
        )
        lengths, _ = Engine(len(running), 6, number).round(host, running, verdict=verdict)
        for name, length in verified.items():
            scalars[name].verified(Verified(0, length, length, accepted[name]))
        assert policy.levels.tolist() == pytest.approx([scalars[name].level for name in running], abs=1e-6)
        drafted = dict(zip(running, lengths, strict=True))


class Spy(RowPolicy):
    """Drafts two tokens and remembers what it is told."""

    def __init__(self):
        self.max_draft_tokens, self.seen, self.moves = 2, [], []

    def select(self, rows):
        self.moves.append(("select", rows.tolist()))

    def admit(self, rows, lengths):
        self.moves.append(("admit", rows.tolist()))

    def observe(self, outcome):
        self.seen.append(outcome)


def test_the_verdict_reaches_the_policy_in_the_order_of_the_round_it_is_on():
    spy, engine = Spy(), Engine(3, 3, 0)
    host = host_of(spy)
    engine.round(host, ["a", "b", "c"])
    assert spy.moves == [("select", [0, 0, 0]), ("admit", [0, 1, 2])] and spy.seen == []
    # b is gone, d is new, a and c have changed places; a had one token fewer verified than it drafted.
    engine.round(host, ["c", "d", "a"], verdict=Verdict([2, 0, 1], [2, 0, 1]))
    outcome = spy.seen[0]
    assert outcome.live.tolist() == [True, False, True]
    assert outcome.drafted.tolist() == [2, 2, 2]
    assert outcome.submitted[[0, 2]].tolist() == [1, 2] and outcome.accepted[[0, 2]].tolist() == [1, 2]
    assert spy.moves[2:] == [("select", [2, 0, 0]), ("admit", [1])]
    # The same requests in the same places: nothing moves, and no verdict means that nothing was verified.
    engine.round(host, ["c", "d", "a"])
    assert len(spy.moves) == 4 and spy.seen[1].submitted.tolist() == [0, 0, 0]


# --- tensor-parallel ranks ------------------------------------------------------------------------------------------


def test_ranks_that_disagree_do_what_the_first_one_says():
    answers = []

    def tell(answer):
        answers.append(answer.clone())
        return answer

    def follow(answer):
        said = answers.pop(0)
        assert said.dtype == answer.dtype and said.shape == answer.shape
        return said

    engine, other = Engine(3, 6, 0), Engine(3, 6, 1)
    first = engine.round(host_of(MaxProbPolicy(0.6), agree=tell), names(3))
    second = other.round(host_of(MaxProbPolicy(0.6), agree=follow), names(3))
    assert first == second and not answers
    assert other.round(host_of(MaxProbPolicy(0.6)), names(3)) != first  # it would have done otherwise


def test_a_row_drafts_no_more_than_its_text_has_room_for():
    """Of n more tokens the target itself says the last."""
    engine, ends = Engine(3, 6, 0), [Ending(12, ()), Ending(10, ()), Ending(99, ())]  # each has 9 tokens
    assert engine.round(host_of(FixedPolicy(6)), names(3), ends=ends) == ([2, 0, 6], 6)
    assert engine.round(host_of(FixedPolicy(6)), names(3), ends=[Ending(10, ())] * 3)[0] == [0, 0, 0]


def test_a_row_drafts_no_more_than_its_request_wants():
    engine, ends = Engine(4, 6, 0), [Ending(99, (), 0), Ending(99, (), 2), Ending(99, ()), Ending(99, (), 9)]
    assert engine.round(host_of(FixedPolicy(6)), names(4), ends=ends) == ([0, 2, 6, 6], 6)


def test_a_row_stops_after_a_token_that_ends_its_text():
    engine = Engine(2, 6, 0)
    for row in range(2):
        end = int(engine.ids[2, row])
        first = next(depth for depth, ids in enumerate(engine.ids) if int(ids[row]) == end)
        ends = [Ending(99, {end} if row == each else ()) for each in range(2)]
        lengths, _ = engine.round(host_of(MaxProbPolicy(0.0, k_max=6)), names(2), ends=ends)
        assert lengths[row] == first + 1 and lengths[1 - row] == 6


# --- what cannot be hosted ------------------------------------------------------------------------------------------


def test_signals_that_the_engine_does_not_give_are_refused_by_name():
    with pytest.raises(InputError, match="DsdePolicy needs DIVERGENCE"):
        host_of(DsdePolicy(4))


class DropsUnlikelyTokens(RowPolicy):
    """What was drawn with little probability is dropped: biased under the ratio test."""

    needs = frozenset({Signal.LOGPROB})
    lossless = frozenset({"match"})
    max_draft_tokens = 3

    def trim(self, drafted):
        return drafted - 1


def test_dropping_drawn_tokens_by_what_they_are_is_refused_unless_drafts_are_greedy():
    with pytest.raises(InputError, match="drops drawn tokens"):
        host_of(DropsUnlikelyTokens())
    assert Engine(2, 3, 0).round(host_of(DropsUnlikelyTokens(), greedy=True), names(2))[0] == [2, 2]


def test_a_round_without_drafts_is_not_trimmed():
    """AdaSpec, where not even one token pays."""
    costs = PairCosts.constant(ForwardCosts(t_draft=2.0, t_target=1.0))
    host, engine, verdict, lengths = host_of(AdaSpecPolicy(costs, k_max=4, probe=3)), Engine(2, 4, 0), None, []
    for _ in range(6):
        lengths.append(engine.round(host, names(2), verdict=verdict)[0])
        verdict = Verdict(lengths[-1], [0, 0])
    assert [0, 0] in lengths


def test_a_verdict_on_other_drafts_than_ours_counts_for_nothing():
    spy, engine = Spy(), Engine(2, 3, 0)
    host = host_of(spy)
    engine.round(host, ["a", "b"])
    # vLLM verified zeros for all instead, and took none of them: a's text has grown by one token, not by three.
    host.begin(["a", "b"], [True, True], [10, 12], 9, Verdict([2, 2], [2, 2]))
    assert spy.seen[0].live.tolist() == [False, True]


class Seldom(RowPolicy):
    """Drafts two tokens in every twentieth round in which it is asked."""

    needs, max_draft_tokens, may_rest = frozenset(), 2, True

    def __init__(self):
        self.asked, self.told = 0, []

    def start_round(self, live):
        self.asked += 1
        return torch.where(live, 2 if self.asked % 20 == 0 else 0, 0)

    def observe(self, outcome):
        self.told.append((outcome.drafted.tolist(), outcome.accepted.tolist()))


def test_a_policy_at_rest_is_neither_asked_nor_told_and_hears_of_all_its_drafts():
    policy, metrics, engine, verdict, drafts = Seldom(), DraftMetrics(4), Engine(2, 2, 0), None, []
    host = host_of(policy, metrics=metrics)
    for number in range(200):
        drafts.append((engine.round(host, names(2), verdict=verdict)[0], [number % 2, 1]))
        verdict = Verdict(drafts[-1][0], [min(n, m) for n, m in zip(*drafts[-1], strict=True)])
    with_drafts = [(drafted, taken) for drafted, taken in drafts if any(drafted)]
    assert len(with_drafts) == policy.asked // 20 > 3 and policy.asked < 150
    assert len(policy.told) == policy.asked - (not host.rests)  # the last round is not over
    assert [each for each in policy.told if any(each[0])] == with_drafts
    assert metrics.read()["rounds"] == 199


# --- the time that it takes ------------------------------------------------------------------------------------------


class PassedEvent:
    """In place of a CUDA event."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 2.0  # milliseconds


def test_a_gpu_is_timed_where_rounds_are_counted_and_nothing_piles_up_where_not(monkeypatch):
    """Ranks but the first count nothing."""
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    for metrics, wanted in ((None, 0), (DraftMetrics(4), 1)):
        host = host_of(MaxProbPolicy(0.3, k_max=4), metrics=metrics)
        host.stopwatch.on_gpu = True
        engine, verdict = Engine(3, 4, seed=0), None
        for _ in range(20):
            drafted, _ = engine.round(host, names(3), verdict=verdict)
            verdict = Verdict(drafted, [0, 0, 0])
        assert len(host.stopwatch.events) <= 20 * wanted
        assert (metrics is not None) == (metrics is not None and metrics.read()["policy_seconds"] > 0.04)
