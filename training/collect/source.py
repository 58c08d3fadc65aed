"""Where the scored responses of a shard come from: our own decode loop, or an engine whose text is then scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig
from accept_head.training.collect.score import score, scoring_halving
from accept_head.training.respond.responder import Responder

Columns = dict[str, Any]  # of one response, see trace/columns.py; ROLLOUTS of depths.py


class Source(Protocol):
    def records(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Columns]]:
        """The shard's prompts, in any order, with the columns of their responses."""

    def close(self) -> None:
        """Free what the source holds."""


class ScoredResponses:
    """The responses of an engine, each scored by a pass of both models."""

    def __init__(self, pair: Pair, config: TraceConfig, responder: Responder):
        self.pair, self.config, self.responder = pair, config, responder
        self.halving = scoring_halving()

    def records(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Columns]]:
        for batch in self.responder.batches(shard, prompts):
            scored = score(
                self.pair,
                [prompt.ids for prompt in batch.prompts],
                batch.responses,
                self.config.sampling,
                seed=self.config.seed,
                indices=[prompt.index for prompt in batch.prompts],
                drawn_with=self.responder.drawn_with,
                alternatives=self.config.alternatives or 0,
                halving=self.halving,
            )
            yield from zip(batch.prompts, scored, strict=True)

    def close(self) -> None:
        self.responder.close()
