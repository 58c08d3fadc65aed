"""Measures what one forward costs on this machine, at batch 1, over the cache that decoding uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from accept_head.cost import ForwardCosts
from accept_head.errors import InputError
from accept_head.inference.cache import CachedModel
from accept_head.pair import Pair, context_tokens

WARM_UP, REPEATS = 5, 40


@torch.no_grad()
def measure_costs(pair: Pair, prompts: Sequence[Sequence[int]], *, verify_tokens: int = 4) -> ForwardCosts:
    """Median seconds of a draft step (1 token) and of a verification (verify_tokens + 1 tokens) after real prompts.

    The two are timed in turns, so that a slower or faster moment of the machine touches both alike. Raises InputError
    when the context is too short for a verification.
    """
    width = verify_tokens + 1
    usable = [p for p in prompts if len(p) + width <= min(context_tokens(pair.target), context_tokens(pair.draft))]
    if not usable:
        raise InputError(f"no prompt leaves room for {width} more tokens in the models' context")
    draft_seconds: list[float] = []
    target_seconds: list[float] = []
    for step in range(WARM_UP + REPEATS):
        prompt = torch.tensor([usable[step % len(usable)]], device=pair.target.device)
        length = torch.tensor([prompt.shape[1]], device=prompt.device)
        draft, target = (CachedModel(model, prompt.shape[1] + width) for model in (pair.draft, pair.target))
        for model in (draft, target):
            model.prefill(prompt, length)
        new = prompt[:, -1:].expand(1, width)
        draft_time = _seconds(draft, new[:, :1], length)
        target_time = _seconds(target, new, length)
        if step >= WARM_UP:
            draft_seconds.append(draft_time)
            target_seconds.append(target_time)
    return ForwardCosts(t_draft=statistics.median(draft_seconds), t_target=statistics.median(target_seconds))


def _seconds(model: CachedModel, new: Tensor, starts: Tensor) -> float:
    _finish(new.device)
    start = time.perf_counter()
    model.forward(new, starts)
    _finish(new.device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
