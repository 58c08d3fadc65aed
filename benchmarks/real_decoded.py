"""Question: does a head decode faster on a published pair, by the clock and by counted forwards, as replay says?

Qwen2.5-Coder-Instruct, 0.5B drafting for 1.5B, on unseen prompts, in our loop and in vLLM. Arms: no
speculation, the best fixed K, one of them twice (the noise floor), cumulative q(Y), vLLM's estimator and the shipped
head; each rule with what the dev prompts chose (real_pair.json, at c = 0.43). And the head with `costs=auto`, which was
told nothing and learns from the first prompt on. Every arm runs in turn on each chunk of prompts, in random order.
Counted gains are by eq. 3.1, beside the replay of the same prompts; z is their difference in standard errors. Greedily,
`margins` has each answer that leaves that of the target alone: in bfloat16 the two likeliest logits may be so near that
a forward of another width turns them round. In float32 there should be none.

python benchmarks/real_decoded.py --host loop            # 3 hours on 2 cores for both; goes on where it was, run by run
.venv-vllm/bin/python benchmarks/real_decoded.py --host vllm
python benchmarks/real_decoded.py --host loop --dtype float32 --temperatures 0 --batches 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gains import compared
from real_pair import DRAFT, NAMES, SHIPPED, TARGET, TRACES, coupled_of, draft_model, prompts_file
from record import REPOSITORY, RESULTS, write_result
from tqdm import tqdm

from accept_head import Sampling, load_pair
from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.files import read_json
from accept_head.inference.bench.figures import TWIN, Cell, noise_floor, rows
from accept_head.inference.bench.kept import Run, kept_runs
from accept_head.inference.bench.measure import Stage, make_chunks
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.rows import Finished, Request
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.comparison import throughputs
from accept_head.pair import load_model
from accept_head.prompts import load_prompts
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.trace.config import CONFIG_NAME, TraceConfig
from accept_head.trace.shards import read_traces, write_shard

PROMPTS, NEW_TOKENS, K_MAX, C = 50, 32, 20, 0.43
RULES = {"cumulative q(Y)": "cumulative-confidence", "vLLM's estimator": "online-logistic"}
FIXED, HEAD, BY_COST = "fixed", "head", "head, costs=auto"
GENERATED, _, TARGET_FORWARDS, DRAFT_FORWARDS = range(4)  # of DecodeCounts


def main() -> None:
    keep_freed_blocks()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=("loop", "vllm"), required=True)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.0])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    host = (InLoop if options.host == "loop" else InVllm)(TARGET, DRAFT, max(options.batches), options.dtype)
    for batch in options.batches:
        for temperature in options.temperatures:
            cell = measured(host, options, batch, temperature)
            path = RESULTS / "real_decoded.json"
            others = read_json(path)["cells"] if path.is_file() else []
            key = ("host", "dtype", "batch", "temperature")
            others = [each for each in others if any(each[name] != cell[name] for name in key)]
            command = f"python benchmarks/real_decoded.py --host {options.host}"
            write_result("real_decoded", {"new_tokens": NEW_TOKENS, "cells": [*others, cell]}, command=command)
            print(json.dumps({name: cell[name] for name in (*key, "noise", "figures")}, indent=1), flush=True)


def measured(host: Any, options: argparse.Namespace, batch: int, temperature: float) -> dict[str, Any]:
    """A cell of the result: all arms on all prompts."""
    arms, indices = arms_of(temperature), chosen(options.prompts)
    requests = requests_of(host, indices)
    name = f"{options.host}_{options.dtype}_b{batch}_t{temperature:g}_{len(indices)}.jsonl"
    cell = timed(host, arms, requests, batch, temperature, REPOSITORY / "runs" / "real_decoded" / name)
    return {
        "host": options.host,
        "dtype": options.dtype,
        "batch": batch,
        "temperature": temperature,
        "prompts": len(indices),
        "arms": arms,
        **figures_of(cell, temperature),
        "counted": counted(cell, arms, indices, temperature, first_is_free=options.host == "vllm"),
        "margins": [] if temperature else margins(cell.finished, requests, TARGET, options.dtype),
    }


def requests_of(host: InLoop | InVllm, indices: Sequence[int]) -> list[Request]:
    """Test prompts. Each keeps its index, which is its place in the traces."""
    prompts = load_prompts(str(prompts_file("test")), host.tokenizer)
    return [Request(index, prompts[index].ids, NEW_TOKENS, index) for index in indices]


def timed(
    host: InLoop | InVllm,
    arms: dict[str, str],
    requests: Sequence[Request],
    batch: int,
    temperature: float,
    path: Path,
) -> Cell:
    """All arms on all requests. path: keeps the runs."""
    chunks = make_chunks(requests, [None] * len(requests), batch=batch)
    run = host.runner(arms, batch, Sampling(temperature=temperature, top_k=0))
    path.parent.mkdir(parents=True, exist_ok=True)
    done, new = kept_runs(run, list(arms), chunks, path)
    runs = [*done, *tqdm(new, path.stem, total=len(arms) * len(chunks), initial=len(done))]
    return Cell(runs, chunks, list(arms), [FIXED], FIXED)


def figures_of(cell: Cell, temperature: float) -> dict[str, Any]:
    names = ("name", "throughput", "speedup", "gain_over_best_fixed", "ci95", "block_efficiency", "counts")
    table = rows(cell, same_tokens=temperature == 0)
    return {
        "noise": noise_floor(cell),
        "cpu_share": cell.cpu_share,
        "figures": [{name: row[name] for name in (*names, "differs_from_none")} for row in table],
    }


def arms_of(temperature: float) -> dict[str, str]:
    """Name → SPEC, as chosen on dev prompts."""
    found = read_json(RESULTS / "real_pair.json")["ladder"]
    chosen_on_dev = {
        row["rung"].partition(":")[0]: row
        for row in found
        if row["temperature"] == temperature and row["c"] == C and row["tested_on"] == "both"
    }
    k = chosen_on_dev[FIXED]["params"]["k"]
    specs = {"none": "none", FIXED: f"fixed:{k}", FIXED + TWIN: f"fixed:{k}"}
    for name, rung in RULES.items():
        specs[name] = f"{rung}:{chosen_on_dev[rung]['params']['threshold']},k_max={K_MAX}"
    head = (SHIPPED / NAMES[temperature]).relative_to(REPOSITORY)
    return specs | {HEAD: f"head:{head},k_max={K_MAX}", BY_COST: f"head:{head}:1,k_max={K_MAX},costs=auto"}


def chosen(count: int) -> list[int]:
    """Places of the test prompts: of all lengths, as they are sorted by length."""
    there = sum(1 for _ in prompts_file("test").open())
    return list(range(0, there, there // count))[:count]


# --- runs ------------------------------------------------------------------------------------------------------------


class InLoop:
    def __init__(self, target: str, draft: str, rows: int, dtype: str):
        self.pair = load_pair(target, draft, dtype=dtype)
        self.tokenizer = self.pair.tokenizer

    def runner(self, arms: dict[str, str], batch: int, sampling: Sampling) -> Run:
        policies = {name: make_policy(spec, self.pair) for name, spec in arms.items()}
        prompts = load_prompts(str(prompts_file("test")), self.tokenizer)
        requests = make_requests([prompt.ids for prompt in prompts], NEW_TOKENS)
        widest = make_policy(f"fixed:{K_MAX}", self.pair)
        pair = self.pair
        decoder = make_decoder(pair.target, pair.draft, requests, widest, batch_size=batch, greedy=sampling.greedy)
        stage = Stage(decoder, self.pair, sampling)
        return lambda arm, requests: stage.time(requests, policies[arm], 0)


class InVllm:
    def __init__(self, target: str, draft: str, rows: int, dtype: str, *, k_max: int = K_MAX, **options: Any):
        from vllm_engines import Engines

        limits: dict[str, Any] = {"max_model_len": 1024, "gpu_memory_utilization": 0.5}
        self.engines = Engines(target, draft, k_max=k_max, rows=rows, dtype=dtype, **limits, **options)
        self.tokenizer = self.engines.tokenizer()

    def drafting(self, spec: str) -> Any:
        """vLLM itself has no speculation and any fixed K."""
        from vllm_engines import Drafting

        rule, _, k = spec.partition(":")
        if rule == "none":
            return Drafting()
        return Drafting.fixed(int(k), self.engines.rows) if rule == "fixed" else Drafting(policy=spec)

    def runner(self, arms: dict[str, str], batch: int, sampling: Sampling) -> Run:
        drafting = {name: self.drafting(spec) for name, spec in arms.items()}

        def run(arm: str, requests: Sequence[Request]) -> tuple[float, float, int, list[Finished]]:
            found = self.engines.run(drafting[arm], requests, sampling, batch)
            return found.wall, found.cpu, len(found.live), found.finished

        return run


# --- counted forwards ------------------------------------------------------------------------------------------------


def counted(
    cell: Cell, arms: dict[str, str], indices: Sequence[int], temperature: float, *, first_is_free: bool
) -> dict[str, Any]:
    """By eq. 3.1, of decoded forwards and by replay of the same prompts: each rule's gain over the fixed K; and how
    fast each arm is for itself, decoded over replayed.

    first_is_free: as in vLLM, where the first token comes with the prompt and costs no round, and its own fixed K
    drafts beyond the end of a request's text. Replay then counts so, too."""
    traces = coupled_of(shortened(TRACES / f"t{temperature:g}" / "test", indices, int(first_is_free)))
    costs = ForwardCosts(t_draft=C, t_target=1.0)

    def decoded(name: str) -> np.ndarray:
        by_prompt = {done.request.index: astuple(done.stats.counts) for done in cell.finished[name]}
        return np.array([by_prompt[index] for index in indices])

    def replayed(name: str) -> np.ndarray:
        policy = make_policy(arms[name], draft_model())
        counts = replay(traces, policy, name, batch=1).counts.copy()
        if first_is_free:
            counts[:, GENERATED] += 1
            if name == FIXED:
                counts[:, DRAFT_FORWARDS] = policy.max_draft_tokens * counts[:, TARGET_FORWARDS]
        return counts

    both = {name: (decoded(name), replayed(name)) for name in (FIXED, *RULES, HEAD)}
    of_fixed = both[FIXED]
    gains = {
        name: compared(np.stack([both[name][0], of_fixed[0]]), np.stack([both[name][1], of_fixed[1]]), costs)
        for name in (*RULES, HEAD)
    }
    return {**gains, "decoded_over_replayed": {name: ratio_of_speeds(*both[name], costs) for name in both}}


def ratio_of_speeds(decoded: np.ndarray, replayed: np.ndarray, costs: ForwardCosts) -> list[float]:
    """[ratio, low, high] of tokens/s, the same prompts drawn for both. (n, 4) counts each."""
    drawn = draws(len(decoded))
    ratios = throughputs(drawn @ decoded, costs) / throughputs(drawn @ replayed, costs)
    whole = throughputs(decoded.sum(0), costs) / throughputs(replayed.sum(0), costs)
    return [float(whole), *interval(ratios)]


def shortened(folder: Path, indices: Sequence[int], first: int) -> Path:
    """The traces of these prompts, of the tokens from place `first` to NEW_TOKENS of each response; those before are
    moved to the prompt."""
    out = REPOSITORY / "runs" / "real_decoded" / f"{folder.parent.name}_{folder.name}_{len(indices)}_from_{first}"
    if not (out / CONFIG_NAME).is_file():
        config, traces = read_traces(folder)
        kept = [traces[index] for index in indices]
        records = [cut(record, config.alternatives or 0, first) | {"index": i} for i, record in enumerate(kept)]
        out.mkdir(parents=True, exist_ok=True)
        for shard, start in enumerate(range(0, len(records), config.shard_size)):
            write_shard(out, shard, records[start : start + config.shard_size])
        tokens = NEW_TOKENS - first
        TraceConfig(**{**vars(config), "num_prompts": len(records), "max_new_tokens": tokens}).save(out)
    return out


def cut(record: dict[str, Any], alternatives: int, first: int) -> dict[str, Any]:
    """A position has so many alternatives."""
    lists = {}
    for name, value in record.items():
        if isinstance(value, list):
            each = alternatives if name in ALTERNATIVE_COLUMNS else 1
            lists[name] = value[first * each : NEW_TOKENS * each]
    whole = len(record["response_ids"]) <= NEW_TOKENS
    prompt = record["prompt_ids"] + record["response_ids"][:first]
    return record | lists | {"prompt_ids": prompt, "finished": record["finished"] and whole}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, its) in pairs if mine != its), min(len(one), len(other)))


@torch.no_grad()
def margins(
    finished: Mapping[str, Sequence[Finished]], requests: Sequence[Request], target_name: str, dtype: str
) -> list[dict[str, Any]]:
    """The answers that leave that of the target alone: arm, prompt, the place of the first other token, and how far the
    target's two likeliest logits are apart there. finished: of each arm, `none` among them."""
    target, found = load_model(target_name, "--target", dtype=dtype), []
    prompts = {request.index: list(request.prompt) for request in requests}
    alone = {done.request.index: done.token_ids for done in finished["none"]}
    for arm, answers in finished.items():
        for done in answers:
            index, expected = done.request.index, alone[done.request.index]
            if done.token_ids != expected:
                place = first_difference(done.token_ids, expected)
                logits = target(torch.tensor([prompts[index] + expected[:place]])).logits[0, -1].float()
                first, second = logits.topk(2).values.tolist()
                found.append({"arm": arm, "prompt": index, "place": place, "margin": first - second})
    return found


if __name__ == "__main__":
    main()
