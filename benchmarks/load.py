"""Question: with several requests at once, does the head keep up with whatever is best there, without measured costs?

Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, on unseen prompts, in our loop. Arms: no speculation, fixed K, one of
them twice (the noise floor), and the shipped head and vLLM's estimator with `costs=auto`, which learn what a forward
costs from the rounds they serve. All are held against the best of no speculation and the fixed K in that very cell,
which nobody knows beforehand.

Every arm runs in turn on each part of the prompts, in random order, for ROUNDS rounds in which all rows have a request.
Speed is tokens per second of these rounds. Rounds in which a request arrived are left out, as the clock would count its
prompt, and so is the end of a part: rows that stand idle there are no matter of drafting.

python benchmarks/load.py --batches 4 16           # 5 and 10 minutes a part on 2 cores; goes on where it was
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from real_decoded import DRAFT, NAMES, REPOSITORY, SHIPPED, TARGET, prompts_file
from record import RESULTS, write_result

from accept_head import Sampling, load_pair
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.inference.bench.figures import TWIN
from accept_head.inference.bench.measure import Stage
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.round import Round
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import DraftPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.pair import Pair
from accept_head.prompts import load_prompts

NEW_TOKENS, ROUNDS, K_MAX = 96, 50, 8
LENGTHS, TWICE, HEAD = (1, 2, 3, 4), "fixed:2", "head, costs=auto"


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--parts", type=int, default=4)
    options = parser.parse_args()
    pair = load_pair(TARGET, DRAFT, dtype="bfloat16")
    for batch in options.batches:
        for temperature in options.temperatures:
            cell = measured(pair, batch, temperature, options.parts)
            path = RESULTS / "load.json"
            others = read_json(path)["cells"] if path.is_file() else []
            others = [each for each in others if (each["batch"], each["temperature"]) != (batch, temperature)]
            write_result("load", {"rounds": ROUNDS, "cells": [*others, cell]})
            print(json.dumps(cell, indent=1), flush=True)


def specs_of(temperature: float) -> dict[str, str]:
    """Arm → SPEC."""
    head = (SHIPPED / NAMES[temperature]).relative_to(REPOSITORY)
    return {
        "none": "none",
        **{f"fixed:{k}": f"fixed:{k}" for k in LENGTHS},
        TWICE + TWIN: TWICE,
        HEAD: f"head:{head}:1,k_max={K_MAX},costs=auto",
        "vLLM's estimator, costs=auto": f"online-logistic:0,k_max={K_MAX},costs=auto",
    }


def measured(pair: Pair, batch: int, temperature: float, parts: int) -> dict[str, Any]:
    """A cell of the result: all arms on all parts."""
    specs, sampling = specs_of(temperature), Sampling(temperature=temperature, top_k=0)
    policies = {name: make_policy(spec, pair) for name, spec in specs.items()}
    prompts = [list(prompt.ids) for prompt in load_prompts(str(prompts_file("test")), pair.tokenizer)]
    order = np.random.default_rng(0).permutation(len(prompts))
    path = REPOSITORY / "runs" / "load" / f"b{batch}_t{temperature:g}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    for part in range(parts):
        texts = [prompts[index] for index in np.roll(order, -3 * batch * part)]
        for index in np.random.default_rng(part).permutation(len(specs)):
            name = list(specs)[index]
            if not any(each[:2] == [part, name] for each in kept):
                rounds = rounds_of(pair, policies[name], batch, texts, ROUNDS, sampling)
                kept.append([part, name, *rounds.sum(0).tolist()])
                with path.open("a") as file:
                    file.write(json.dumps(kept[-1]) + "\n")
    return {"batch": batch, "temperature": temperature, "parts": parts, **figures(kept, list(specs), parts)}


def rounds_of(
    pair: Pair, policy: DraftPolicy, rows: int, texts: Sequence[list[int]], count: int, sampling: Sampling
) -> np.ndarray:
    """(count, 4): tokens, seconds, drafted and accepted tokens of rounds in which all rows have a request and none has
    just arrived."""
    requests = make_requests([texts[place % len(texts)] for place in range(40 * rows)], NEW_TOKENS)
    decoder = make_decoder(pair.target, pair.draft, requests, policy, batch_size=rows, greedy=sampling.greedy)
    seen: list[tuple[float, ...]] = []
    last, there = time.perf_counter(), [-1] * rows

    def watch(round_: Round) -> None:
        nonlocal last, there
        now, before, outcome = time.perf_counter(), there, round_.outcome
        there = [-1 if request is None else request.index for request in round_.rows.requests]
        if there == before:
            accepted, drafted = float(outcome.accepted.sum()), float(outcome.drafted.sum())
            seen.append((accepted + rows, now - last, drafted, accepted))
        last = now

        if len(seen) == count:
            raise Enough

    with suppress(Enough):
        for _ in Stage(decoder, pair, sampling).run(requests, policy, 0, watch):
            pass
    decoder.free()
    return np.array(seen)


class Enough(Exception):
    """All rounds that were wanted have been seen."""


def figures(kept: Sequence[Sequence[Any]], names: Sequence[str], parts: int) -> dict[str, Any]:
    """Of each arm: tokens per second, and its gain over the best of no speculation and the fixed K, with an interval
    over the parts, which are drawn jointly for all arms."""
    sums = np.array([[next(each[2:] for each in kept if each[:2] == [part, name]) for part in range(parts)]
                     for name in names])  # (arm, part, 4)  # fmt: skip
    drawn = np.einsum("rp,apf->arf", draws(parts), sums)
    speeds, of_draws = (each[..., 0] / each[..., 1] for each in (sums.sum(1), drawn))
    fixed = [place for place, name in enumerate(names) if name == "none" or name in map("fixed:{}".format, LENGTHS)]
    best = max(fixed, key=lambda place: speeds[place])
    twin, twice = speeds[names.index(TWICE + TWIN)], speeds[names.index(TWICE)]
    table = [
        {
            "name": name,
            "tokens_per_second": float(speeds[place]),
            "over_none": float(speeds[place] / speeds[0] - 1),
            "over_best": float(speeds[place] / speeds[best] - 1),
            "over_best_ci95": interval(of_draws[place] / of_draws[best] - 1),
            "seconds_a_round": float(sums[place, :, 1].sum() / (parts * ROUNDS)),
            "drafted_a_round": float(sums[place, :, 2].sum() / (parts * ROUNDS)),
            "accepted_per_drafted": float(sums[place, :, 3].sum() / max(sums[place, :, 2].sum(), 1)),
        }
        for place, name in enumerate(names)
    ]
    return {"best": names[best], "floor": abs(float(twin / twice) - 1), "figures": table}


if __name__ == "__main__":
    main()
