"""Forward costs of a pair in graphs, in the form that `accept-head profile` writes, which measures without graphs.

Medians of bare forwards of both models, over batch size, context and width. They lack what the loop adds to a forward;
with graphs that is little, and without them it would be most.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from graph_modes import supported
from scipy.optimize import nnls
from transformers import PreTrainedModel

from accept_head.inference.cache import CachedModel
from accept_head.inference.round_grid import finish
from accept_head.pair import Pair

CONTEXTS, WIDTHS = (64, 256), (1, 2, 5)
VERIFIED = 5  # tokens of the verification that t_target is of
REPEATS = 7


@torch.no_grad()
def graph_costs(pair: Pair, mode: str, batches: Sequence[int]) -> dict[str, Any]:
    """t_draft, t_target, t_autoregressive, and α, β, γ of each model (`batch`), in seconds. batches: 1 among them."""
    timed = {name: _timed(model, mode, batches) for name, model in (("draft", pair.draft), ("target", pair.target))}
    one = {(name, width): timed[name][1, CONTEXTS[0], width] for name in timed for width in WIDTHS}
    return {
        "t_draft": one["draft", 1],
        "t_target": one["target", VERIFIED],
        "t_autoregressive": one["target", 1],
        "batch": {name: _fitted(seconds) for name, seconds in timed.items()},
    }


def _timed(model: PreTrainedModel, mode: str, batches: Sequence[int]) -> dict[tuple[int, int, int], float]:
    """Seconds by (batch, context, width)."""
    seconds = {}
    for batch in batches:
        room = max(CONTEXTS) + max(WIDTHS)
        cached = CachedModel(model, batch, room, **supported(CachedModel.__init__, compile=mode))
        ids = torch.ones(batch, room, dtype=torch.long, device=model.device)
        cached.fill(ids, range(batch), [0] * batch, [max(CONTEXTS)] * batch)
        for context in CONTEXTS:
            starts = torch.full((batch,), context, device=model.device)
            for width in WIDTHS:
                times = []
                for _ in range(REPEATS + 2):
                    finish(model.device)
                    begin = time.perf_counter()
                    cached.forward(ids[:, :width], starts, context)
                    finish(model.device)
                    times.append(time.perf_counter() - begin)
                seconds[batch, context, width] = statistics.median(times[2:])
    return seconds


def _fitted(seconds: dict[tuple[int, int, int], float]) -> dict[str, float]:
    """Least squares with no coefficient below zero: a forward never gets faster by more tokens."""
    features = np.array([(batch * context, batch * width, 1) for batch, context, width in seconds], dtype=float)
    measured = np.array(list(seconds.values()))
    (alpha, beta, gamma), residual = nnls(features, measured)
    total = float(np.square(measured - measured.mean()).sum())
    fit = 1 - residual**2 / total if total else 1.0
    return {"alpha": float(alpha), "beta": float(beta), "gamma": float(gamma), "r_squared": float(fit)}
