"""Drafting in chunks: the host asks only once every so many tokens whether any row goes on.

To ask is to wait for the device, which then has nothing to do until the next launch. Not to ask is to draft on where no
row wanted to: forwards in vain, that nobody counts as drafted, verifies or learns from. What is cheaper depends on the
time of a draft forward, on that of a sync, and on where rounds end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import median
from typing import Literal

import torch

from accept_head.errors import InputError
from accept_head.inference.decode.drafted import Drafted
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.policies.drafting import Drafting, DraftProgress

Chunk = int | Literal["auto"]

RECONSIDERED = 64  # rounds after which `auto` chooses anew, and what it has seen counts half
logger = logging.getLogger(__name__)


def asks(depth: int, most: int, chunk: int, peeks: bool = False) -> bool:
    """Whether the host asks after `depth` of at most `most` tokens. At the end it has to know how many rows drew the
    last ones, if it did not ask just before. peeks: rows can also stop between that and the draw."""
    if depth == most:
        return peeks or (most - 1) % chunk != 0
    return depth % chunk == 0


def chunk_cost(chunk: int, ends: Sequence[float], t_draft: float, t_sync: float) -> float:
    """Expected seconds a round of asking and of forwards in vain. ends[n − 1]: how likely it is that the last row stops
    after n tokens, for n up to the most that may be drafted."""
    most, seconds = len(ends), 0.0
    for stop, probability in enumerate(ends, 1):
        asked = [depth for depth in range(1, most + 1) if asks(depth, most, chunk)]
        known = next((depth for depth in asked if depth >= stop), most)
        seconds += probability * ((known - stop) * t_draft + sum(depth <= known for depth in asked) * t_sync)
    return seconds


def best_chunk(ends: Sequence[float], t_draft: float, t_sync: float) -> int:
    """The chunk of least cost; of equally good ones the smallest."""
    return min(range(1, len(ends) + 1), key=lambda chunk: chunk_cost(chunk, ends, t_draft, t_sync))


def check_chunk(chunk: object) -> None:
    """Raises InputError for what is none."""
    if chunk != "auto" and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise InputError(f"chunk is {chunk!r}, expected auto or a positive integer")


class Chunks:
    """When the host asks, in one run of the decode loop."""

    def __init__(self, chunk: Chunk, drafting: Drafting, seconds: tuple[float, float] | None):
        """seconds: of a draft forward and of a sync, for `auto`; None: `auto` is 1. Raises InputError for a chunk that
        is none."""
        check_chunk(chunk)
        self.drafting, self.seconds, self.rounds = drafting, seconds, 0
        self.auto = chunk == "auto" and seconds is not None and drafting.stops_early and drafting.in_chunks
        self.size = 1 if chunk == "auto" else chunk
        # How often rounds ended after 1, 2, … tokens; at first as if they had ended anywhere.
        self.ends = [1.0] * drafting.max_draft_tokens
        if self.auto:
            self._choose()
        elif self.size > 1 and drafting.stops_early and not drafting.in_chunks:
            name = type(drafting.policy).__name__
            logger.warning("accept-head: policy %s decides with the host after each token: chunk is 1", name)
            self.size = 1

    def _choose(self) -> None:
        assert self.seconds is not None
        total = sum(self.ends)
        self.size = best_chunk([count / total for count in self.ends], *self.seconds) if self.ends else 1

    def over(self, drafted: Drafted, progress: DraftProgress, depth: int, most: int) -> bool:
        """Whether the round ends after `depth` tokens, as far as the host wants to know now: a sync. If it does, what
        no row drew is dropped from `drafted`."""
        drafting = self.drafting
        if not drafting.stops_early or not asks(depth, most, self.size, drafting.peeks):
            return depth == most and self._ended(most)
        if self.size == 1 and not drafting.peeks:
            return not bool(progress.active.any()) and self._ended(depth)
        forwards = progress.lengths + progress.extra_forwards
        numbers = progress.active.any().long(), progress.lengths.max(), forwards.max()
        some, slots, needed = torch.stack(numbers).tolist()
        if some and depth < most:
            return False
        ran = depth
        if drafting.looks_ahead:  # the state at the last token is had before the host asks, if the round may go on
            ran, needed = min(depth + 1, most), min(slots + 1, most)
        drafted.cut(slots, wasted=ran - needed)
        return self._ended(slots)

    def _ended(self, slots: int) -> bool:
        """So many tokens were drafted. Says that the round is over."""
        if self.auto and slots:
            self.ends[slots - 1] += 1
            self.rounds += 1
            if self.rounds % RECONSIDERED == 0:
                self._choose()
                self.ends = [count / 2 for count in self.ends]
        return True


def needs_seconds(chunk: Chunk, drafting: Drafting, device: torch.device) -> bool:
    """Whether it depends on the device's own times when the host asks."""
    return chunk == "auto" and drafting.in_chunks and drafting.stops_early and works_ahead(device)


def works_ahead(device: torch.device) -> bool:
    """Whether the host goes on while the device works: only then does it cost time to ask."""
    return device.type == "cuda"


def measured_seconds(draft: CachedModel, batch: int, repeats: int = 8) -> tuple[float, float]:
    """Seconds of a draft forward that the device has at hand when the one before is done, and of a sync: from the
    question to the answer, with nothing else to do."""
    device = draft.model.device
    ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
    starts, flags = ids[:, 0].clone(), ids[:, 0] > 0
    forwards, syncs = [], []
    for attempt in range(repeats + 2):
        _finish(device)
        begin = time.perf_counter()
        bool(flags.any())
        asked = time.perf_counter()
        for _ in range(4):
            draft.forward(ids, starts, 0)
        _finish(device)
        if attempt > 1:
            syncs.append(asked - begin)
            forwards.append((time.perf_counter() - asked) / 4)
    return median(forwards), median(syncs)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
