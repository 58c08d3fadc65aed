"""Responses that are there already: those of another trace folder, to be scored under other sampling settings.

Greedy text is scarce: one response a prompt, whatever the seed. A head for greedy decoding learns from sampled text as
well, because its labels say what greedy decoding would do after any prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accept_head.errors import InputError
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig, check_made_by
from accept_head.trace.shards import finished_config, read_shard
from accept_head.training.respond.responder import Batch, answered


@dataclass(frozen=True)
class StoredResponses:
    """A finished folder of ordinary traces, of which one shard at a time is in memory."""

    folder: Path
    config: TraceConfig

    @classmethod
    def of(cls, folder: Path, target_fingerprint: str, draft_fingerprint: str) -> StoredResponses:
        """Raises InputError naming the folder when it is not finished, of another pair, or holds scored text itself."""
        config = finished_config(folder)
        check_made_by(config, folder, draft_fingerprint=draft_fingerprint)
        if config.target_fingerprint != target_fingerprint:
            raise InputError(
                f"--responses {folder}: made by another pair (its target was {config.target}); --target must be that "
                "target"
            )
        if config.responses is not None:
            raise InputError(
                f"--responses {folder}: was made with --responses itself; give the folder that its responses came from"
            )
        return cls(folder, config)

    def setting(self, name: str, given: int | None) -> int:
        """A setting that these responses have already. Raises InputError when another value is given for it."""
        made_with: int = getattr(self.config, name)
        if given not in (None, made_with):
            raise InputError(
                f"{name} is {given}, but --responses {self.folder} was made with {made_with}; leave it out"
            )
        return made_with

    def prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        """The first so many. All of their shards are read, so that damage is found before any work is done."""
        if max_prompts is not None and max_prompts < 1:
            raise InputError(f"max_prompts is {max_prompts}, expected a positive integer")
        count = min(max_prompts or self.config.num_prompts, self.config.num_prompts)
        found: list[Prompt] = []
        for shard in range(-(-count // self.config.shard_size)):
            columns = read_shard(self.folder, self.config, shard).select_columns(
                ["index", "id", "domain", "prompt_ids"]
            )
            found += [
                Prompt(record["index"], record["id"], record["domain"], tuple(record["prompt_ids"]))
                for record in columns
            ]
        return found[:count]

    def responses(self, shard: int) -> list[list[int]]:
        """Those of one shard, as ids."""
        return list(read_shard(self.folder, self.config, shard)["response_ids"])


class StoredResponder:
    """Reads those of another trace folder (`collect --responses`)."""

    def __init__(self, stored: StoredResponses, config: TraceConfig):
        self.stored, self.size, self.drawn_with = stored, config.batch_size, stored.config.sampling

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        yield from answered(prompts, self.stored.responses(shard)[: len(prompts)], self.size)

    def close(self) -> None:
        pass
