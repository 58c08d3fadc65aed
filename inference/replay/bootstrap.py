"""The bootstrap over prompts, behind all stated intervals: resamples prompts, each with its responses under all
policies."""

from __future__ import annotations

import numpy as np

RESAMPLES = 2000


def draws(count: int, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """(resamples, count) float: how often each of `count` prompts is drawn in `count` draws with replacement."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)


def interval(values: np.ndarray) -> list[float]:
    """[low, high]: the middle 95 % of a figure over the resamples."""
    return [float(bound) for bound in np.quantile(values, [0.025, 0.975])]
