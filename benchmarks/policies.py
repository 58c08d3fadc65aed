"""Question: which policy decodes fastest, at which batch size, greedy and sampled?

All policies on one footing, on the embedded pair. Forward costs and a batch-size map are measured here (`profile`), and
every policy's parameters are chosen by replay on the dev prompts at T = 1 (`tune`). Then all of them decode the test
prompts side by side (`bench`): always with the target alone, six fixed lengths, and the best of these a second time,
which gives the noise floor. The head is the demo's: run `make demo` first.

python benchmarks/policies.py [--batches 1 8 32]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import embedded
from record import REPOSITORY, TINY, write_result

from accept_head.files import read_json
from accept_head.inference.verbs.bench import bench
from accept_head.inference.verbs.profile import profile
from accept_head.inference.verbs.tune import tune

NEW_TOKENS, DEV_PROMPTS = 32, 64
PROMPTS = {1: 48, 2: 64, 4: 64, 8: 96, 16: 128, 32: 200}  # by batch size: as many as keep the rows busy for a while
REFERENCES = ("none", "oracle", "fixed")
# As their authors have them, where tuning changes much; and what tuning at batch 1 says nothing of.
OTHERS = ["hf-heuristic", "hf-confidence", "max-prob-mean:0.6", "bandit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", choices=PROMPTS, default=list(PROMPTS))
    options = parser.parse_args()
    folder = REPOSITORY / "runs" / "policies"
    folder.mkdir(parents=True, exist_ok=True)
    specs = tuned_specs(folder)
    results = [measured(folder, batch, specs) for batch in options.batches]
    result = {
        "new_tokens": NEW_TOKENS,
        "prompts": {batch: PROMPTS[batch] for batch in options.batches},
        "costs": read_json(folder / "costs.json"),
        "map": read_json(folder / "map.json"),
        "tuned": read_json(folder / "tuned.json")["policies"],
        "settings": {name: results[0]["settings"][name] for name in ("repeats", "top_k", "seed", "verifier")},
        "cells": [without_chunks(cell) for one in results for cell in one["cells"]],
    }
    portable = json.loads(json.dumps(result).replace(f"{REPOSITORY}/", ""))
    print(f"wrote {write_result('policies', portable)}")


def tuned_specs(folder: Path) -> list[str]:
    """What is there is not made again."""
    pair = {"target": str(TINY / "target"), "draft": str(TINY / "draft")}
    dev = str(TINY / "prompts" / "dev.jsonl")
    if not (folder / "map.json").is_file():
        profile(
            **pair,
            prompts=dev,
            out=str(folder / "costs.json"),
            temperature=1.0,
            max_prompts=DEV_PROMPTS,
            batch_map=str(folder / "map.json"),
            batch_sizes=[1, 4, 16, 32],
            draft_lengths=[0, 1, 2, 4, 8],
        )
    if not (folder / "tuned.json").is_file():
        shutil.copytree(REPOSITORY / "runs" / "demo" / "head", folder / "head", dirs_exist_ok=True)
        tune(
            traces=str(embedded.traces("dev")),
            draft=pair["draft"],
            head=[str(folder / "head")],
            costs=str(folder / "costs.json"),
            out=str(folder / "tuned.json"),
            max_prompts=DEV_PROMPTS,
        )
    rows = read_json(folder / "tuned.json")["policies"]
    tuned = [row["spec"] for row in rows if row["name"].partition(":")[0] not in REFERENCES]
    return [*dict.fromkeys([*tuned, *OTHERS, f"batch-map:{folder / 'map.json'}"])]


def measured(folder: Path, batch: int, specs: list[str]) -> dict[str, Any]:
    out = folder / f"batch{batch}.json"
    bench(
        target=str(TINY / "target"),
        draft=str(TINY / "draft"),
        prompts=str(TINY / "prompts" / "test.jsonl"),
        out=str(out),
        policy=specs,
        batch_size=[batch],
        temperature=[1.0, 0.0],
        max_prompts=PROMPTS[batch],
        max_new_tokens=NEW_TOKENS,
        repeats=1,
        costs=str(folder / "costs.json"),
        slo=True,
    )
    return read_json(out)


def without_chunks(cell: dict[str, Any]) -> dict[str, Any]:
    """The figures, without the seconds of every run."""
    policies = [{name: value for name, value in row.items() if name != "chunks"} for row in cell["policies"]]
    return {**{name: value for name, value in cell.items() if name != "order"}, "policies": policies}


if __name__ == "__main__":
    main()
