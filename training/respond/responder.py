"""The interface of a responder, which gives the target's responses to the prompts of a shard.

Responses come in batches of the config's `batch_size`, in the order of the prompts. A responder does not score them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from accept_head.prompts import Prompt
from accept_head.sampling import Sampling


class Batch(NamedTuple):
    """Prompts and their responses, as ids."""

    prompts: Sequence[Prompt]
    responses: Sequence[list[int]]


class Responder(Protocol):
    @property
    def drawn_with(self) -> Sampling:
        """The settings that the responses are sampled with."""

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        """The shard's prompts with their responses."""

    def close(self) -> None:
        """Free the resources of the responder."""


def in_batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def answered(prompts: Sequence[Prompt], responses: Sequence[list[int]], size: int) -> Iterator[Batch]:
    """Split a shard's prompts and responses into batches."""
    for some, said in zip(in_batches(prompts, size), in_batches(responses, size), strict=True):
        yield Batch(some, said)


def until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """The row up to and including its first end token; the whole row when it has none."""
    for position, token in enumerate(row):
        if token in ends:
            return row[: position + 1]
    return row
