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
    """Median seconds, after real prompts, of a draft step (1 token), of a verification (verify_tokens + 1 tokens) and
    of a step of the target alone (1 token).

    They are timed in turns, so that a slower or faster moment of the machine touches all alike. Raises InputError
    when the context is too short for a verification.
    """
    width = verify_tokens + 1
    usable = [p for p in prompts if len(p) + width <= min(context_tokens(pair.target), context_tokens(pair.draft))]
    if not usable:
        raise InputError(f"no prompt leaves room for {width} more tokens in the models' context")
    seconds: dict[str, list[float]] = {"t_draft": [], "t_target": [], "t_autoregressive": []}
    for step in range(WARM_UP + REPEATS):
        prompt = torch.tensor([usable[step % len(usable)]], device=pair.target.device)
        length = torch.tensor([prompt.shape[1]], device=prompt.device)
        draft, target = (CachedModel(model, prompt.shape[1] + width) for model in (pair.draft, pair.target))
        for model in (draft, target):
            model.prefill(prompt, length)
        new = prompt[:, -1:].expand(1, width)
        timed = {
            "t_draft": _seconds(draft, new[:, :1], length),
            "t_target": _seconds(target, new, length),
            "t_autoregressive": _seconds(target, new[:, :1], length),
        }
        if step >= WARM_UP:
            for name, value in timed.items():
                seconds[name].append(value)
    return ForwardCosts(**{name: statistics.median(values) for name, values in seconds.items()})


def _seconds(model: CachedModel, new: Tensor, starts: Tensor) -> float:
    _finish(new.device)
    start = time.perf_counter()
    model.forward(new, starts)
    _finish(new.device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
