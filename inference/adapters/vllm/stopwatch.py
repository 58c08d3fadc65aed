"""Measures the seconds of a policy's own work, without making the host wait for the device."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Sums timed intervals. On a GPU these are device times, read once the events have passed. on: False = measure
    nothing, for an owner that never calls `take`; events would pile up."""

    def __init__(self, device: torch.device, *, on: bool = True):
        self.on, self.on_gpu = on, device.type == "cuda"
        self.seconds = self.began = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timing(self) -> Stopwatch:
        """For `with stopwatch.timing(): ...`, which must not be nested."""
        return self

    def __enter__(self) -> None:
        if not self.on:
            return
        if self.on_gpu:
            self.begin = torch.cuda.Event(enable_timing=True)
            self.begin.record()
        else:
            self.began = time.perf_counter()

    def __exit__(self, failed: type[BaseException] | None, *details: object) -> None:
        if not self.on:
            return
        if not self.on_gpu:
            self.seconds += time.perf_counter() - self.began
        elif failed is None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.events.append((self.begin, end))

    def take(self) -> float:
        """Seconds measured since the last call; on a GPU, up to the last event that has passed."""
        while self.events and self.events[0][1].query():
            begin, end = self.events.pop(0)
            self.seconds += begin.elapsed_time(end) / 1000
        seconds, self.seconds = self.seconds, 0.0
        return seconds
