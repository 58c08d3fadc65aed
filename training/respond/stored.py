"""Responses from another trace folder, to be scored under other sampling settings.

Greedy text is scarce: a prompt has one response, whatever the seed. A head for greedy decoding can also learn from
sampled text, because its labels say what greedy decoding would do after any prefix.
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
    """The responses of a finished folder of ordinary traces. One shard at a time is in memory."""

    folder: Path
    config: TraceConfig

    @classmethod
    def of(cls, folder: Path, target_fingerprint: str, draft_fingerprint: str) -> StoredResponses:
        """Open a folder. Raises InputError naming it when it is unfinished, of another pair, or itself scored text."""
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
        """The value of a setting that the responses were made with. Raises InputError when another value is given."""
        made_with: int = getattr(self.config, name)
        if given not in (None, made_with):
            raise InputError(
                f"{name} is {given}, but --responses {self.folder} was made with {made_with}; leave it out"
            )
        return made_with

    def prompts(self, max_prompts: int | None = None) -> list[Prompt]:
        """The first `max_prompts` prompts. All their shards are read, so damage is found before any work is done."""
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
        """The responses of one shard, as ids."""
        return list(read_shard(self.folder, self.config, shard)["response_ids"])


class StoredResponder:
    """Reads the responses of another trace folder (`collect --responses`)."""

    def __init__(self, stored: StoredResponses, config: TraceConfig):
        self.stored, self.size, self.drawn_with = stored, config.batch_size, stored.config.sampling

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        yield from answered(prompts, self.stored.responses(shard)[: len(prompts)], self.size)

    def close(self) -> None:
        pass
