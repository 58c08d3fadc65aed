"""Question: with several requests at once, how much could any rule gain over the best fixed K?

The more rows, the more alike rounds are, and the less there is to choose. By replay of the test prompts of `load.py`'s
pairs, T = 1: each fixed K and an informed rule, in a batch. Costs are fitted to the fixed K that `load.py` has timed:

    seconds of a round = γ_t + β_t·(rows + drafted) + γ_d·steps + β_d·drafted            drafted: in all rows

The informed rule knows the true acceptance of each token and of the next, but not the coins (`informed.py`). After k
steps the batch goes on ⇔ Σ_r [gain_r − λ·(β_t + β_d)]₊ > λ·γ_d, and row r with it ⇔ gain_r > λ·(β_t + β_d), with λ its
own tokens per second. No head knows as much.

python benchmarks/load_bound.py --pair smollm2     # a minute, after load.py and eagle3.py collect
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import eagle3
import numpy as np
import real_pair
import torch
from load import LENGTHS, PAIRS
from record import RESULTS, write_result
from scipy.optimize import nnls
from torch import Tensor

from accept_head.files import read_json
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.informed import expected_gain
from accept_head.inference.replay.truth import informed_tables
from accept_head.pair import load_model

K_MAX, TURNS = 8, 20  # the longest fixed K; most iterations to the informed rule's own speed


class Costs(NamedTuple):
    """Seconds, as above."""

    target: float
    verified: float
    step: float
    drafted: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="smollm2")
    pair = parser.parse_args().pair
    timed = read_json(RESULTS / f"load_loop_{pair}.json")["cells"]
    costs, traces = fitted(timed), TRACES[pair]()
    target = PAIRS[pair].target
    tables = informed_tables(traces, DRAFTERS[pair](), lambda: load_model(target, "--target", dtype="bfloat16"))
    assert tables is not None
    gain = expected_gain(traces, tables)
    cells = [
        cell_of(traces, gain, costs, cell["batch"]) | {"measured": measured(cell)}
        for cell in timed
        if cell["temperature"] == 1
    ]
    path = RESULTS / "load_bound.json"
    pairs = read_json(path)["pairs"] if path.is_file() else {}
    write_result("load_bound", {"pairs": pairs | {pair: {"costs": costs._asdict(), "cells": cells}}})
    print(json.dumps({"costs": costs._asdict(), "cells": cells}, indent=1))


TRACES: dict[str, Callable[[], CoupledTraces]] = {
    "smollm2": lambda: eagle3.coupled("test", 1.0),
    "qwen": lambda: real_pair.coupled_of(real_pair.TRACES / "t1" / "test"),
}
DRAFTERS = {"smollm2": eagle3.drafter, "qwen": real_pair.draft_model}


def fitted(cells: list[dict[str, Any]]) -> Costs:
    """From the means of no speculation and each fixed K, in all batches."""
    names = ["none", *(f"fixed:{k}" for k in LENGTHS)]
    rounds = np.array(
        [
            [1, row["verified_tokens_a_round"], row["draft_steps_a_round"],
             row["verified_tokens_a_round"] - cell["batch"], row["seconds_a_round"]]
            for cell in cells for row in cell["figures"] if row["name"] in names
        ]
    )  # fmt: skip
    *features, seconds = rounds.T
    # By their relative errors: rounds of many rows take longer.
    found, _ = nnls(np.stack(features, -1) / seconds[:, None], np.ones_like(seconds))
    return Costs(*found.tolist())


def measured(cell: dict[str, Any]) -> dict[str, Any]:
    """What `load.py` found in this cell, of the arms that decide."""
    kept = ("tokens_per_second", "over_best", "over_best_ci95")
    return {"best": cell["best"], "floor": cell["floor"]} | {
        row["name"]: {key: row[key] for key in kept} for row in cell["figures"] if "costs=auto" in row["name"]
    }


def cell_of(traces: CoupledTraces, gain: Tensor, costs: Costs, rows: int) -> dict[str, Any]:
    fixed = {}
    for k in range(K_MAX + 1):
        fixed[k] = speed_of(traces, rows, costs, lambda here, k=k: traces.drafts[here].clamp(max=k))  # type: ignore[misc]
    best = max(fixed, key=lambda k: fixed[k])
    speed = fixed[best]
    for _ in range(TURNS):
        before, speed = speed, speed_of(traces, rows, costs, lambda here: informed(gain[here], costs, speed))  # noqa: B023
        if abs(speed - before) < 1e-6 * before:
            break
    return {
        "batch": rows,
        "tokens_per_second": {"none": fixed[0], f"fixed:{best}": fixed[best], "informed": speed},
        "informed_over_best": speed / fixed[best] - 1,
    }


def informed(gain: Tensor, costs: Costs, speed: float) -> Tensor:
    """(batch,) tokens that each row drafts. gain: (batch, k_max) expected tokens of each draft."""
    surplus = gain - speed * (costs.verified + costs.drafted)
    wants = (surplus > 0).cumprod(-1)
    together = ((surplus * wants).sum(0) > speed * costs.step).cumprod(0)
    return (wants * together).sum(-1)


def speed_of(traces: CoupledTraces, rows: int, costs: Costs, choose: Callable[[Tensor], Tensor]) -> float:
    """Tokens per second of rounds in which all rows have a response. choose: (batch,) positions → tokens to draft."""
    ends = traces.starts + traces.lengths
    place, end, following = traces.starts[:rows].clone(), ends[:rows].clone(), rows
    tokens = seconds = 0.0
    while True:
        lengths = torch.minimum(choose(place), traces.drafts[place])
        emitted = torch.minimum(lengths, traces.leading[place]) + 1
        tokens += float(emitted.sum())
        drafted = float(lengths.sum())
        seconds += costs.target + costs.verified * (rows + drafted)
        seconds += costs.step * float(lengths.max()) + costs.drafted * drafted
        place = place + emitted
        for row in torch.where(place >= end)[0].tolist():
            if following == len(ends):
                return tokens / seconds
            place[row], end[row], following = traces.starts[following], ends[following], following + 1


if __name__ == "__main__":
    main()
