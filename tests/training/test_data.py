"""Which traces are in which optimizer step, for any number of processes."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from accept_head import InputError
from accept_head.trace.columns import trace_features
from accept_head.training.learn.data import PackedTraces, StepSampler, TraceData
from accept_head.training.learn.splits import split_dev

OPTIONS = {"epochs": 3, "batch_size": 8, "seed": 4}


def sampler(traces=37, *, micro_batch_size=8, rank=0, world=1, **changes):
    options = {**OPTIONS, **changes}
    return StepSampler(traces, micro_batch_size=micro_batch_size, rank=rank, world=world, **options)


def steps_of(one):
    """[[(epoch, row) …] …]: what this rank feeds in each optimizer step."""
    batches = list(one)
    assert all(len(batch) == one.micro_batch_size for batch in batches)
    return [
        list(itertools.chain.from_iterable(batches[start : start + one.accumulate]))
        for start in range(0, len(batches), one.accumulate)
    ]


@pytest.mark.parametrize(
    ("world", "micro_batch_size"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
)
def test_union_over_ranks_of_every_step_is_the_single_process_step(world, micro_batch_size):
    single = steps_of(sampler())
    ranks = [steps_of(sampler(micro_batch_size=micro_batch_size, rank=rank, world=world)) for rank in range(world)]
    assert {len(steps) for steps in ranks} == {len(single)}
    for step, parts in zip(single, zip(*ranks, strict=True), strict=True):
        assert {len(part) for part in parts} == {8 // world}, "ranks must have equal work"
        assert Counter(itertools.chain.from_iterable(parts)) == Counter(step)


def test_another_seed_or_epoch_is_another_order():
    first, second, third = (steps_of(sampler(epochs=1, traces=32, seed=seed)) for seed in (4, 5, 4))
    assert first == third != second
    epochs = steps_of(sampler(traces=32, epochs=2))
    assert [[row for _, row in step] for step in epochs[:4]] != [[row for _, row in step] for step in epochs[4:]]


def test_each_trace_comes_once_an_epoch_and_only_the_rest_of_a_division_is_left_out():
    for traces in (32, 37):
        steps = steps_of(sampler(traces))
        for epoch in range(3):
            rows = [row for step in steps for e, row in step if e == epoch]
            assert len(rows) == len(set(rows)) == 32
    left_out = [set(range(37)) - {row for step in steps for e, row in step if e == epoch} for epoch in range(3)]
    assert len(set.union(*left_out)) > 5, "the same traces are left out each epoch"


def test_lengths_agree_with_what_is_yielded():
    one = sampler(micro_batch_size=2, rank=1, world=2)
    assert (one.accumulate, one.steps_per_epoch, one.total_steps, len(one)) == (2, 4, 12, 24)
    assert len(list(one)) == 24


@pytest.mark.parametrize("first_step", [0, 1, 4, 7, 12])
def test_a_resumed_run_gets_just_the_rest(first_step):
    for rank in range(2):
        whole = steps_of(sampler(micro_batch_size=2, rank=rank, world=2))
        resumed = sampler(micro_batch_size=2, rank=rank, world=2)
        resumed.first_step = first_step
        assert steps_of(resumed) == whole[first_step:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10, "micro_batch_size": 4}, "batch_size is 10.*micro_batch_size"),
        ({"batch_size": 8, "micro_batch_size": 4, "world": 3}, "batch_size is 8.*3.*processes"),
        ({"batch_size": 3, "micro_batch_size": 1, "world": 2}, "batch_size is 3.*2.*processes"),
        ({"traces": 7}, "batch_size is 8.*7 traces"),
    ],
)
def test_a_batch_that_cannot_be_divided_or_filled_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        sampler(**options)


def test_a_batch_of_all_traces_is_one_step_an_epoch():
    assert len(steps_of(sampler(traces=8))) == 3


@pytest.fixture
def traces(make_traces):
    return Dataset.from_list(make_traces([(3, 5)] * 120, first_index=1000), features=trace_features())


def test_item_is_the_row_of_the_traces_with_its_prompt_index(traces):
    packed = PackedTraces(traces, "exact", r=0.15, seed=0)
    assert len(packed) == 120
    for row in (0, 17, 119):
        item = packed[2, row]
        assert item.index == 1000 + row
        assert item.input_ids.tolist() == [
            *traces[row]["prompt_ids"],
            *traces[row]["response_ids"],
            *traces[row]["draft_ids"],
        ]


def test_held_out_traces_are_disjoint_complete_and_decided_by_index_and_seed_alone(traces):
    train, dev = split_dev(traces, Path("traces"), seed=3)
    assert not set(train["index"]) & set(dev["index"])
    assert sorted([*train["index"], *dev["index"]]) == traces["index"][:]
    again = split_dev(traces.select(range(119, -1, -1)), Path("traces"), seed=3)[1]
    assert set(again["index"]) == set(dev["index"])
    assert set(split_dev(traces, Path("traces"), seed=4)[1]["index"]) != set(dev["index"])
    part = split_dev(traces.select(range(60)), Path("traces"), seed=3)[1]
    assert set(part["index"]) == {index for index in dev["index"] if index < 1060}


def test_about_a_tenth_is_held_out(make_traces):
    """Binomial, n = 4,000: |z| < 4 fails a right split with p < 1e-4."""
    many = Dataset.from_list(make_traces([(1, 1)] * 4000), features=trace_features())
    held_out = len(split_dev(many, Path("traces"), seed=0)[1])
    assert abs(held_out - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5


def test_too_few_traces_to_hold_some_out_are_refused(traces):
    with pytest.raises(InputError, match=r"some/folder.*2 traces.*--dev_traces"):
        split_dev(traces.select(range(2)), Path("some/folder"), seed=0)


class _Trainer:
    """The part of a Lightning trainer that TraceData reads."""

    def __init__(self, rank, world, step=0):
        self.global_rank, self.world_size, self.global_step = rank, world, step


def trace_data(traces, rank=0, world=1, step=0, micro_batch_size=4):
    options = {"packing": "mixing", "r": 0.15, "epochs": 2, "batch_size": 8, "seed": 0}
    data = TraceData(traces, traces.select(range(11)), micro_batch_size=micro_batch_size, **options)
    data.trainer = _Trainer(rank, world, step)
    return data


def test_each_dev_trace_is_judged_once_on_one_rank(traces):
    for world in (1, 2, 3):
        seen = [
            index
            for rank in range(world)
            for batch in trace_data(traces, rank, world).val_dataloader()
            for index in batch.indices.tolist()
        ]
        assert sorted(seen) == list(range(1000, 1011))


def test_dev_batches_are_packed_exactly_even_when_training_mixes(traces):
    (first, *_) = trace_data(traces).val_dataloader()
    assert first.input_ids.shape[1] == 3 + 2 * 5
    (train, *_) = trace_data(traces).train_dataloader()
    assert train.input_ids.shape[1] == 3 + 5


def test_resuming_starts_at_the_next_optimizer_step(traces):
    whole = [batch.indices.tolist() for batch in trace_data(traces).train_dataloader()]
    resumed = trace_data(traces)
    resumed.load_state_dict(trace_data(traces, step=5).state_dict())
    assert [batch.indices.tolist() for batch in resumed.train_dataloader()] == whole[5 * 2 :]


def test_worker_processes_deliver_the_same_batches_in_the_same_order(traces):
    alone, helped = trace_data(traces), trace_data(traces)
    helped.workers = 2
    batches = list(alone.train_dataloader())
    for one, two in zip(batches, helped.train_dataloader(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True))
