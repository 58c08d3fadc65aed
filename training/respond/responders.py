"""Who says the responses of a shard: transformers, vLLM in this process, a server, or another trace folder.

All give them in batches of the config's `batch_size`, in the order of the prompts; scoring them is not their business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from accept_head.errors import InputError
from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.sampling import Sampling
from accept_head.trace.config import TraceConfig
from accept_head.training.respond.stored import StoredResponses
from accept_head.training.respond.transformers import Said, generation_halving, respond_with_logits

Backend = Literal["transformers", "vllm", "openai"]


class Batch(NamedTuple):
    """Prompts and their responses, as ids. logits: that each response was drawn from, (ids, vocab), where they are
    known: the target need not run again then to score them."""

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


# Options that belong to one backend; given with another they would be ignored, so they are refused.
OPTIONS: dict[str, Backend] = {
    "tensor_parallel_size": "vllm",
    "gpu_memory_utilization": "vllm",
    "endpoint": "openai",
    "served_name": "openai",
    "concurrency": "openai",
    "retries": "openai",
}


def check_backend(backend: Backend, given: dict[str, Any], *, dry_run: bool = False) -> None:
    """Refuse what cannot work, before anything is loaded. given: the options in OPTIONS, None where left out. dry_run:
    the engine need not be installed.

    Raises InputError naming the option.
    """
    for name, value in given.items():
        if value is not None and OPTIONS[name] != backend:
            raise InputError(f"--{name} is given, but it belongs to --backend {OPTIONS[name]}, not {backend}")
    if backend == "vllm":
        from accept_head.training.respond.vllm import MISSING, check_options, is_installed

        check_options(given["tensor_parallel_size"], given["gpu_memory_utilization"])
        if not dry_run and not is_installed():
            raise InputError(MISSING)
    if backend == "openai":
        from accept_head.training.respond.openai import check_endpoint

        check_endpoint(given["endpoint"], given["concurrency"], given["retries"])


def make_responder(
    backend: Backend,
    pair: Pair,
    prompts: Sequence[Prompt],
    config: TraceConfig,
    options: dict[str, Any],
    *,
    stored: StoredResponses | None = None,
    trust_remote_code: bool = False,
) -> Responder:
    """The one that these settings ask for; it starts nothing before its first shard. options: as in check_backend."""
    if stored is not None:
        return StoredResponder(stored, config)
    mine = {name: options[name] for name, owner in OPTIONS.items() if owner == backend and options[name] is not None}
    if backend == "vllm":
        from accept_head.training.respond.vllm import VllmResponder

        longest = max(len(prompt.ids) for prompt in prompts)
        return VllmResponder(pair, config, longest=longest, trust_remote_code=trust_remote_code, **mine)
    if backend == "openai":
        from accept_head.training.respond.openai import ServerResponder

        return ServerResponder(pair, config, **mine)
    return TransformersResponder(pair, config)


def in_batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def answered(prompts: Sequence[Prompt], responses: Sequence[list[int]], size: int) -> Iterator[Batch]:
    """A shard whose responses are all there, in batches."""
    for some, said in zip(in_batches(prompts, size), in_batches(responses, size), strict=True):
        yield Batch(some, said)


class TransformersResponder:
    """Generates each batch when it is asked for."""

    def __init__(self, pair: Pair, config: TraceConfig):
        self.pair, self.config, self.drawn_with = pair, config, config.sampling
        self.halving = generation_halving()

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        for batch in in_batches(prompts, self.config.batch_size):
            said = self.respond(batch)
            yield Batch(batch, [each.ids for each in said], [each.logits for each in said])

    def respond(self, batch: Sequence[Prompt]) -> list[Said]:
        # One seed a batch: mixed with the first prompt's index, so that no two batches share their random numbers.
        seed = (self.config.seed * 1_000_003 + batch[0].index) % (1 << 63)
        return respond_with_logits(
            self.pair.target,
            self.pair.tokenizer,
            [prompt.ids for prompt in batch],
            self.config.sampling,
            max_new_tokens=self.config.max_new_tokens,
            seed=seed,
            vocab_size=self.pair.vocab_size,
            halving=self.halving,
        )

    def close(self) -> None:
        pass


class StoredResponder:
    """Reads those of another trace folder (`collect --responses`)."""

    def __init__(self, stored: StoredResponses, config: TraceConfig):
        self.stored, self.size, self.drawn_with = stored, config.batch_size, stored.config.sampling

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        yield from answered(prompts, self.stored.responses(shard)[: len(prompts)], self.size)

    def close(self) -> None:
        pass
