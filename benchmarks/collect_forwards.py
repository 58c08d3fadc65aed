"""Question: how much longer does `collect` take than the forwards that it cannot avoid, and how much memory?

Those are the target's over the prompts and for each token, and the draft's once over each response. They are recorded
while the traces are made, and then run again by themselves, on the same inputs and in the same process, before and
after a second collecting: the ratio of the two bare runs is the noise floor. Memory is the process's peak over the
weights of both models.

python benchmarks/collect_forwards.py [--prompts 36] [--temperature 1]    # a pair in runs/models/qwen
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from real_pair import DRAFT, TARGET, prompts_file
from record import write_result

from accept_head import Sampling, load_pair
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.memory import weight_bytes
from accept_head.prompts import Prompt, load_prompts
from accept_head.training.collect.decoding import Decoding
from accept_head.training.collect.settings import trace_config

FORWARDS, MOVES = ("forward", "fill", "read"), ("select", "restore")  # moves are made again, and not timed


class Recorded:
    """The calls of cached models, in order, with copies of their inputs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __enter__(self) -> Recorded:
        self.patches = [patch.object(CachedModel, name, self._watched(name)) for name in (*FORWARDS, *MOVES)]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()

    def _watched(self, name: str) -> Callable[..., Any]:
        method = getattr(CachedModel, name)

        def call(model: CachedModel, *given: Any, **options: Any) -> Any:
            kept = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in given)
            self.calls.append((name, method, (model, *kept), options))
            return method(model, *given, **options)

        return call

    @torch.no_grad()
    def seconds(self) -> dict[str, float]:
        """Run all forwards again → the seconds of each kind."""
        spent = dict[str, float]()
        for name, method, given, options in self.calls:
            begin = time.perf_counter()
            method(*given, **options)
            kind = f"{'draft' if given[0]._call.hidden is not None else 'target'} {name}"
            if name in FORWARDS:
                spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - begin
        return spent


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=36, help="all in one batch")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    options = parser.parse_args()
    pair = load_pair(TARGET, DRAFT, dtype="bfloat16")
    prompts = load_prompts(str(prompts_file("test")), pair.tokenizer, max_prompts=None)
    prompts = prompts[:: len(prompts) // options.prompts][: options.prompts]  # a part of them is sorted by length
    config = trace_config(
        pair, (TARGET, DRAFT), prompts,
        sampling=Sampling(temperature=options.temperature, top_k=options.top_k),
        max_new_tokens=options.max_new_tokens, seed=0, batch_size=len(prompts), shard_size=len(prompts),
        alternatives=4 if options.temperature else 0, depths=None, backend="loop", source=str(prompts_file("test")),
        stored=None,
    )  # fmt: skip
    decoding = Decoding(pair, prompts, config)
    with Recorded() as recorded:
        tokens, _ = collected(decoding, prompts)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = recorded.seconds()
    _, wall = collected(decoding, prompts)
    after = recorded.seconds()
    forwards = (sum(before.values()) + sum(after.values())) / 2
    result = {
        **vars(options),
        "tokens": tokens,
        "wall_seconds": wall,
        "forward_seconds": forwards,
        "ratio": wall / forwards,
        "noise_floor": sum(after.values()) / sum(before.values()),
        "tokens_per_second": tokens / wall,
        "seconds_by_kind": before,
        "peak_bytes": peak,
        "weight_bytes": weight_bytes([pair.target, pair.draft]),
        "peak_over_weights": peak - weight_bytes([pair.target, pair.draft]),
    }
    print(result)
    path = write_result(f"collect_forwards{'' if options.temperature else '_greedy'}", result)
    print(f"wrote {path}")


def collected(decoding: Decoding, prompts: list[Prompt]) -> tuple[int, float]:
    """(tokens of all responses, seconds)."""
    begin = time.perf_counter()
    tokens = sum(len(columns["response_ids"]) for _, columns in decoding.records(0, prompts))
    return tokens, time.perf_counter() - begin


if __name__ == "__main__":
    main()
