"""Question: when text, load or context change in the middle, how soon is `costs=auto` as fast as the best again?

Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, T = 1, in our loop. Each arm goes through all phases with one policy
object, so what it has learnt in one phase it brings to the next: code with two requests at once; translation, where few
drafts are accepted; code with eight at once; code after eight times as much text. Arms take turns, a phase at a time.
Speed is tokens per second of rounds; rounds in which a request arrived are left out, as the clock would count its
prompt. A window is WINDOW rounds, and is held against no speculation and the best fixed K of the whole phase.

python benchmarks/load_shift.py                     # half an hour on 2 cores
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import numpy as np
from load import K_MAX
from real_decoded import DRAFT, NAMES, REPOSITORY, SHIPPED, TARGET, prompts_file
from record import write_result

from accept_head import Sampling, load_pair
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.inference.bench.measure import Stage
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.round import Round
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import DraftPolicy
from accept_head.pair import Pair
from accept_head.prompts import Prompt, load_prompts

SAMPLING, NEW_TOKENS, WINDOW = Sampling(temperature=1.0, top_k=0), 96, 100
ROUNDS = {"none": 100, "fixed:1": 100, "fixed:2": 100, "fixed:4": 100, "head, costs=auto": 300}


class Phase(NamedTuple):
    name: str
    domain: str
    rows: int
    times_longer: int = 1


PHASES = (
    Phase("code, 2 at once", "humaneval", 2),
    Phase("translation, 2 at once", "specbench/translation", 2),
    Phase("code, 8 at once", "humaneval", 8),
    Phase("code, 2 at once, 8 times the context", "humaneval", 2, 8),
)


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    pair = load_pair(TARGET, DRAFT, dtype="bfloat16")
    head = (SHIPPED / NAMES[1.0]).relative_to(REPOSITORY)
    specs = {name: name for name in ROUNDS} | {"head, costs=auto": f"head:{head}:1,k_max={K_MAX},costs=auto"}
    policies = {name: make_policy(spec, pair) for name, spec in specs.items()}
    prompts = load_prompts(str(prompts_file("test")), pair.tokenizer)
    phases = []
    for phase in PHASES:
        texts = texts_of(phase, prompts)
        clocks = {name: rounds_of(pair, policies[name], phase.rows, texts, ROUNDS[name]) for name in specs}
        phases.append({"phase": phase.name, **compared(clocks)})
        print(json.dumps(phases[-1], indent=1), flush=True)
    write_result("load_shift", {"specs": specs, "rounds": ROUNDS, "phases": phases})


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


def rounds_of(pair: Pair, policy: DraftPolicy, rows: int, texts: list[list[int]], count: int) -> np.ndarray:
    """(rounds, 2): tokens and seconds of each round."""
    repeated = [texts[place % len(texts)] for place in range(max(len(texts), 40 * rows))]
    requests = make_requests(repeated, NEW_TOKENS)
    decoder = make_decoder(pair.target, pair.draft, requests, policy, batch_size=rows, greedy=False)
    seen: list[tuple[float, float]] = []
    last, there = time.perf_counter(), [-1] * rows

    def watch(round_: Round) -> None:
        nonlocal last, there
        now, before = time.perf_counter(), there
        there = [-1 if request is None else request.index for request in round_.rows.requests]
        if there == before:
            seen.append((float(((round_.outcome.accepted + 1) * round_.outcome.live).sum()), now - last))
        last = now

    for _ in Stage(decoder, pair, SAMPLING).run(iter(requests), policy, 0, watch):
        if len(seen) >= count:
            break
    decoder.free()
    return np.array(seen[:count])


def compared(clocks: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tokens per second of each arm, and of each window of the arm that learns over the others."""
    speeds = {name: float(np.divide(*clock.sum(0))) for name, clock in clocks.items()}
    learning = clocks["head, costs=auto"]
    windows = [learning[start : start + WINDOW] for start in range(0, len(learning) - WINDOW + 1, WINDOW // 2)]
    of_windows = [float(np.divide(*window.sum(0))) for window in windows]
    best = max(speed for name, speed in speeds.items() if name != "head, costs=auto")
    return {
        "tokens_per_second": speeds,
        "windows_over_none": [speed / speeds["none"] - 1 for speed in of_windows],
        "windows_over_best": [speed / best - 1 for speed in of_windows],
    }


if __name__ == "__main__":
    main()
