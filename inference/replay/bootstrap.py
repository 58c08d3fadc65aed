"""The bootstrap over prompts, one for all that states an interval: prompts are drawn anew, and with a prompt all of its
responses under every policy."""

from __future__ import annotations

import numpy as np

RESAMPLES = 2000


def draws(count: int, *, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """(resamples, count) float: how often each of `count` prompts is drawn, `count` draws with replacement."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)


def interval(values: np.ndarray) -> list[float]:
    """The middle 95 % of a figure over the resamples: [low, high]."""
    return [float(bound) for bound in np.quantile(values, [0.025, 0.975])]
