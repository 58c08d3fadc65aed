"""Question: is a head at the drawn token read faster at lag 0 (paper's algorithm) or at lag 1 (the authors' code)?

Trains heads that read the state at the drawn token on the demo's traces, which are collected first when they are not
there: the paper's recipe, and ours with exact packing and signals. For reference it also trains the default head, which
reads the state before the token and has no lag. Decodes dev prompts at every threshold, at T = 1 and T = 0. throughput:
by eq. 3.1 with the costs regressed here; every draft forward counts, also the one that lag 0 spends on a token that it
then does not draw. wall_ratio: tokens/s of lag 1 over lag 0 at their best thresholds, batch 1, prompts interleaved.

python benchmarks/head_lag.py
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from record import REPOSITORY, TINY, write_result

from accept_head import Sampling, load_pair
from accept_head.command.libraries import quiet_libraries
from accept_head.cost import DecodeCounts, ForwardCosts, total_time
from accept_head.inference import generate, make_policy
from accept_head.inference.profile.regression import regress_rounds
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.pair import Pair
from accept_head.prompts import load_prompts
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TRAINED: dict[str, dict[str, Any]] = {
    "specdecpp": {"recipe": "specdecpp"},
    "exact_signals": {"recipe": "default", "packing": "exact"},
    "default": {"recipe": "default"},
}
NEW_TOKENS, PROMPTS, WALL_PROMPTS = 80, 96, 32


def main() -> None:
    quiet_libraries()
    folder = REPOSITORY / "runs" / "head_lag"
    traces = collected(folder)
    pair = load_pair(TINY / "target", TINY / "draft")
    loaded = load_prompts(str(TINY / "prompts" / "dev.jsonl"), pair.tokenizer, max_prompts=PROMPTS)
    prompts = [list(prompt.ids) for prompt in loaded]
    rows = []
    for name, options in TRAINED.items():
        head = folder / name
        if not (head / "model.safetensors").is_file():
            train(traces=str(traces), draft=str(TINY / "draft"), out=str(head), **options)
        for temperature in (1.0, 0.0):
            sampling = Sampling(temperature=temperature)
            costs = regress_rounds(pair, prompts[:8], sampling=sampling).costs
            row = {"head": name, "temperature": temperature, "costs": asdict(costs)}
            row |= compare_lags(pair, head, prompts, sampling, costs, lags=(0,) if name == "default" else (0, 1))
            rows.append(row)
            print({key: value for key, value in row.items() if key not in ("costs", "lags")})
    print(f"wrote {write_result('head_lag', {'prompts': PROMPTS, 'rows': rows})}")


def collected(folder: Path) -> Path:
    traces = folder / "traces"
    collect(
        target=str(TINY / "target"),
        draft=str(TINY / "draft"),
        prompts=str(TINY / "prompts" / "train.jsonl"),
        out=str(traces),
        max_new_tokens=NEW_TOKENS,
        max_prompts=480,
        batch_size=40,
        shard_size=80,
    )
    return traces


def compare_lags(
    pair: Pair, head: Path, prompts: list[list[int]], sampling: Sampling, costs: ForwardCosts, lags: tuple[int, ...]
) -> dict[str, Any]:
    table: dict[int, list[dict[str, float]]] = {}
    for lag in lags:
        table[lag] = [rates(pair, f"head:{head}:{h},lag={lag}", h, prompts, sampling, costs) for h in THRESHOLDS]
    best = {lag: max(rows, key=lambda row: row["throughput"]) for lag, rows in table.items()}
    result: dict[str, Any] = {f"best_lag_{lag}": row for lag, row in best.items()}
    if len(lags) == 2:
        result["throughput_ratio"] = best[1]["throughput"] / best[0]["throughput"]
        specs = [f"head:{head}:{best[lag]['threshold']},lag={lag}" for lag in lags]
        result["wall_ratio"], result["wall_ratio_ci95"] = wall_ratio(pair, specs, prompts[:WALL_PROMPTS], sampling)
    return {**result, "lags": table}


def rates(
    pair: Pair, spec: str, threshold: float, prompts: list[list[int]], sampling: Sampling, costs: ForwardCosts
) -> dict[str, float]:
    _, stats = decode(pair, spec, prompts, sampling, batch_size=16)
    total = DecodeCounts.total(row.counts for row in stats)
    seconds = total_time(costs, draft_forwards=total.draft_forwards, target_forwards=total.target_forwards)
    return {
        "threshold": threshold,
        "discard_rate": total.discard_rate,
        "verification_rate": total.verification_rate,
        "draft_forwards_per_token": total.draft_forwards / total.generated,
        "throughput": total.generated / seconds,
    }


def wall_ratio(pair: Pair, specs: list[str], prompts: list[list[int]], sampling: Sampling) -> tuple[float, list[float]]:
    """Tokens/s of the second policy over the first's, prompt by prompt in turns; with its 95 % bootstrap interval."""
    measured = []  # (tokens, seconds) of each policy, by prompt
    for index, prompt in enumerate([prompts[0], *prompts]):
        pairs = []
        for spec in specs:
            begin = time.perf_counter()
            tokens, _ = decode(pair, spec, [prompt], sampling, batch_size=1)
            pairs.append((len(tokens[0]), time.perf_counter() - begin))
        if index:
            measured.append(pairs)
    table = np.array(measured)  # (prompt, policy, 2)

    def ratio(totals: np.ndarray) -> np.ndarray:
        speed = totals[..., 0] / totals[..., 1]
        return speed[..., 1] / speed[..., 0]

    return float(ratio(table.sum(0))), interval(ratio(np.tensordot(draws(len(table)), table, axes=1)))


def decode(pair: Pair, spec: str, prompts: list[list[int]], sampling: Sampling, batch_size: int) -> Any:
    return generate(
        pair.target,
        pair.draft,
        prompts,
        policy=make_policy(spec, pair),
        sampling=sampling,
        max_new_tokens=NEW_TOKENS,
        batch_size=batch_size,
        tokenizer=pair.tokenizer,
    )


if __name__ == "__main__":
    main()
