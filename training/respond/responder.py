"""What says the responses of a shard, and the form in which they come.

A responder gives them in batches of the config's `batch_size`, in the order of the prompts. It does not score them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from accept_head.prompts import Prompt
from accept_head.sampling import Sampling


class Batch(NamedTuple):
    """Prompts and their responses, as ids.

    logits: (ids, vocab) each, that the response was drawn from; None when they are not known. With them the target
    need not run again to score the responses.
    """

    prompts: Sequence[Prompt]
    responses: Sequence[list[int]]
    logits: Sequence[Tensor] | None = None


class Responder(Protocol):
    @property
    def drawn_with(self) -> Sampling:
        """The settings that the responses are sampled with."""

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        """The shard's prompts with their responses."""

    def close(self) -> None:
        """Free what answering needed."""


def in_batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def answered(prompts: Sequence[Prompt], responses: Sequence[list[int]], size: int) -> Iterator[Batch]:
    """A shard whose responses are all there, in batches."""
    for some, said in zip(in_batches(prompts, size), in_batches(responses, size), strict=True):
        yield Batch(some, said)


def until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """The row up to and with its first end token; all of it when it has none."""
    for position, token in enumerate(row):
        if token in ends:
            return row[: position + 1]
    return row
