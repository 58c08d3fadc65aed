"""Counter-based uniforms against a big-integer splitmix64, and statistical tests.

Statistical tests have fixed seeds, so they always give the same result. For an ideal generator each fails with
probability 1e-4.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from accept_head.randomness import uniforms

FALSE_ALARM = 1e-4
COUNT = 1 << 16


def splitmix64(state):
    """Steele, Lea and Flood (2014), in Python's unbounded integers."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def reference(seed, *counters):
    state = splitmix64(seed % (1 << 64))
    for counter in counters:
        state = splitmix64(state ^ (counter % (1 << 64)))
    return (state >> 11) * 2.0**-53


def chi_square_of_pairs(first, second, cells=16):
    """p-value of "the pairs fill a grid evenly": wrong marginals and any dependence between the two lower it."""
    counts, _, _ = np.histogram2d(first, second, bins=cells, range=[[0, 1], [0, 1]])
    return stats.chisquare(counts.ravel()).pvalue


def test_the_reference_gives_the_published_splitmix64_numbers():
    """First outputs for seed 1234567: the generator's state advances by the same constant at each call."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + i * gamma) % (1 << 64)) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63 - 1, -(2**63)])
def test_every_bit_equals_the_big_integer_reference(seed):
    counters = [0, 1, 2, 1000, -5, 2**31, 2**63 - 1, -(2**63)]
    a, b = torch.meshgrid(torch.tensor(counters), torch.tensor(counters), indexing="ij")
    found = uniforms(seed, a, b)
    assert found.dtype == torch.float64
    assert found.tolist() == [[reference(seed, x, y) for y in counters] for x in counters]
    assert uniforms(seed).item() == reference(seed)
    assert uniforms(seed, 7, 8, 9).item() == reference(seed, 7, 8, 9)


def test_equal_counters_give_equal_numbers_in_any_batch_and_order():
    rows, steps = torch.arange(6), torch.arange(9)
    whole = uniforms(3, rows[:, None], steps[None, :], 1)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniforms(3, rows[order][:, None], steps[None, :], 1), whole[order])
    for row in rows.tolist():
        assert torch.equal(uniforms(3, row, steps, 1), whole[row])
        assert uniforms(3, torch.tensor(row), 4, 1) == whole[row, 4]


@pytest.mark.parametrize("seed", [0, 1, 2024])
def test_numbers_are_uniform(seed):
    assert stats.kstest(uniforms(seed, torch.arange(COUNT)).numpy(), "uniform").pvalue > FALSE_ALARM
    grid = uniforms(seed, torch.arange(256)[:, None], torch.arange(256))
    assert stats.kstest(grid.flatten().numpy(), "uniform").pvalue > FALSE_ALARM


NEIGHBOURS = {
    "neighbouring counters": lambda i: (uniforms(0, i), uniforms(0, i + 1)),
    "neighbouring steps of one row": lambda i: (uniforms(0, i // 256, i % 256), uniforms(0, i // 256, i % 256 + 1)),
    "neighbouring rows": lambda i: (uniforms(0, i, 3), uniforms(0, i + 1, 3)),
    "two streams of one place": lambda i: (uniforms(0, i, 0), uniforms(0, i, 1)),
    "neighbouring seeds": lambda i: (uniforms(0, i), uniforms(1, i)),
    "exchanged counters": lambda i: (uniforms(0, i, 70000), uniforms(0, 70000, i)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_pairs_are_independent(name):
    first, second = (values.numpy() for values in NEIGHBOURS[name](torch.arange(COUNT)))
    assert chi_square_of_pairs(first, second) > FALSE_ALARM
    assert stats.pearsonr(first, second).pvalue > FALSE_ALARM


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_numbers():
    counters = torch.arange(1000)
    assert torch.equal(uniforms(7, counters.cuda(), 3).cpu(), uniforms(7, counters, 3))
