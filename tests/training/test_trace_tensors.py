"""Trace records as tensors against datasets' own torch format."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset, concatenate_datasets

from accept_head.trace.columns import ALTERNATIVE_COLUMNS, trace_features
from accept_head.training.learn.trace_tensors import READ_COLUMNS, TraceTensors

LENGTHS = [(5, 7), (3, 11), (9, 4), (1, 1), (2, 0)]


@pytest.mark.parametrize("alternatives", [0, 3])
def test_records_are_those_of_the_torch_format(make_traces, alternatives):
    """Of one table, of several put together, and of a choice of rows."""
    features = trace_features(alternatives=bool(alternatives))
    first = Dataset.from_list(make_traces(LENGTHS, alternatives=alternatives), features=features)
    second = Dataset.from_list(make_traces(LENGTHS, seed=1, alternatives=alternatives), features=features)
    both = concatenate_datasets([first, second])
    for traces in (first, both, both.select([7, 0, 3])):
        records = TraceTensors(traces)
        for row, expected in enumerate(traces.with_format("torch")):
            found = records[row]
            assert set(found) == {"index", *READ_COLUMNS, *(ALTERNATIVE_COLUMNS if alternatives else ())}
            for name, tensor in found.items():
                assert tensor.dtype == expected[name].dtype or not len(tensor)
                assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_a_record_is_the_callers_own(make_traces):
    """Not a view of the file, which may be mapped into memory."""
    records = TraceTensors(Dataset.from_list(make_traces(LENGTHS), features=trace_features()))
    records[0]["acceptance"].zero_()
    assert records[0]["acceptance"].sum() > 0
