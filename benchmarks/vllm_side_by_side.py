"""Question: inside real vLLM, how fast is a head, next to vLLM's own options and to policies without training?

Same engine, prompts and weights; on each chunk of prompts every arm runs in turn, in random order. Arms: no
speculation; vLLM's own fixed K, one of them twice (the noise floor), and its table from batch size to K (made here, of
a pilot run on dev prompts); our policies, per row; the head, per row, as its decoding.json says and with other
thresholds, and with the batch-wide end of a round (`costs`, of the same pilot). At T = 0 outputs are compared. Times
per output token are from a response's first token to its last. `matched`: the head with the threshold that was chosen
for a fixed K on dev prompts, against that K. Two hours on a CPU; each cell is written when it is done.

OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_side_by_side.py            # the embedded pair, on a CPU
python benchmarks/vllm_side_by_side.py --target T --draft D --prompts P.jsonl --head HEAD --greedy_head HEAD \\
    --dtype bfloat16 --gpu_memory 0.4 --batches 1 4 16 64 --counts 160 160 160 256 --name vllm_gpu   # on a GPU
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import REPOSITORY, TINY, write_result
from rich.console import Console
from torch import Tensor
from vllm_engines import Drafting, Engines, Run

from accept_head.cost import BatchForwardCost
from accept_head.files import write_json
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.settings import installed_version
from accept_head.inference.bench.figures import TWIN, Cell, fixed_by_domain, noise_floor, rows
from accept_head.inference.bench.measure import Chunk, Timed, make_chunks
from accept_head.inference.bench.tables import cell_table
from accept_head.inference.costs.batch_table import best_table, tokens_per_round
from accept_head.inference.decode.generate import make_requests
from accept_head.inference.decode.rows import Request
from accept_head.inference.policy import RowPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.sampling import Sampling

FIXED = (1, 2, 3, 4, 5, 8)
K_MAX = 8
# The head with other thresholds than its decoding.json's, by the fixed K that each goes with: the least discarded, on
# dev prompts by replay, of those thresholds (in steps of 0.01) that surely call the target no more often than that K.
# `accept-head tune --objective discard` chooses so.
THRESHOLDS = {  # greedy, or sampled
    True: {2: 0.41, 3: 0.65, 4: 0.81, 5: 0.89},
    False: {2: 0.43, 3: 0.64, 4: 0.78, 5: 0.88},
}
PILOT_LENGTHS = (0, 1, 2, 3, 5, 8)
NEAR = 10.0  # times that a run of the same batch size counts in its costs
FIXED_NAMES = [f"fixed:{k}" for k in FIXED]
NEEDED = ("none", "fixed:2", "fixed:2" + TWIN)  # the speed-up's base, and the noise floor


def main() -> None:
    options = _parse()
    console = Console(width=130, emoji=False)
    engines = Engines(
        options.target,
        options.draft,
        k_max=K_MAX,
        rows=max(options.batches),
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        enforce_eager=options.enforce_eager,
        **({"gpu_memory_utilization": options.gpu_memory} if options.gpu_memory else {}),
    )
    work = REPOSITORY / "runs" / options.name
    work.mkdir(parents=True, exist_ok=True)
    cells = []
    for temperature in options.temperatures:
        sampling = Sampling(temperature=temperature, top_k=0)
        head = options.head if temperature else options.greedy_head
        dev, _ = _requests(engines, options.dev_prompts, options)
        pilot = run_pilot(engines, dev, sampling, options.batches, head)
        costs, with_head = (work / f"{name}-T{temperature:g}.json" for name in ("costs", "costs-head"))
        for batch in options.batches:
            write_json(costs, pilot["costs"][batch])
            write_json(with_head, pilot["costs_with_head"][batch])
            requests, domains = _requests(engines, options.prompts, options)
            count = min(len(requests), options.counts[options.batches.index(batch)])
            chosen = np.random.default_rng(batch).permutation(len(requests))[:count]
            requests = [Request(i, requests[j].prompt, options.max_new_tokens, i) for i, j in enumerate(chosen)]
            chunks = make_chunks(requests, [domains[j] for j in chosen], batch=batch)
            thresholds = THRESHOLDS[sampling.greedy]
            levels = tuple(thresholds.values())
            arms = make_arms(head, levels, str(costs), str(with_head), pilot["table"], max(options.batches))
            if unknown := set(options.arms) - set(arms):
                raise SystemExit(f"--arms: unknown {sorted(unknown)[0]!r}, expected some of {sorted(arms)}")
            arms = {name: arm for name, arm in arms.items() if not options.arms or name in (*NEEDED, *options.arms)}
            cell = run_cell(engines, arms, chunks, sampling, batch, options.repeats, thresholds)
            cells.append({"batch_size": batch, "temperature": temperature, **cell})
            console.print(cell_table({"cell": f"batch {batch}, T = {temperature:g}", **cells[-1]}))
            console.print(_against_fixed(cells[-1]))
            if batch == options.batches[-1]:
                cells[-1]["pilot"] = pilot
            print(f"wrote {_write(cells, options)}", flush=True)  # each cell as it comes: all of them take hours
    shutil.rmtree(work, ignore_errors=True)


def _write(cells: list[dict[str, Any]], options: Any) -> Path:
    result = {
        "vllm": installed_version(),
        "numpy": version("numpy"),
        "target": _relative(options.target),
        "draft": _relative(options.draft),
        "heads": {"sampled": _relative(options.head), "greedy": _relative(options.greedy_head)},
        "max_new_tokens": options.max_new_tokens,
        "cells": cells,
    }
    return write_result(options.name, result)


def make_arms(
    head: str, levels: tuple[float, ...], costs: str, with_head: str, table: list[list[int]], rows: int
) -> dict[str, Drafting]:
    """By name, in the order of the table that is printed. with_head: costs, the head's work in the draft step."""
    lookup = [next((k for first, last, k in table if first <= size <= last), table[-1][2]) for size in range(rows + 1)]
    return {
        "none": Drafting(),
        **{f"fixed:{k}": Drafting.fixed(k, rows) for k in FIXED},
        "fixed:2" + TWIN: Drafting.fixed(2, rows),
        "vllm-dynamic": Drafting(table=lookup),
        "max-prob:0.4": Drafting(policy=f"max-prob:0.4,k_max={K_MAX}"),
        "svip:0.6": Drafting(policy=f"svip:0.6,k_max={K_MAX}"),
        "adaedl:0.3": Drafting(policy=f"adaedl:0.3,k_max={K_MAX}"),
        "online-logistic:0.3": Drafting(policy=f"online-logistic:0.3,k_max={K_MAX}"),
        "head": Drafting(policy=f"head:{head},k_max={K_MAX}"),
        **{f"head:{level}": Drafting(policy=f"head:{head}:{level},k_max={K_MAX}") for level in levels},
        "head, costs": Drafting(policy=f"head:{head},k_max={K_MAX},costs={with_head}"),
        "fixed:8, costs": Drafting(policy=f"fixed:8,costs={costs}"),
    }


def run_cell(
    engines: Engines,
    arms: dict[str, Drafting],
    chunks: list[Chunk],
    sampling: Sampling,
    batch: int,
    repeats: int,
    thresholds: dict[int, float],
) -> dict[str, Any]:
    names, runs = list(arms), []
    for drafting in arms.values():  # warm
        engines.run(drafting, chunks[0].requests[: max(2, batch)], sampling, batch)
        drafting.draft_forwards = 0
    for repeat in range(repeats):
        for number, chunk in enumerate(chunks):
            for index in np.random.default_rng([repeat, number, batch]).permutation(len(names)):
                run = engines.run(arms[names[index]], chunk.requests, sampling, batch)
                timed = Timed(repeat, number, names[index], run.wall, run.cpu, len(run.live), run.finished)
                runs.append(timed)
    cell = Cell(runs, chunks, names, [name for name in FIXED_NAMES if name in names], "fixed:2")
    greedy = sampling.greedy
    table = rows(cell, same_tokens=greedy)
    for row in table:
        row["draft_forwards_per_token"] = arms[row["name"]].draft_forwards / row["counts"]["generated"]
        row["target_forwards_per_token"] = cell.loop_rounds[row["name"]] / row["counts"]["generated"]
        row["target_calls_per_token"] = row["counts"]["rounds"] / row["counts"]["generated"]  # of a row
        row["drafted_per_accepted"] = row["counts"]["drafted"] / max(1, row["counts"]["accepted"])
        row["priced"] = None
        del row["chunks"]
    return {
        "prompts": sum(len(chunk.requests) for chunk in chunks),
        "repeats": repeats,
        "best_fixed": cell.best_fixed(),
        "best_fixed_by_domain": fixed_by_domain(cell),
        "noise": noise_floor(cell),
        "cpu_share": cell.cpu_share,
        "same_tokens": greedy,
        "slo_limits": None,
        "heads_against_fixed": heads_against_fixed(table),
        "matched": matched(cell, thresholds),
        "policies": table,
    }


def heads_against_fixed(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each fixed K, the head that drafts least per accepted token among those with no more target calls per token;
    one that the batch stops is left out. Ratios are the head's by the fixed K's, less 1."""
    found = []
    heads = [row for row in table if row["name"].split(":")[0] == "head"]
    for fixed in (row for row in table if row["name"] in FIXED_NAMES):
        enough = [row for row in heads if row["target_calls_per_token"] <= fixed["target_calls_per_token"]]
        if not enough:
            continue
        head = min(enough, key=lambda row: row["drafted_per_accepted"])
        names = ("drafted_per_accepted", "target_calls_per_token", "draft_forwards_per_token", "throughput")
        ratios = {name: head[name] / fixed[name] - 1 for name in names}
        found.append({"fixed": fixed["name"], "head": head["name"], **ratios})
    return found


def matched(cell: Cell, thresholds: dict[int, float], seed: int = 0) -> list[dict[str, Any]]:
    """Each fixed K that ran, and the head whose threshold goes with it, see THRESHOLDS: not the head that looks best on
    the prompts that are judged. Ratios are the head's by the fixed K's, less 1: [value, low, high], 95 % by bootstrap
    over chunks."""
    count = len(cell.chunks)
    chunk_of = {request.index: number for number, chunk in enumerate(cell.chunks) for request in chunk.requests}
    weights = np.concatenate([np.ones((1, count)), draws(count, seed=seed)])  # the first is the cell itself

    def figures(name: str) -> dict[str, np.ndarray]:
        sums = np.zeros((count, 4))
        for done in cell.finished[name]:
            stats = done.stats
            sums[chunk_of[done.request.index]] += stats.drafted, stats.accepted, stats.rounds, stats.generated
        drafted, accepted, rounds, generated = (weights @ sums).T
        seconds = weights @ cell.seconds[cell.place(name)].sum(0)
        return {
            "drafted_per_accepted": drafted / np.maximum(accepted, 1),
            "target_calls_per_token": rounds / generated,
            "throughput": generated / seconds,
        }

    found = []
    for k, threshold in thresholds.items():
        head, fixed = f"head:{threshold}", f"fixed:{k}"
        if fixed not in cell.names or head not in cell.names:
            continue
        own, its = figures(head), figures(fixed)
        ratios = {name: own[name] / its[name] - 1 for name in own}
        values = {name: [float(value[0]), *interval(value[1:])] for name, value in ratios.items()}
        found.append({"fixed": fixed, "head": head, "best": fixed == cell.best_fixed(), **values})
    return found


def run_pilot(
    engines: Engines, requests: list[Request], sampling: Sampling, batches: list[int], head: str
) -> dict[str, Any]:
    """Seconds of a round by batch size and K, which give vLLM's table; the costs that our batch rule takes, by batch
    size; and seconds of the head's work on a draft step."""
    sizes = sorted({1, *batches})
    seconds = np.zeros((len(sizes), len(PILOT_LENGTHS)))
    # Of runs with drafts: rounds, tokens verified, draft steps, those times rows, seconds; and the batch size of each.
    observed, of_size = list[list[float]](), list[int]()
    for row, size in enumerate(sizes):
        chosen = requests[: max(8, 2 * size)]
        for column, k in enumerate(PILOT_LENGTHS):
            drafting = Drafting() if k == 0 else Drafting.fixed(k, engines.rows)
            run = min((engines.run(drafting, chosen, sampling, size) for _ in range(3)), key=lambda run: run.wall)
            full = sum(run.live) / size  # rounds, if all rows had been live in each of them
            seconds[row, column] = run.wall / full
            if k:
                observed.append(_observed(run, k * len(run.live)))
        if size > 1:
            observed.append(_one_deep_row(engines, chosen, sampling, size))
        of_size += [size] * (len(observed) - len(of_size))
    survival = _survival(engines, requests[:32], sampling)
    table = [list(r) for r in best_table(seconds, sizes, PILOT_LENGTHS, tokens_per_round(survival))]
    costs = {size: _fit(np.array(observed), np.where(np.array(of_size) == size, NEAR, 1.0)) for size in sizes}
    of_head = _head_seconds(engines, requests, sampling, sizes, head)
    return {
        "batch_sizes": sizes,
        "draft_lengths": list(PILOT_LENGTHS),
        "seconds": seconds.tolist(),
        "survival": survival.tolist(),
        "table": table,
        "costs": costs,
        "head_seconds": of_head,
        "costs_with_head": {size: _with_head(cost, sizes, of_head) for size, cost in costs.items()},
    }


def _observed(run: Run, steps: int) -> list[float]:
    rows, drafted = sum(run.live), sum(done.stats.drafted for done in run.finished)
    return [len(run.live), rows + drafted, steps, steps * rows / len(run.live), run.wall]


class OneDeepRow(RowPolicy):
    """One row drafts all it may, the others one token: draft steps with few tokens to verify. With a fixed K for all
    rows the two always come together, and which of them takes the time cannot be told."""

    max_draft_tokens = K_MAX

    def start_round(self, live: Tensor) -> Tensor:
        first = live & (live.cumsum(0) == 1)
        return torch.where(first, K_MAX, 1)


def _one_deep_row(engines: Engines, requests: list[Request], sampling: Sampling, size: int) -> list[float]:
    metrics, device = DraftMetrics(K_MAX, publish=False), torch.device(engines.device)
    host = PolicyHost(
        OneDeepRow(), rows=engines.rows, limit=K_MAX, device=device, greedy=sampling.greedy, metrics=metrics
    )
    found = []
    for _ in range(3):
        drafting = Drafting(policy="one deep row", host=host)
        run = engines.run(drafting, requests, sampling, size)
        found.append(_observed(run, drafting.draft_forwards))
    return min(found, key=lambda values: values[-1])


def _head_seconds(
    engines: Engines, requests: list[Request], sampling: Sampling, sizes: list[int], head: str
) -> list[float]:
    """Of a draft step, by batch size, as the plugin's metrics have them."""
    seconds = []
    for size in sizes:
        drafting, chosen = Drafting(policy=f"head:{head},k_max={K_MAX}"), requests[: max(8, 2 * size)]
        engines.run(drafting, chosen[:size], sampling, size)  # warm
        assert drafting.host is not None and drafting.host.metrics is not None
        before = drafting.host.metrics.read()
        engines.run(drafting, chosen, sampling, size)
        now = drafting.host.metrics.read()
        spent, steps = (now[name] - before[name] for name in ("policy_seconds", "draft_forwards"))
        seconds.append(spent / max(1, steps))
    return seconds


def _with_head(costs: dict[str, Any], sizes: list[int], seconds: list[float]) -> dict[str, Any]:
    """The costs, with a line through the head's seconds added to the draft step's."""
    design = np.stack([np.ones(len(sizes)), sizes], axis=1)
    gamma, beta = np.linalg.lstsq(design, np.array(seconds), rcond=None)[0]
    draft = costs["batch"]["draft"]
    draft = {**draft, "gamma": draft["gamma"] + max(0.0, gamma), "beta": draft["beta"] + max(0.0, beta)}
    return {
        **costs,
        "t_draft": costs["t_draft"] + seconds[0],
        "batch": {**costs["batch"], "draft": draft},
    }


def _survival(engines: Engines, requests: list[Request], sampling: Sampling) -> np.ndarray:
    """(K_MAX,) the chance that the first 1, 2, … drafted tokens are accepted."""
    drafting = Drafting(policy=f"fixed:{K_MAX}")
    engines.run(drafting, requests, sampling, min(4, engines.rows))
    assert drafting.host is not None and drafting.host.metrics is not None
    depths = drafting.host.metrics.read()["depths"]
    return np.array([depth["accepted"] / max(1, depth["verified"]) for depth in depths])


def _fit(observed: np.ndarray, weights: np.ndarray | None = None) -> dict[str, Any]:
    """Costs as `accept-head profile` writes them, by least squares on
    seconds = γ_t·rounds + β_t·verified + γ_d·steps + β_d·steps·rows: what vLLM does once a round is the target's.

    weights: (runs,) how much each counts. No line in the batch size is right from 1 row to 16: a step of 4 rows took a
    quarter longer than a fit to all said. So each size has a line that goes through its own runs."""
    from scipy.optimize import nnls

    design, values = observed[:, :-1], observed[:, -1]
    weights = np.ones_like(values) if weights is None else weights
    scale = weights / values  # relative errors count
    gamma_t, beta_t, gamma_d, beta_d = nnls(design * scale[:, None], weights)[0]
    residual = 1 - design @ [gamma_t, beta_t, gamma_d, beta_d] / values
    cost = {
        "draft": BatchForwardCost(alpha=0.0, beta=float(beta_d), gamma=float(gamma_d), r_squared=_r_squared(residual)),
        "target": BatchForwardCost(alpha=0.0, beta=float(beta_t), gamma=float(gamma_t), r_squared=_r_squared(residual)),
    }
    one = {name: fitted.seconds(context_tokens=0, batch_tokens=1) for name, fitted in cost.items()}
    return {
        "t_draft": one["draft"],
        "t_target": one["target"],
        "batch": {name: vars(fitted) for name, fitted in cost.items()},
    }


def _r_squared(relative: np.ndarray) -> float:
    """Of relative residuals: 1 less their mean square."""
    return float(1 - np.mean(relative**2))


def _against_fixed(cell: dict[str, Any]) -> str:
    """Drafted tokens per accepted token, against a fixed K with as many target calls."""
    lines = [f"{'':24}drafted/accepted  target calls/token  draft forwards/token  tokens/s"]
    for found in cell["heads_against_fixed"]:
        best = " (best)" if found["fixed"] == cell["best_fixed"] else ""
        lines.append(
            f"{found['head']} : {found['fixed']}{best}".ljust(24)
            + f"{100 * found['drafted_per_accepted']:+.0f} %".ljust(18)
            + f"{100 * found['target_calls_per_token']:+.1f} %".ljust(20)
            + f"{100 * found['draft_forwards_per_token']:+.0f} %".ljust(22)
            + f"{100 * found['throughput']:+.1f} %"
        )
    lines.append("thresholds chosen for that K on dev prompts, 95 % intervals:")
    for found in cell["matched"]:
        ratios = [found[name] for name in ("drafted_per_accepted", "target_calls_per_token", "throughput")]
        texts = ["{:+.1f} % ({:+.1f} to {:+.1f})".format(*(100 * value for value in ratio)) for ratio in ratios]
        best = " (best)" if found["best"] else ""
        lines.append(f"{found['head']} : {found['fixed']}{best}".ljust(24) + "   ".join(texts))
    return "\n".join(lines)


def _requests(engines: Engines, path: str, options: Any) -> tuple[list[Request], list[str | None]]:
    records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    tokenizer = engines.tokenizer()
    prompts = [tokenizer(record["prompt"])["input_ids"] for record in records]
    room = options.max_model_len - options.max_new_tokens - K_MAX - 1
    requests = make_requests([prompt[-room:] for prompt in prompts], options.max_new_tokens)
    return requests, [record.get("domain") for record in records]


def _relative(path: str) -> str:
    return path.replace(f"{REPOSITORY}/", "")


def _parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TINY / "target"))
    parser.add_argument("--draft", default=str(TINY / "draft"))
    parser.add_argument("--prompts", default=str(TINY / "prompts" / "test.jsonl"))
    parser.add_argument("--dev_prompts", default=str(TINY / "prompts" / "dev.jsonl"))
    parser.add_argument("--head", default=str(TINY / "heads" / "sampled"))
    parser.add_argument("--greedy_head", default=str(TINY / "heads" / "greedy_both"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--counts", type=int, nargs="+", default=[160, 80, 80], help="prompts, for each batch size")
    parser.add_argument("--arms", nargs="+", default=[], help="only these, by the names of the table; else all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--max_model_len", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--enforce_eager", type=lambda text: text == "true", default=True)
    parser.add_argument("--gpu_memory", type=float, help="share of the GPU's memory for each of the two engines")
    parser.add_argument("--name", default="vllm_side_by_side")
    options = parser.parse_args()
    if len(options.counts) != len(options.batches):
        parser.error(f"--counts has {len(options.counts)} values, expected {len(options.batches)}, one a batch size")
    return options


if __name__ == "__main__":
    main()
