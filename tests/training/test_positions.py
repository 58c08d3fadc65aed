"""Shared rows against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accept_head.training.learn.positions import SharedRows


@given(index=st.lists(st.integers(0, 6), max_size=30), seed=st.integers(0, 100))
def test_spread_and_summed_are_loops_over_the_positions(index, seed):
    """Values that no position reads, and no positions at all, are among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(7, 3, generator=generator)
    rows = SharedRows(values, torch.tensor(index, dtype=torch.long))
    of_positions = torch.randn(len(index), 5, generator=generator)
    sums = np.zeros((7, 5), dtype=np.float32)
    for position, which in enumerate(index):
        sums[which] += of_positions[position].numpy()
    np.testing.assert_array_equal(rows.summed(of_positions).numpy(), sums)
    assert torch.equal(rows.spread(values), values[index])


def test_each_by_its_own_needs_no_copy():
    values = torch.randn(7, 3)
    rows = SharedRows(values)
    assert rows.spread(values) is values
    assert rows.summed(values) is values


@pytest.mark.parametrize("index", [None, [2, 0, 2]])
def test_another_dtype_is_read_by_the_same_positions(index):
    rows = SharedRows(torch.randn(3, 4), index if index is None else torch.tensor(index))
    half = rows.to(torch.bfloat16)
    assert half.values.dtype == torch.bfloat16
    assert rows.values.dtype == torch.float32
    of_positions = torch.randn(3, 2)
    assert torch.equal(half.summed(of_positions), rows.summed(of_positions))
    assert torch.equal(half.spread(half.values), rows.spread(rows.values).to(torch.bfloat16))
