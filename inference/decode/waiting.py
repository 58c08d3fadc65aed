"""Requests that wait for a row: known from the start, or arriving while others are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from accept_head.inference.decode.rows import Request


class Waiting:
    """An iterator of requests; None in it means that the next one has not arrived yet. done: True once the iterator is
    known to be exhausted."""

    def __init__(self, requests: Iterable[Request | None]):
        self.requests, self.done = iter(requests), False
        self.left = len(requests) if isinstance(requests, Sized) else None

    def take(self, most: int) -> list[Request]:
        """Up to `most` requests that have arrived."""
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
