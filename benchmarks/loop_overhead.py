"""Question: how far is the decode loop from the time of its forwards alone?

    overhead = wall ÷ Σ forwards at their floor,  Σ = N_draft·t_draft + Σ_rounds t_target(width of the round)

Wall clock of all rounds at batch 1 (the prefill is not a round); t are medians of bare forwards over the same cache, at
each width that occurs, measured between the prompts, so that a slow moment of the machine touches both. What
transformers itself needs for a step, over its own cache, stands beside it: our forwards are not slow ones.

python benchmarks/loop_overhead.py [--compile default|max-autotune] [--temperature 1] [--real]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import torch
from measured_pair import add_options, loaded
from record import write_result
from transformers import DynamicCache

from accept_head import Sampling
from accept_head.command.allocator import keep_freed_blocks
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.registry import make_policy
from accept_head.pair import Pair

POLICIES = ("none", "fixed:1", "fixed:2", "fixed:4", "fixed:8", "confidence:0.4,k_max=8")
NEW_TOKENS = 64


def main() -> None:
    keep_freed_blocks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", default="none", choices=("none", "default", "max-autotune"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    add_options(parser, prompts=24)
    options = parser.parse_args()
    pair, prompts = loaded(options)
    requests = make_requests([prompt.ids for prompt in prompts], NEW_TOKENS)
    sampling = Sampling(temperature=options.temperature)
    largest = make_policy("fixed:8", pair)
    decoder = make_decoder(
        pair.target, pair.draft, requests, largest, batch_size=1, greedy=sampling.greedy, compile=options.compile
    )
    rounds: dict[str, list[tuple[int, float]]] = defaultdict(list)  # policy → (tokens drafted, seconds)
    floors: dict[str, list[float]] = defaultdict(list)  # "draft", "target 3", … → seconds
    for index, request in enumerate([requests[0], *requests]):
        for spec in options.policies:
            timed = decode(decoder, pair, request, spec, sampling)
            if index:  # the first is a warm-up
                rounds[spec] += timed
        measure_floors(decoder, pair, request.prompt, floors if index else defaultdict(list))
    floor = {name: statistics.median(values) for name, values in floors.items()}
    rows = []
    for spec, timed in rounds.items():
        wall = sum(seconds for _, seconds in timed)
        drafts = sum(drafted for drafted, _ in timed)
        forwards = drafts * floor["draft"] + sum(floor[f"target {drafted + 1}"] for drafted, _ in timed)
        rows.append(
            {
                "policy": spec,
                "overhead": wall / forwards,
                "rounds": len(timed),
                "draft_forwards": drafts,
                "wall_seconds": wall,
                "forward_seconds": forwards,
            }
        )
        print(f"{spec:24} overhead {wall / forwards:.3f}  ({len(timed)} rounds, {drafts} draft forwards)")
    suffix = "" if options.compile == "none" else "_" + options.compile.replace("-", "_")
    suffix += ("" if sampling.greedy else "_sampled") + ("_real" if options.real else "")
    settings = {"compile": options.compile, "temperature": options.temperature, "prompts": len(prompts)}
    settings["dtype"] = str(pair.target.dtype).removeprefix("torch.")
    path = write_result(f"loop_overhead{suffix}", {**settings, "floor_seconds": floor, "policies": rows})
    print(f"wrote {path}")


def decode(decoder: Decoder, pair: Pair, request: object, spec: str, sampling: Sampling) -> list[tuple[int, float]]:
    """(tokens drafted, seconds) of each round but the first, which has the prefill in it."""
    clock, drafted = [], []

    def watch(round_: Round) -> None:
        drafted.append(len(round_.drafted.ids))
        clock.append(time.perf_counter())

    run = decoder.run(
        [request],
        policy=make_policy(spec, pair),
        processing=Processing(sampling, pair.vocab_size),
        stopping=Stopping([], [], pair.target.device),
        watch=watch,
    )
    for _ in run:
        pass
    return [(k, end - begin) for k, begin, end in zip(drafted[1:], clock, clock[1:], strict=False)]


@torch.no_grad()
def measure_floors(decoder: Decoder, pair: Pair, prompt: list[int], floors: dict[str, list[float]]) -> None:
    """Time bare forwards behind a prompt that is half answered, as in the middle of the runs above."""
    length = len(prompt) + NEW_TOKENS // 2
    ids = torch.tensor([(list(prompt) * NEW_TOKENS)[: length + 9]])
    for model in (decoder.target, decoder.draft):
        model.fill(ids, [0], [0], [length])
    starts = torch.tensor([length])
    for width in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        for _ in range(2):
            floors[f"target {width}"].append(
                seconds(lambda w=width: decoder.target.forward(ids[:, :w], starts, length))
            )
    for _ in range(10):
        floors["draft"].append(seconds(lambda: decoder.draft.forward(ids[:, :1], starts, length)))
    for name, model in (("transformers target 1", pair.target), ("transformers draft", pair.draft)):
        cache = DynamicCache(config=model.config)
        model(ids[:, :length], past_key_values=cache)
        floors[name].append(seconds(lambda m=model, c=cache: m(ids[:, :1], past_key_values=c)))


def seconds(call: object) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
