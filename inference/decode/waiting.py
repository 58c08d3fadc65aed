"""Requests that wait for a row: all there from the start, or arriving while others are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from accept_head.inference.decode.rows import Request


class Waiting:
    """An iterator of requests, in which None says that the next one has not arrived yet. done: no more will come, as
    far as can be known."""

    def __init__(self, requests: Iterable[Request | None]):
        self.requests, self.done = iter(requests), False
        self.left = len(requests) if isinstance(requests, Sized) else None

    def take(self, most: int) -> list[Request]:
        """Up to so many requests, as far as they are there."""
        taken: list[Request] = []
        while len(taken) < most and not self.done:
            try:
                request = next(self.requests)
            except StopIteration:
                self.done = True
                break
            if request is None:
                break
            taken.append(request)
        if self.left is not None:
            self.left -= len(taken)
            self.done = self.left <= 0
        return taken
