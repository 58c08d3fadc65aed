"""Question: with several requests at once, does the head keep up with whatever is best there, without measured costs?

Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, on unseen prompts, in our loop and in vLLM. Arms: no speculation, every
fixed K up to 6, one of them twice (the noise floor), the shipped head with its own threshold, and the head and vLLM's
estimator with `costs=auto`, which learn what a forward costs from the rounds they serve. What all are held against is
the best of no speculation and the fixed K in that very cell, which nobody knows beforehand. Every arm runs in turn on
each chunk of prompts, in random order; rows are refilled as in serving.

python benchmarks/load.py --host loop --batches 4 16           # 10 minutes a cell on 2 cores; goes on where it was
.venv-vllm/bin/python benchmarks/load.py --host vllm --batches 4 16
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from real_decoded import DRAFT, NAMES, REPOSITORY, SHIPPED, TARGET, InLoop, InVllm, chosen, requests_of
from record import RESULTS, write_result

from accept_head import Sampling
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.inference.bench.figures import TWIN, Cell, noise_floor, rows
from accept_head.inference.bench.kept import kept_runs
from accept_head.inference.bench.measure import make_chunks

PROMPTS, NEW_TOKENS = 64, 32
LENGTHS, TWICE = (1, 2, 3, 4, 6), "fixed:2"
K_MAX = 8
KEY = ("host", "batch", "temperature")


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=("loop", "vllm"), required=True)
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.0])
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    options = parser.parse_args()
    host = (InLoop if options.host == "loop" else InVllm)(TARGET, DRAFT, max(options.batches), "bfloat16")
    for batch in options.batches:
        for temperature in options.temperatures:
            cell = measured(host, options.host, options.prompts, batch, temperature)
            path = RESULTS / "load.json"
            others = read_json(path)["cells"] if path.is_file() else []
            others = [each for each in others if any(each[name] != cell[name] for name in KEY)]
            command = f"python benchmarks/load.py --host {options.host} --batches {batch}"
            write_result("load", {"new_tokens": NEW_TOKENS, "cells": [*others, cell]}, command=command)
            print(json.dumps(cell, indent=1), flush=True)


def arms_of(temperature: float) -> dict[str, str]:
    """Name → SPEC."""
    head = (SHIPPED / NAMES[temperature]).relative_to(REPOSITORY)
    fixed = {f"fixed:{k}": f"fixed:{k}" for k in LENGTHS}
    return {
        "none": "none",
        **fixed,
        TWICE + TWIN: TWICE,
        "head": f"head:{head},k_max={K_MAX}",
        "head, costs=auto": f"head:{head}:1,k_max={K_MAX},costs=auto",
        "vLLM's estimator, costs=auto": f"online-logistic:0,k_max={K_MAX},costs=auto",
    }


def measured(host: InLoop | InVllm, name: str, prompts: int, batch: int, temperature: float) -> dict[str, Any]:
    """A cell of the result: all arms on all prompts."""
    arms, requests = arms_of(temperature), requests_of(host, chosen(prompts))
    chunks = make_chunks(requests, [None] * len(requests), batch=batch)
    path = REPOSITORY / "runs" / "load" / f"{name}_b{batch}_t{temperature:g}_{len(requests)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    run = host.runner(arms, batch, Sampling(temperature=temperature, top_k=0))
    runs = list(kept_runs(run, list(arms), chunks, path))
    cell = Cell(runs, chunks, list(arms), ["none", *(f"fixed:{k}" for k in LENGTHS)], TWICE)
    shown = ("name", "throughput", "speedup", "gain_over_best_fixed", "ci95", "block_efficiency", "counts")
    table = rows(cell, same_tokens=temperature == 0)
    return {
        "host": name,
        "batch": batch,
        "temperature": temperature,
        "prompts": len(requests),
        "best": cell.best_static(),
        "noise": noise_floor(cell),
        "cpu_share": cell.cpu_share,
        "figures": [{key: row[key] for key in (*shown, "differs_from_none")} for row in table],
    }


if __name__ == "__main__":
    main()
