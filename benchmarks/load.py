"""Question: with one or several requests at once, does the head keep up with whatever is best, without measured costs?

Two pairs, on unseen prompts, in our loop and in vLLM: Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, and
SmolLM2-135M-Instruct with its EAGLE-3 drafter. Arms: no speculation, fixed K, one of them twice (the noise floor), the
head with a threshold chosen for one request at a time, and the head and vLLM's estimator with `costs=auto`, which learn
what a forward costs from the rounds they serve. In vLLM, no speculation and fixed K are vLLM's own. All are held
against the best of those two in that very cell, which nobody knows beforehand. `head, costs=auto` ends a round by costs
alone; with both (what `vllm-config` writes) a row also stops at its threshold.

Every arm decodes TOKENS tokens a row of each part of the prompts, in rounds in which all rows have a request. So all
come as far in the answers, and greedily read the same text. The later tokens of an answer are easier to foresee than
the first ones: with as many rounds for all, the longest drafts would come to the easiest text. Arms take turns, the one
with the fewest tokens first: in our loop by the round, in vLLM by four rounds. (A fifth before them is not counted: in
it vLLM sets up its batch anew.) Speed is tokens per second of these rounds. In our loop a drafted token counts with the
chance that it and those before it had to be accepted, so the luck of single tokens does not count. Rounds in which a
request arrived are left out, as the clock would count its prompt, and so is the end of a part: rows that stand idle
there are no matter of drafting. Parts are kept. Before the first, and again after a stop, arms with `costs=auto` decode
WARM_UP tokens a row, in which they learn the costs: a server has them behind it after its first seconds.

python benchmarks/load.py --batches 4 16           # with 4, 4 to 6 minutes a part on 2 cores; goes on where it was
python benchmarks/load.py --batches 1 --lengths 1 2 3 4 6 --parts 6
python benchmarks/load.py --pair smollm2 --parts 8
.venv-vllm/bin/python benchmarks/load.py --host vllm --pair smollm2 --parts 8
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import eagle3
import numpy as np
import torch
from real_decoded import DRAFT, NAMES, REPOSITORY, SHIPPED, TARGET, InVllm, prompts_file
from record import RESULTS, write_result

from accept_head import Sampling, load_pair
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.files import read_json
from accept_head.inference.bench.figures import TWIN
from accept_head.inference.bench.measure import Stage
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Request
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import DraftPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.pair import Pair
from accept_head.prompts import load_prompts

NEW_TOKENS, TOKENS, WARM_UP, K_MAX = 96, 96, 96, 8
LENGTHS, TWICE, HEAD, BOTH = (1, 2, 3, 4), "fixed:2", "head, costs=auto", "head, threshold and costs=auto"
OF_A_ROUND = ("tokens", "seconds", "draft_steps", "verified_tokens")  # of vLLM's, only the first two are known


class Served(NamedTuple):
    """A pair; and, by temperature, its heads with the threshold that was chosen for one request at a time."""

    target: str
    draft: str
    heads: dict[float, str]
    method: str  # vLLM's name for the kind of drafter


PAIRS = {
    "qwen": Served(
        TARGET, DRAFT, {t: f"head:{(SHIPPED / NAMES[t]).relative_to(REPOSITORY)}" for t in NAMES}, "draft_model"
    ),
    "smollm2": Served(eagle3.TARGET, eagle3.DRAFTER, {t: eagle3.chosen_head(t)[eagle3.HEAD] for t in NAMES}, "eagle3"),
}


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=HOSTS, default="loop")
    parser.add_argument("--pair", choices=PAIRS, default="qwen")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0])
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="fixed K; if the longest is best, more")
    options = parser.parse_args()
    served = PAIRS[options.pair]
    host = HOSTS[options.host](served, max(options.batches))
    for batch in options.batches:
        for temperature in options.temperatures:
            place = {"host": options.host, "pair": options.pair, "batch": batch, "temperature": temperature}
            specs = specs_of(served.heads[temperature], options.lengths)
            cell = {**place, **measured(host, specs, options.parts, **place)}
            name = f"load_{options.host}_{options.pair}"
            path = RESULTS / f"{name}.json"
            others = read_json(path)["cells"] if path.is_file() else []
            others = [each for each in others if any(each[key] != value for key, value in place.items())]
            write_result(name, {"cells": [*others, cell]})
            print(json.dumps(cell, indent=1), flush=True)


def specs_of(head: str, lengths: Sequence[int] = LENGTHS) -> dict[str, str]:
    """Arm → SPEC."""
    return {
        "none": "none",
        **{f"fixed:{k}": f"fixed:{k}" for k in lengths},
        TWICE + TWIN: TWICE,
        "head": head,
        HEAD: f"head:{folder_of(head)}:1,costs=auto",
        BOTH: f"{head},costs=auto",
        "vLLM's estimator, costs=auto": "online-logistic:0,costs=auto",
    }


def folder_of(head: str) -> str:
    """head: the SPEC."""
    return head.partition(",")[0].split(":")[1]


def measured(
    served: Loop | Vllm, specs: dict[str, str], parts: int, *, host: str, pair: str, batch: int, temperature: float
) -> dict[str, Any]:
    """A cell of the result: all arms on all parts."""
    prompts = [list(prompt.ids) for prompt in load_prompts(str(prompts_file("test")), served.tokenizer)]
    order = np.random.default_rng(0).permutation(len(prompts))
    path = REPOSITORY / "runs" / "load" / f"{host}_{pair}_b{batch}_t{temperature:g}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    run, warm = served.part(specs, batch, Sampling(temperature=temperature, top_k=0)), False
    for part in range(parts):
        if not any(each[0] == part for each in kept):
            texts = [prompts[index] for index in np.roll(order, -3 * batch * part)]
            if not warm:
                learn = [name for name, spec in specs.items() if "costs=auto" in spec]
                run(dict.fromkeys(learn, WARM_UP * batch), texts[::-1], part)
            found, warm = run(dict.fromkeys(specs, TOKENS * batch), texts, part), True
            new = [[part, name, len(rounds), *rounds.sum(0).tolist()] for name, rounds in found.items()]
            with path.open("a") as file:
                file.write("".join(json.dumps(each) + "\n" for each in new))
            kept += new
    return {"parts": parts, "tokens_a_row": TOKENS, **figures(kept, list(specs), parts)}


# Runs (tokens of each arm, texts, seed) → of each arm (rounds, 2 or 4): OF_A_ROUND.
Part = Callable[[Mapping[str, int], Sequence[list[int]], int], dict[str, np.ndarray]]


class Loop:
    def __init__(self, served: Served, rows: int):
        self.pair = load_pair(served.target, served.draft, dtype="bfloat16")
        self.tokenizer = self.pair.tokenizer

    def part(self, specs: dict[str, str], rows: int, sampling: Sampling) -> Part:
        policies = {name: make_policy(spec, self.pair) for name, spec in specs.items()}

        def run(amounts: Mapping[str, int], texts: Sequence[list[int]], seed: int) -> dict[str, np.ndarray]:
            arms = {name: decoding(self.pair, policies[name], rows, texts, sampling) for name in amounts}
            return in_turns(arms, amounts, seed, of=OF_A_ROUND.index("tokens"))

        return run


class Vllm:
    def __init__(self, served: Served, rows: int):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB, for the requests of all arms
        self.host = InVllm(served.target, served.draft, rows, "bfloat16", k_max=K_MAX, method=served.method)
        self.tokenizer = self.host.tokenizer

    def part(self, specs: dict[str, str], rows: int, sampling: Sampling) -> Part:
        drafting = {name: self.host.drafting(spec) for name, spec in specs.items()}

        def run(amounts: Mapping[str, int], texts: Sequence[list[int]], seed: int) -> dict[str, np.ndarray]:
            requests = endless(texts, rows)
            arms = {name: self.host.engines.rounds(drafting[name], requests, sampling, rows) for name in amounts}
            return in_turns(arms, amounts, seed, of=OF_A_ROUND.index("tokens"), turn=4)

        return run


HOSTS = {"loop": Loop, "vllm": Vllm}


def in_turns(
    arms: Mapping[str, Generator[tuple[float, ...]]],
    amounts: Mapping[str, int],
    seed: int,
    *,
    of: int | None = None,
    turn: int = 1,
) -> dict[str, np.ndarray]:
    """Of each arm (rounds, 2 or 4): OF_A_ROUND, of as many rounds as have its amount. of: the place of what amounts are
    of; None: of rounds. turn: rounds of a turn. The next turn is always one of the arm that has done the least share,
    so that a slow moment of the machine meets all alike."""
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in arms}
    random, done = np.random.default_rng(seed), dict.fromkeys(arms, 0.0)
    while min(done.values()) < 1:
        name = min(random.permutation(list(arms)).tolist(), key=done.__getitem__)
        for _ in range(turn):
            seen[name].append(next(arms[name]))
            done[name] += (1 if of is None else seen[name][-1][of]) / amounts[name]
    for arm in arms.values():
        arm.close()
    return {name: np.array(rounds) for name, rounds in seen.items()}


def decoding(
    pair: Pair, policy: DraftPolicy, rows: int, texts: Sequence[list[int]], sampling: Sampling
) -> Generator[tuple[float, ...]]:
    """OF_A_ROUND of each round of our loop in which all rows have a request and none has just arrived."""
    from greenlet import getcurrent, greenlet  # not among what vLLM's environment has

    requests = endless(texts, rows)
    how = {"batch_size": rows, "greedy": sampling.greedy, "compile": "steps"}  # as in vLLM, by default
    decoder = make_decoder(pair.target, pair.draft, requests, policy, **how)
    last, there = time.perf_counter(), [-1] * rows

    def watch(round_: Round) -> None:
        nonlocal last, there
        now, before = time.perf_counter(), there
        there = [-1 if request is None else request.index for request in round_.rows.requests]
        if there == before:
            submitted, parent = int(round_.outcome.submitted.sum()), getcurrent().parent
            assert parent is not None
            parent.switch((accepted_in(round_) + rows, now - last, int(round_.drafted.forwards), submitted + rows))
        last = time.perf_counter()

    def run() -> None:
        try:
            for _ in Stage(decoder, pair, sampling).run(requests, policy, 0, watch):
                pass
        finally:
            decoder.free()

    arm = greenlet(run)
    try:
        while True:
            yield arm.switch()
    finally:
        arm.throw()


def endless(texts: Sequence[list[int]], rows: int) -> list[Request]:
    """More than any arm decodes."""
    return make_requests([texts[place % len(texts)] for place in range(40 * rows)], NEW_TOKENS)


def accepted_in(round_: Round) -> float:
    """Tokens that a round's drafts were expected to have accepted."""
    submitted, chances = round_.outcome.submitted, round_.verified.acceptance
    if chances is None:  # greedily they are 0 or 1
        return float(round_.outcome.accepted.sum())
    there = torch.arange(chances.shape[1]) < submitted[:, None]
    return float(torch.where(there, chances, 0.0).cumprod(1).sum())


def figures(kept: Sequence[Sequence[Any]], names: Sequence[str], parts: int) -> dict[str, Any]:
    """Of each arm: tokens per second, and its gain over the best of no speculation and the fixed K, with an interval
    over the parts, which are drawn jointly for all arms."""
    sums = np.array([[next(each[2:] for each in kept if each[:2] == [part, name]) for part in range(parts)]
                     for name in names])  # (arm, part, rounds and OF_A_ROUND)  # fmt: skip
    rounds, sums = sums[..., :1], sums[..., 1:]
    drawn = np.einsum("rp,apf->arf", draws(parts), sums)
    speeds, of_draws = (each[..., 0] / each[..., 1] for each in (sums.sum(1), drawn))
    fixed = [
        place for place, name in enumerate(names) if name.startswith(("none", "fixed:")) and not name.endswith(TWIN)
    ]
    best = max(fixed, key=lambda place: speeds[place])
    means = sums.sum(1) / rounds.sum(1)
    twin, twice = speeds[names.index(TWICE + TWIN)], speeds[names.index(TWICE)]
    table = [
        {
            "name": name,
            "tokens_per_second": float(speeds[place]),
            "over_none": float(speeds[place] / speeds[0] - 1),
            "over_best": float(speeds[place] / speeds[best] - 1),
            "over_best_ci95": interval(of_draws[place] / of_draws[best] - 1),
            **{f"{each}_a_round": float(mean) for each, mean in zip(OF_A_ROUND, means[place], strict=False)},
        }
        for place, name in enumerate(names)
    ]
    return {"best": names[best], "floor": abs(float(twin / twice) - 1), "figures": table}


if __name__ == "__main__":
    main()
