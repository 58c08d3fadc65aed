"""Question: when text, load or context change in the middle, how soon is `costs=auto` as fast as the best again?

A pair of `load.py`, T = 1, in our loop. Each arm goes through all phases with one policy object, so what it has learnt
in one phase it brings to the next: code with four requests at once; translation, where few drafts are accepted; code
with 16 at once; code after eight times as much text. Arms take turns by the round. Speed is tokens per second of
rounds; rounds in which a request arrived are left out, as the clock would count its prompt. A window is WINDOW rounds.
It is held against no speculation and the best fixed K: their tokens a round of the whole phase, and their seconds of
the rounds that were run between those of the window. One deviation of that ratio is given beside it, by what varies
most: the tokens of a round.

python benchmarks/load_shift.py --pair smollm2     # 18 minutes on 2 cores
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import numpy as np
from load import HEAD, PAIRS, decoding, in_turns, specs_of
from real_pair import prompts_file
from record import RESULTS, write_result

from accept_head import Sampling, load_pair
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.inference.policies.registry import make_policy
from accept_head.prompts import Prompt, load_prompts

SAMPLING, WINDOW = Sampling(temperature=1.0, top_k=0), 100
ROUNDS = {"none": 100, "fixed:1": 300, "fixed:2": 300, "fixed:4": 100, HEAD: 300}


class Phase(NamedTuple):
    name: str
    domain: str
    rows: int
    times_longer: int = 1


PHASES = (
    Phase("code, 4 at once", "humaneval", 4),
    Phase("translation, 4 at once", "specbench/translation", 4),
    Phase("code, 16 at once", "humaneval", 16),
    Phase("code, 4 at once, 8 times the context", "humaneval", 4, 8),
)


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="qwen")
    name = parser.parse_args().pair
    served = PAIRS[name]
    pair = load_pair(served.target, served.draft, dtype="bfloat16")
    all_specs = specs_of(served.heads[SAMPLING.temperature])
    specs = {arm: all_specs[arm] for arm in ROUNDS}
    policies = {arm: make_policy(spec, pair) for arm, spec in specs.items()}
    prompts = load_prompts(str(prompts_file("test")), pair.tokenizer)
    phases = []
    for phase in PHASES:
        texts = texts_of(phase, prompts)
        arms = {arm: decoding(pair, policy, phase.rows, texts, SAMPLING) for arm, policy in policies.items()}
        clocks = in_turns(arms, ROUNDS, seed=0)
        phases.append({"phase": phase.name, **compared(clocks)})
        print(json.dumps(phases[-1], indent=1), flush=True)
    path = RESULTS / "load_shift.json"
    pairs = read_json(path)["pairs"] if path.is_file() else {}
    write_result("load_shift", {"rounds": ROUNDS, "pairs": pairs | {name: {"specs": specs, "phases": phases}}})


def texts_of(phase: Phase, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids. A longer context is that of other prompts, before the prompt itself."""
    mine = [list(prompt.ids) for prompt in prompts if prompt.domain == phase.domain]
    wanted = phase.times_longer * int(np.mean([len(ids) for ids in mine]))
    texts = []
    for place, ids in enumerate(mine):
        text, before = list(ids), place
        while phase.times_longer > 1 and len(text) < wanted:
            before -= 1
            text = mine[before % len(mine)] + text
        texts.append(text)
    return texts


def compared(clocks: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tokens per second of each arm, and of each window of the arm that learns over the others."""
    clocks = {name: clock[:, :2] for name, clock in clocks.items()}  # tokens and seconds
    speeds = {name: float(np.divide(*clock.sum(0))) for name, clock in clocks.items()}
    others = {name: clock for name, clock in clocks.items() if name != HEAD}
    best = max(others, key=lambda name: speeds[name])
    learning, found = clocks[HEAD], {"none": [], best: []}
    for start in range(0, len(learning) - WINDOW + 1, WINDOW // 2):
        window = learning[start : start + WINDOW]
        mine = float(np.divide(*window.sum(0)))
        for name, over in found.items():
            clock = others[name]
            between = slice(*(place * len(clock) // len(learning) for place in (start, start + WINDOW)))
            deviation = np.hypot(of_mean(window[:, 0]), of_mean(clock[:, 0]))
            over.append([mine / float(clock[:, 0].mean() / clock[between, 1].mean()) - 1, float(deviation)])
    return {"tokens_per_second": speeds, "best": best, "windows_over": found}


def of_mean(values: np.ndarray) -> float:
    """Standard deviation of the mean, as a share of it."""
    return float(values.std() / values.mean() / np.sqrt(len(values)))


if __name__ == "__main__":
    main()
