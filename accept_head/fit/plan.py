"""What a fit will do and how long it will take: sizes that fit the prompts at hand and the user's budget."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from accept_head.alternatives import DRAWS
from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.files import readable_size
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.proof import check_served
from accept_head.inference.profile.device import finish
from accept_head.inference.profile.forwards import blank_states, fill
from accept_head.inference.profile.regression import DRAFT_LENGTHS
from accept_head.pair import Pair, hidden_size
from accept_head.sampling import Sampling
from accept_head.training.collect.settings import DEPTHS
from accept_head.training.plan.estimate import ALTERNATIVE_BYTES, POSITION_BYTES, PROMPT_BYTES

TRAIN, FEWEST_TRAIN = 300, 20  # prompts; a base takes some dozen, a residual some hundred
HELD_OUT, FEWEST_HELD_OUT = 60, 12  # dev prompts, and test prompts
BATCH = 32  # prompts that are collected together
PREFILL, REPEATS = 128, 3  # tokens of a timed prefill, and how often each forward is timed
FULL = 3  # a draft forward in float32, in which heads learn, takes so many times as long as in half precision
COST_PROMPTS, COST_TOKENS = 4, 32  # decoded with each of some draft lengths, for the costs of forwards
TRIED = 4  # policies that are decoded
SHORTER = 0.7  # of the target alone's time, that a response takes with a policy
ROLLED_OUT = 6  # draft tokens for a position in `tune`


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds. prefill: of a token in a prompt, both models. draft_prefill: of the draft alone. draft_in_full: the same
    in float32. alone: of a target step with one row. batch: with BATCH rows. draft: of a draft step with one row."""

    prefill: float
    draft_prefill: float
    draft_in_full: float
    alone: float
    batch: float
    draft: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Prompts of each split, and seconds of each step."""

    train: int
    dev: int
    test: int
    seconds: dict[str, float]

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": self.train, "dev": self.dev, "test": self.test}

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def seconds_of(budget: str) -> float:
    """`90s`, `20m` or `2h` as seconds. Raises InputError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget)
    if not found or float(found[1]) <= 0:
        raise InputError(f"budget is {budget!r}, expected a time like 90s, 20m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def planned(
    speed: Speed, *, prompts: int, prompt_tokens: float, new_tokens: int, budget: float | None, processes: int
) -> Plan:
    """The largest plan for so many prompts, and within the budget, if there is one. prompt_tokens: of a prompt, on
    average. Raises InputError when there are too few prompts, or the budget is too short for the smallest plan."""
    needed = FEWEST_TRAIN + 2 * FEWEST_HELD_OUT
    if prompts < needed:
        raise InputError(
            f"{prompts} different prompts are there, expected at least {needed}: more, or leave --prompts out"
        )

    def plan(train: int) -> Plan:
        held_out = min(HELD_OUT, max(FEWEST_HELD_OUT, train // 5))
        sizes = {"train": train, "dev": held_out, "test": held_out}
        seconds = _seconds(speed, sizes, prompt_tokens, new_tokens, processes)
        return Plan(**sizes, seconds=seconds)

    most = next(n for n in range(TRAIN, 0, -1) if sum(plan(n).sizes.values()) <= prompts)
    if budget is None:
        return plan(most)
    fitting = [n for n in range(FEWEST_TRAIN, most + 1) if plan(n).total <= budget]
    if not fitting:
        least = plan(FEWEST_TRAIN).total
        raise InputError(
            f"the budget of {shown(budget)} is too short: the smallest fit takes about {shown(least)} here"
        )
    return plan(fitting[-1])


def _seconds(
    speed: Speed, sizes: dict[str, int], prompt_tokens: float, new_tokens: int, processes: int
) -> dict[str, float]:
    """Seconds by step. Upper bounds, as a response may end before its last token."""
    every = sum(sizes.values())
    answer = prompt_tokens * speed.prefill + new_tokens * (speed.batch / BATCH + speed.draft_prefill)
    alone = prompt_tokens * speed.prefill + new_tokens * speed.alone
    costs = (COST_PROMPTS + 1) * (len(DRAFT_LENGTHS) + 1) * (prompt_tokens * speed.prefill + COST_TOKENS * speed.alone)
    text = prompt_tokens + new_tokens
    return {
        "collect": every * answer / processes,
        "train": (sizes["train"] + sizes["dev"]) * text * speed.draft_in_full / processes,
        "profile and tune": costs + sizes["dev"] * new_tokens * ROLLED_OUT * speed.draft_prefill,
        "decode": sizes["test"] * alone * (1 + SHORTER * (TRIED - 1)),
        "report": sizes["test"] * new_tokens * ROLLED_OUT * speed.draft_prefill,
    }


def shown(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def position_bytes(pair: Pair, sampling: Sampling) -> int:
    """Bytes of a trace at each position."""
    if isinstance(pair.draft, Eagle3Drafter):  # and of its states, those of rollouts included
        return DEPTHS * (POSITION_BYTES + 2 * hidden_size(pair.draft) * pair.draft.dtype.itemsize)
    return POSITION_BYTES + (0 if sampling.greedy else DRAWS) * ALTERNATIVE_BYTES


def check_disk(folder: Path, plan: Plan, prompt_tokens: float, new_tokens: int, position: int) -> None:
    """Raises InputError when traces of this size do not fit on the folder's disk. position: bytes of each position."""
    needed = sum(plan.sizes.values()) * (new_tokens * position + prompt_tokens * PROMPT_BYTES)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(f"{folder}: the traces need about {readable_size(needed)}, but {readable_size(free)} are free")


@torch.no_grad()
def measured_speed(pair: Pair, tokens: int) -> Speed:
    """Times a few forwards of each model over the cache that decoding uses. tokens: of a whole text."""
    batch = min(BATCH, max(1, 8192 // tokens))  # the probe itself should be short
    target, draft = (_Probe(model, batch, tokens) for model in (pair.target, pair.draft))
    draft_prefill = draft.prefill()
    return Speed(
        prefill=target.prefill() + draft_prefill,
        draft_prefill=draft_prefill,
        draft_in_full=draft_prefill * (1 if pair.draft.dtype == torch.float32 else FULL),
        alone=target.step(1),
        batch=target.step(batch) * BATCH / batch,
        draft=draft.step(1),
    )


class _Probe:
    def __init__(self, model: PreTrainedModel, batch: int, tokens: int):
        check_served(model, "auto")
        self.device, self.batch = model.device, batch
        self.length = min(PREFILL, tokens - 1)
        self.cached = {rows: CachedModel(model, rows, tokens, attention="auto") for rows in {1, batch}}
        self.ids = torch.ones(batch, self.length + 1, dtype=torch.long, device=model.device)

    def prefill(self) -> float:
        """Seconds of a token."""
        return self._least(lambda: fill(self.cached[1], self.ids[:1, : self.length])) / self.length

    def step(self, rows: int) -> float:
        """Seconds of one token for each of so many rows."""
        starts = torch.full((rows,), self.length, device=self.device)
        ids, states = self.ids[:rows, :1], blank_states(self.cached[rows].model, rows, 1)
        return self._least(lambda: self.cached[rows].forward(ids, starts, self.length, states=states))

    def _least(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS + 1):  # the first allocates
            finish(self.device)
            begin = time.perf_counter()
            call()
            finish(self.device)
            times.append(time.perf_counter() - begin)
        return min(times[1:])
