"""The bootstrap against its definition."""

from __future__ import annotations

import numpy as np

from accept_head.inference.replay.bootstrap import RESAMPLES, draws, interval


def test_each_resample_draws_as_many_prompts_as_there_are():
    drawn = draws(7, seed=3)
    assert drawn.shape == (RESAMPLES, 7)
    assert (drawn.sum(1) == 7).all()
    assert (drawn >= 0).all()
    np.testing.assert_array_equal(drawn, draws(7, seed=3))
    assert not np.array_equal(drawn, draws(7, seed=4))


def test_each_prompt_is_drawn_once_on_average_with_the_spread_of_drawing_with_replacement():
    """Over 2,000 resamples of 50: the mean count has a standard error of .022, five of which are 1e-6."""
    drawn = draws(50, seed=0)
    assert np.abs(drawn.mean(0) - 1).max() < 0.11
    assert abs(drawn.var(0).mean() - (1 - 1 / 50)) < 0.05


def test_the_interval_of_a_mean_is_the_normal_one_for_many_prompts():
    values = np.random.default_rng(0).normal(size=4000)
    low, high = interval(draws(len(values)) @ values / len(values))
    error = values.std() / np.sqrt(len(values))
    np.testing.assert_allclose([low, high], values.mean() + np.array([-1.96, 1.96]) * error, atol=0.1 * error)


def test_the_interval_leaves_out_a_fortieth_at_each_end():
    assert interval(np.arange(1001.0)) == [25.0, 975.0]
