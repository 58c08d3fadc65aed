"""The costs of bare forwards, without the decode loop.

The forwards of one row are timed after real prompts. Those of a batch are fitted by
t = α·(context tokens) + β·(batch tokens) + γ (AdaSpec eq. 2), over batch × context × width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.cost import BatchForwardCost, ForwardCosts
from accept_head.eagle3.network import Eagle3Drafter
from accept_head.inference.engine.cache import CachedModel, Compile, Group
from accept_head.inference.engine.proof import check_served
from accept_head.inference.profile.device import finish
from accept_head.inference.profile.prompts import usable_prompts
from accept_head.inference.profile.regression import least_squares
from accept_head.pair import Pair, context_tokens, hidden_size

WARM_UP, REPEATS = 5, 40
BATCHES, CONTEXTS, WIDTHS = (1, 2, 4, 8, 16), (32, 128, 256), (1, 2, 5)


@torch.no_grad()
def measure_forwards(pair: Pair, prompts: Sequence[Sequence[int]], *, compile: Compile = "none") -> ForwardCosts:
    """Median seconds of bare forwards after real prompts, at batch 1.

    Measured are a draft step (1 token), a verification (4 + 1 tokens) and a step of the target alone
    (1 token). They are timed in turns, so that a slower or faster moment of the machine affects all alike. Raises
    InputError when the context is too short for a verification.
    """
    width = 4 + 1
    usable = usable_prompts(pair, prompts, width)
    longest = max(len(prompt) for prompt in usable)
    device = pair.target.device
    draft, target = (_as_decoding(model, 1, longest + width, compile) for model in (pair.draft, pair.target))
    seconds: dict[str, list[float]] = {"t_draft": [], "t_target": [], "t_autoregressive": []}
    for step in range(WARM_UP + REPEATS):
        prompt = torch.tensor([usable[step % len(usable)]], device=device)
        for model in (draft, target):
            fill(model, prompt)
        new = prompt[:, -1:].expand(1, width)
        timed = {
            "t_draft": _seconds(draft, new[:, :1], prompt.shape[1]),
            "t_target": _seconds(target, new, prompt.shape[1]),
            "t_autoregressive": _seconds(target, new[:, :1], prompt.shape[1]),
        }
        if step >= WARM_UP:
            for name, value in timed.items():
                seconds[name].append(value)
    return ForwardCosts(**{name: statistics.median(values) for name, values in seconds.items()})


@torch.no_grad()
def fit_batch_cost(model: PreTrainedModel, *, repeats: int = 5, compile: Compile = "none") -> BatchForwardCost:
    """α, β, γ of AdaSpec's eq. 2, by least squares over median seconds at every batch × context × width that fits."""
    room = context_tokens(model) - max(WIDTHS)
    contexts = [context for context in CONTEXTS if context <= room] or [max(1, room)]
    features, measured = [], []
    for batch in BATCHES:
        cached = _as_decoding(model, batch, max(contexts) + max(WIDTHS), compile)
        ids = torch.ones(batch, max(contexts), dtype=torch.long, device=model.device)
        fill(cached, ids)
        for context in contexts:
            for width in WIDTHS:
                times = [_seconds(cached, ids[:, :1].expand(batch, width), context) for _ in range(repeats + 1)][1:]
                features.append((batch * context, batch * width, 1))
                measured.append(statistics.median(times))
    (alpha, beta, gamma), r_squared = least_squares(np.array(features, dtype=float), np.array(measured))
    return BatchForwardCost(alpha=alpha, beta=beta, gamma=gamma, r_squared=r_squared)


def _as_decoding(model: PreTrainedModel, batch: int, max_length: int, compile: Compile) -> CachedModel:
    """The model with a cache and the attention that decoding chooses."""
    check_served(model, "auto")
    return CachedModel(model, batch, max_length, attention="auto", compile=compile)


def fill(model: CachedModel, ids: Tensor) -> None:
    """Feed whole rows, (rows, tokens), to be timed after them."""
    rows, width = ids.shape
    if (states := blank_states(model.model, rows, width)) is None:
        model.fill(ids, range(rows), [0] * rows, [width] * rows)
    else:
        spans = torch.tensor([(row, 0, width) for row in range(rows)], device=ids.device)
        model.fill_drafter(ids, Group(spans, width, 0), states)


def blank_states(model: PreTrainedModel, rows: int, width: int) -> Tensor | None:
    """Zeros in place of the target's states, (rows, width, hidden), for a drafter that reads them: it takes as long."""
    if not isinstance(model, Eagle3Drafter):
        return None
    return torch.zeros(rows, width, hidden_size(model), dtype=model.dtype, device=model.device)


def _seconds(model: CachedModel, new: Tensor, start: int) -> float:
    starts = torch.full((len(new),), start, device=new.device)
    forward = partial(model.forward, new, starts, start, states=blank_states(model.model, *new.shape), copy=False)
    if model.static:  # the first call captures or compiles
        forward()
    finish(new.device)
    begin = time.perf_counter()
    forward()
    finish(new.device)
    return time.perf_counter() - begin
