"""The tables of coupled traces against rounds that are built token by token from the records."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accept_head.inference.replay.coupled import CoupledTraces
from tests.inference.support.made_up import (
    END,
    HIDDEN,
    MADE_UP,
    SIGNALS,
    Sample,
    make_sample,
    samples,
)


def token_of(traces: CoupledTraces, number: int):
    return (int(traces.ids[number]), *(float(getattr(traces, name)[number]) for name in SIGNALS))


def differs(sample: Sample, traces: CoupledTraces) -> str | None:
    """What the tables say of some round that the records do not; None if they agree."""
    missing = len(traces.ids)
    for row in range(len(traces.lengths)):
        for start in range(int(traces.lengths[row])):
            here = int(traces.starts[row]) + start
            tokens = sample.round(row, start, traces.k_max)
            whole = sample.round(row, start, 100)
            if traces.drafts[here] != len(tokens):
                return "drafts"
            leading = next((i for i, token in enumerate(whole) if not token.accepted), len(whole))
            if traces.leading[here] != leading:
                return "leading"
            path = traces.path[here].tolist()
            if any(number != missing for number in path[len(tokens) :]):
                return "path beyond the round"
            for number, token in zip(path, tokens, strict=False):
                if token_of(traces, number) != pytest.approx((token.id, token.logprob, token.entropy, token.max_prob)):
                    return "tokens"
    return None


@MADE_UP
@given(samples())
def test_tables_hold_the_rounds_that_the_records_make(folder, sample):
    traces = sample.couple(folder)
    assert traces.lengths.tolist() == [len(record["response_ids"]) for record in sample.records]
    assert traces.positions == sum(map(len, sample.fed))
    assert traces.path.shape == (traces.positions, sample.k_max)
    assert differs(sample, traces) is None


@MADE_UP
@given(samples(k_max=9), st.integers(2, 9))
def test_longer_rollouts_than_wanted_are_cut(folder, sample, k_max):
    assert differs(sample, sample.couple(folder, k_max=k_max)) is None


@MADE_UP
@given(samples(responses=7), st.integers(1, 7))
def test_the_first_records_alone_have_their_own_rollouts_only(folder, sample, count):
    traces = sample.couple(folder, count=count)
    assert len(traces.lengths) == count and len(traces.shards) == -(-count // sample.config.shard_size)
    assert differs(sample, traces) is None
    assert len(traces.rejected) == sum(map(len, sample.rollouts[:count]))


@MADE_UP
@given(samples())
def test_hidden_states_come_shard_by_shard_for_all_positions_and_rollouts(folder, sample):
    traces = sample.couple(folder)
    parts = list(traces.hidden())
    assert [part[0].start for part in parts] == [0, *(part[0].stop for part in parts[:-1])]
    assert [part[1].start for part in parts] == [0, *(part[1].stop for part in parts[:-1])]
    assert torch.equal(torch.cat([fed for *_, fed, _ in parts]), torch.cat(sample.fed))
    rollouts = [own[i] for own in sample.rollouts for i in sorted(own)]
    hidden = torch.cat([hidden for *_, hidden in parts])
    assert hidden.shape == (len(rollouts), sample.k_max - 1, HIDDEN)
    for mine, rollout in zip(hidden, rollouts, strict=True):
        assert torch.equal(mine[: len(rollout["ids"])], rollout["hidden"])


def test_made_up_traces_are_of_all_kinds():
    """So that the tests above have seen what can go wrong."""
    sample = make_sample(0, responses=60, ends=0.15)
    rounds = [sample.round(row, 0, 6) for row in range(60)]
    finished = [record["finished"] for record in sample.records]
    assert {True, False} == set(finished)
    assert any(record["accepted"][-1] for record in sample.records if record["finished"])
    assert any(not record["accepted"][-1] for record in sample.records if record["finished"])
    assert any(token.id == END and not token.accepted for tokens in rounds for token in tokens)
    assert {len(tokens) for tokens in rounds} >= {1, 2, 3, 6}
