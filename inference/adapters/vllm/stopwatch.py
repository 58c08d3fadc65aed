"""Seconds that a policy's own work takes, without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums what is timed. On a GPU that is device time, read where the events are known to have passed."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self) -> Iterator[None]:
        if self.on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self.events.append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds since it was last asked; those of a GPU up to the last event that has passed."""
        while self.events and self.events[0][1].query():
            begin, end = self.events.pop(0)
            self.seconds += begin.elapsed_time(end) / 1000
        seconds, self.seconds = self.seconds, 0.0
        return seconds
