"""The costs of draft and target forwards within the decode loop: eq. 3.1 fitted to rounds of different draft lengths.

T = t_draft·N_draft + t_target·N_target, by least squares. T is wall-clock time, so each forward includes its share of
the loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accept_head.console import Progress
from accept_head.cost import ForwardCosts
from accept_head.errors import InputError
from accept_head.inference.decode.generate import GREEDY, make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.cache import Compile
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.profile.device import finish
from accept_head.inference.profile.prompts import usable_prompts
from accept_head.pair import Pair
from accept_head.sampling import Sampling

DRAFT_LENGTHS = (1, 2, 4, 8)  # of the rounds in the regression
# Rounds further than this from the median of their draft length are left out, because another process had the
# processor. In standard deviations, estimated by the median absolute deviation.
OUTLIER = 3.0


@dataclass(frozen=True, kw_only=True)
class Regression:
    """Result of the fit. costs: by least squares of eq. 3.1. r_squared: of the fit over `rounds` rounds."""

    costs: ForwardCosts
    r_squared: float
    rounds: int


def regress_rounds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 48,
    compile: Compile = "none",
) -> Regression:
    """Decode prompts one at a time with several fixed draft lengths, in turns, and fit eq. 3.1 to the rounds.

    Raises InputError when no prompt leaves room for a response of max_new_tokens.
    """
    usable = usable_prompts(pair, prompts, max_new_tokens)
    policies = [FixedPolicy(k) for k in (0, *DRAFT_LENGTHS)]
    options: Any = {"batch_size": 1, "greedy": sampling.greedy, "compile": compile}
    decoder = make_decoder(pair.target, pair.draft, make_requests(usable, max_new_tokens), policies[-1], **options)
    processing = Processing(sampling, pair.vocab_size)
    # Everything is captured or compiled now, because the same rounds are timed afterwards.
    warm_up = usable[:1] if compile == "none" else usable
    seconds: dict[int, list[float]] = {}  # seconds of rounds, by tokens drafted
    prompts = [*warm_up, *usable]
    for index, prompt in enumerate(Progress(prompts, "profile", unit="prompt")):
        for policy in policies:
            for drafted, elapsed in _timed_rounds(decoder, prompt, policy, processing, max_new_tokens):
                if index >= len(warm_up):
                    seconds.setdefault(drafted, []).append(elapsed)
    if 0 not in seconds or len(seconds) < 3:
        raise InputError(f"max_new_tokens is {max_new_tokens}: too few rounds of different lengths to fit; give more")
    alone = statistics.median(seconds.pop(0))
    kept = {k: _without_outliers(times) for k, times in seconds.items()}
    lengths = np.array([k for k, times in kept.items() for _ in times], dtype=float)
    measured = np.array([elapsed for times in kept.values() for elapsed in times])
    (t_draft, t_target), r_squared = least_squares(np.stack([lengths, np.ones_like(lengths)], axis=1), measured)
    if min(t_draft, t_target) <= 0:
        raise InputError(
            f"the {len(measured)} rounds are too few or too noisy to fit (t_draft would be {t_draft:.2g} s); "
            "give more prompts, or a larger max_new_tokens"
        )
    costs = ForwardCosts(t_draft=t_draft, t_target=t_target, t_autoregressive=alone)
    return Regression(costs=costs, r_squared=r_squared, rounds=len(measured))


def _without_outliers(times: Sequence[float]) -> list[float]:
    median = statistics.median(times)
    deviation = 1.4826 * statistics.median(abs(elapsed - median) for elapsed in times)
    return [elapsed for elapsed in times if abs(elapsed - median) <= OUTLIER * deviation]


def _timed_rounds(
    decoder: Decoder, prompt: Sequence[int], policy: FixedPolicy, processing: Processing, max_new_tokens: int
) -> list[tuple[int, float]]:
    """(tokens drafted, seconds) of each round except the first, which includes the prefill."""
    device = decoder.target.model.device
    clock: list[float] = []
    drafted: list[int] = []

    def watch(round_: Round) -> None:
        drafted.append(int(round_.outcome.drafted.sum()))
        finish(device)
        clock.append(time.perf_counter())

    requests = make_requests([prompt], max_new_tokens)
    never = Stopping([], [], device)
    for _ in decoder.run(requests, policy=policy, processing=processing, stopping=never, watch=watch):
        pass
    spans = np.diff(clock).tolist()
    return list(zip(drafted[1:], spans, strict=True))


def least_squares(features: np.ndarray, measured: np.ndarray) -> tuple[list[float], float]:
    """Coefficients and R². features: (n, coefficients); measured: (n,)."""
    coefficients, *_ = np.linalg.lstsq(features, measured, rcond=None)
    unexplained = np.square(measured - features @ coefficients).sum()
    total = np.square(measured - measured.mean()).sum()
    return [float(value) for value in coefficients], float(1 - unexplained / total) if total > 0 else 1.0
