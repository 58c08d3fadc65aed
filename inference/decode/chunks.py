"""Drafting in chunks: the host checks only once per chunk of tokens whether any row drafts on.

A check waits for the device, which then idles until the next launch. Without a check the draft may run on after all
rows have stopped. These wasted forwards are not counted as drafted, not verified and not learnt from. The cheaper
choice depends on the time of a draft forward, the time of a sync, and on where rounds end.
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

RECONSIDERED = 64  # rounds after which `auto` chooses anew and halves its counts
logger = logging.getLogger(__name__)


def asks(depth: int, most: int, chunk: int, peeks: bool = False) -> bool:
    """Whether the host checks after `depth` of at most `most` tokens. At the end it must learn where the draft ended,
    unless it checked one token before. peeks: rows can also stop between that check and the draw."""
    if depth == most:
        return peeks or (most - 1) % chunk != 0
    return depth % chunk == 0


def chunk_cost(chunk: int, ends: Sequence[float], t_draft: float, t_sync: float) -> float:
    """Expected seconds per round spent on checks and on wasted forwards. ends[n − 1]: probability that the last row
    stops after n tokens, for n up to the longest draft."""
    most, seconds = len(ends), 0.0
    for stop, probability in enumerate(ends, 1):
        asked = [depth for depth in range(1, most + 1) if asks(depth, most, chunk)]
        known = next((depth for depth in asked if depth >= stop), most)
        seconds += probability * ((known - stop) * t_draft + sum(depth <= known for depth in asked) * t_sync)
    return seconds


def best_chunk(ends: Sequence[float], t_draft: float, t_sync: float) -> int:
    """The chunk with the least cost; of equally good ones the smallest."""
    return min(range(1, len(ends) + 1), key=lambda chunk: chunk_cost(chunk, ends, t_draft, t_sync))


def check_chunk(chunk: object) -> None:
    """Raises InputError unless `chunk` is `auto` or a positive integer."""
    if chunk != "auto" and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise InputError(f"chunk is {chunk!r}, expected auto or a positive integer")


class Chunks:
    """Decides when the host checks whether a round ends, in one run of the decode loop."""

    def __init__(self, chunk: Chunk, drafting: Drafting, seconds: tuple[float, float] | None):
        """seconds: of a draft forward and of a sync, for `auto`; None: `auto` is 1. Raises InputError for an invalid
        chunk."""
        check_chunk(chunk)
        self.drafting, self.seconds, self.rounds = drafting, seconds, 0
        self.auto = chunk == "auto" and seconds is not None and drafting.stops_early and drafting.in_chunks
        self.size = 1 if chunk == "auto" else chunk
        # How many rounds ended after 1, 2, … tokens; starts with one round each.
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
        """Whether the round ends after `depth` tokens. A check is a sync; without one the answer is False before
        `most`. At the end of a round, slots that no row drew are dropped from `drafted`."""
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
        if drafting.looks_ahead:  # unless `depth` is the last, its token was fed before the check
            ran, needed = min(depth + 1, most), min(slots + 1, most)
        drafted.cut(slots, wasted=ran - needed)
        return self._ended(slots)

    def _ended(self, slots: int) -> bool:
        """Count a round that ended after so many tokens. Always True: the round is over."""
        if self.auto and slots:
            self.ends[slots - 1] += 1
            self.rounds += 1
            if self.rounds % RECONSIDERED == 0:
                self._choose()
                self.ends = [count / 2 for count in self.ends]
        return True


def needs_seconds(chunk: Chunk, drafting: Drafting, device: torch.device) -> bool:
    """Whether the choice of a chunk needs measured times of the device."""
    return chunk == "auto" and drafting.in_chunks and drafting.stops_early and works_ahead(device)


def works_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of the device. Only then does a check cost time."""
    return device.type == "cuda"


def measured_seconds(draft: CachedModel, batch: int, repeats: int = 8) -> tuple[float, float]:
    """Seconds of a draft forward that is queued before the previous one ends, and of a sync on an idle device."""
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
