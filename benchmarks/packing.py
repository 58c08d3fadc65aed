"""Question: which way of feeding traces to the draft makes the better head: token mixing, exact packing, the prefix?

Token mixing (the paper, r = 0.15; here also 0.5) and exact packing train heads that read the state at the drawn token.
Prefix packing trains heads that read the state before it, and so decide one draft forward earlier. On the embedded pair
without top-k, 800 responses to the train prompts: sampled ones at T = 1; greedily, half of them are sampled text with
greedy labels. Exact packing feeds the draft more tokens a trace ([x, X, Y] instead of [x, Z]), so it is also trained
for as many epochs as make equal draft tokens. Every head is trained twice, with seeds 0 and 1: how far the two are
apart is the noise of training. Thresholds and bounds are chosen on the dev prompts and judged on the test prompts, as
in ladder.py; binary KL is that of the dev prompts, where every head is given exact states.

python benchmarks/packing.py [--temperatures 1 0] [--seeds 0 1]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from ladder import (
    COSTS,
    DRAFT,
    TEXT,
    collected,
    coupled,
    head_settings,
    judged,
    loaded,
    part_of,
    scored,
    train_folders,
)
from record import REPOSITORY, RESULTS, write_result

from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.trace.shards import read_traces
from accept_head.training.learn.verb import train

EPOCHS = 3
SAME = {"depth": 2, "batch_size": 4, "micro_batch_size": 4, "alternatives": 0}
PACKINGS: dict[str, dict[str, Any]] = {
    "mixing, r 0.15": {"packing": "mixing", "r": 0.15},
    "mixing, r 0.5": {"packing": "mixing", "r": 0.5},
    "exact": {"packing": "exact"},
    "exact, equal compute": {"packing": "exact"},
    "prefix": {"packing": "prefix"},
}
INPUTS = {
    "state": {"signals": False, "embedding": False},
    "state + signals": {"signals": True, "embedding": False},
    "state + signals + embedding": {"signals": True, "embedding": True},
}
LEFT_OUT = {  # for time; and greedily the state alone
    ("mixing, r 0.5", "state"),
    ("mixing, r 0.5", "state + signals + embedding"),
    ("exact, equal compute", "state + signals + embedding"),
}
REFERENCES = tuple(f"{packing}; {inputs}" for packing in ("mixing, r 0.15", "exact") for inputs in INPUTS)


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", nargs="+", type=float, choices=(1.0, 0.0), default=[1.0, 0.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    options = parser.parse_args()
    path = RESULTS / "packing.json"
    rows = read_json(path)["rows"] if path.is_file() else []  # parts that are not run again stay
    for temperature in options.temperatures:
        for seed in options.seeds:
            made = heads(temperature, seed)
            rows = [row for row in rows if (row["temperature"], row["seed"]) != (temperature, seed)]
            rows += [{"temperature": temperature, "seed": seed, **row} for row in compared(temperature, made)]
            settings = {"epochs": EPOCHS, **SAME, "costs": COSTS, "text": TEXT}
            write_result("packing", {"settings": settings, "rows": rows}, command="python benchmarks/packing.py")
    print(f"wrote {path}")


def heads(temperature: float, seed: int) -> dict[str, dict[str, Any]]:
    """By name: its folder, what it was trained with, how many draft tokens that is without a cache, and dev quality."""
    folders = text(temperature)
    made = {}
    for inputs, reads in INPUTS.items():
        for packing, settings in PACKINGS.items():
            if (packing, inputs) in LEFT_OUT or (not temperature and inputs == "state"):
                continue
            fed, epochs = tokens(folders, settings["packing"]), EPOCHS
            if "equal compute" in packing:
                epochs = round(EPOCHS * tokens(folders, "mixing") / fed)
            name = f"{packing}; {inputs}"
            out = (
                REPOSITORY / "runs" / "packing" / f"t{temperature:g}_s{seed}" / "_".join(name.replace(";", "").split())
            )
            took = trained(folders, temperature, out, {**SAME, **settings, **reads, "epochs": epochs, "seed": seed})
            made[name] = {
                "folder": out,
                "packing": packing,
                "inputs": inputs,
                "epochs": epochs,
                "draft_tokens": fed * epochs,
                **took,
            }
    return made


def trained(folders: list[Path], temperature: float, out: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Unless that was done before. Dev quality."""
    if not (out / "model.safetensors").is_file():
        dev = str(collected("dev", temperature))
        cache = settings["packing"] != "mixing" and str(REPOSITORY / "runs" / "packing" / "cache")
        traces = [str(folder) for folder in folders]
        train(traces=traces, draft=DRAFT, dev_traces=dev, out=str(out), cache=cache, **settings)
    dev_quality = read_json(out / "metrics.json")["dev"]["token"]
    return {f"dev_{name}": dev_quality[name] for name in ("binary_kl", "auroc")}


def compared(temperature: float, made: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a head and c, and those of the bounds."""
    replayed: dict[str, dict[str, Any]] = {"dev": {}, "test": {}}
    for name, one in made.items():
        head = loaded(one["folder"], temperature)
        for split, families in replayed.items():
            families[name] = head_settings(coupled(split, temperature), head)
    kept = ("rung", "c", "params", "gain_over_best_fixed", "oracle_gap_closed", "informed_gap_closed", "over")
    rows = []
    references = [name for name in REFERENCES if name in made]
    for row in judged(replayed["dev"], replayed["test"], temperature, references):
        one = {key: value for key, value in made.get(row["rung"], {}).items() if key != "folder"}
        intervals = {key: row["ci95"][key] for key in kept if key in row["ci95"]}
        rows.append({**one, **{key: row[key] for key in kept if key in row}, "ci95": intervals})
    return rows


def text(temperature: float) -> list[Path]:
    """800 responses."""
    if temperature:
        return train_folders(1.0, 1)
    most = 400
    return [part_of(folder, "0.5", lambda i, _: i < most) for folder in (collected("train", 0.0), scored(0))]


def tokens(folders: list[Path], packing: str) -> int:
    """That the draft is fed in one epoch, padding aside."""
    total = 0
    for folder in folders:
        traces = read_traces(folder)[1].with_format("numpy")
        prompt, response = (sum(map(np.size, traces[name][:])) for name in ("prompt_ids", "response_ids"))
        total += prompt + response * (2 if packing == "exact" else 1)
    return total


if __name__ == "__main__":
    main()
