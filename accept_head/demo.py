"""`accept-head demo`: the whole flow on the embedded pair, ending in a measured gain.

collect → train → measure forward costs → tune by replay → decode held-out prompts with every policy → one table, one
sentence and the report. Settings are chosen on the dev prompts. The table shows the test prompts, which are used for
nothing else. Like cli.py, this module may import training and inference.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from accept_head.command.libraries import quiet_libraries
from accept_head.console import make_console
from accept_head.cost import DecodeCounts, oracle_counts
from accept_head.errors import InputError
from accept_head.files import read_json, writable_folder, write_json
from accept_head.inference import generate, make_policy
from accept_head.inference.profile.regression import regress_rounds
from accept_head.inference.replay.comparison import Measured, compare
from accept_head.inference.tune.rules import RULES
from accept_head.inference.verbs.report import report
from accept_head.inference.verbs.tune import tune
from accept_head.pair import Pair, load_pair
from accept_head.prompts import Prompt, load_prompts
from accept_head.sampling import Sampling
from accept_head.trace.shards import read_traces
from accept_head.training.collect.verb import collect
from accept_head.training.learn.verb import train

FIXED_K = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
SPLITS = ("train", "dev", "test")
TUNED_RULES = [*RULES, "adaedl", "leviathan", "hf-heuristic", "goodput", "online-logistic"]  # others take a minute
COLLECT_BATCH, DECODE_BATCH = 40, 16
COST_PROMPTS = 8


def demo(
    pair: str | None = None,
    out: str = "runs/demo",
    temperature: float = 1.0,
    top_k: int = 50,
    max_new_tokens: int = 80,
    train_prompts: int = 480,
    dev_prompts: int = 64,
    test_prompts: int = 160,
    processes: int | None = None,
    seed: int = 0,
) -> None:
    """Train a head for the embedded pair and compare it with fixed draft lengths on held-out prompts.

    Args:
        pair: Folder with `target`, `draft` and `prompts`; checkpoints/tiny of this repository when left out.
        out: Folder for traces, head and summary.json. What an earlier demo left there is replaced.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Most likely tokens kept.
        max_new_tokens: Longest response, in tokens.
        train_prompts: Prompts to collect training traces on.
        dev_prompts: Prompts to evaluate the head and choose its threshold on.
        test_prompts: Held-out prompts to decode with every policy.
        processes: Processes that decode side by side, one thread each; as many as there are cores, at most 4, when left
            out. They change nothing but the time.
        seed: Seed of everything.
    """
    start = time.monotonic()
    console = make_console(unseen_width=118)
    folder = Path(pair) if pair else Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"
    if not (folder / "target").is_dir():
        raise InputError(f"--pair {folder}: no embedded pair there; run the demo from a checkout, or give --pair")
    sampling = Sampling(temperature=temperature, top_k=top_k)
    counts = {"train": train_prompts, "dev": dev_prompts, "test": test_prompts}
    numbers = {f"{split}_prompts": count for split, count in counts.items()}
    numbers |= {"max_new_tokens": max_new_tokens, "processes": 1 if processes is None else processes}
    for name, value in numbers.items():
        if value < 1:
            raise InputError(f"{name} is {value}, expected a positive integer")
    output = _clean(writable_folder(Path(out)))  # after all checks, so a refused call keeps an earlier demo

    console.rule("1/5  collect: the target answers, the draft's proposals are coupled and scored")
    for split in SPLITS:
        collect(
            target=str(folder / "target"),
            draft=str(folder / "draft"),
            prompts=str(folder / "prompts" / f"{split}.jsonl"),
            out=str(output / "traces" / split),
            temperature=temperature,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            max_prompts=counts[split],
            batch_size=COLLECT_BATCH,
            shard_size=2 * COLLECT_BATCH,
            seed=seed,
        )

    console.rule("2/5  train: an acceptance prediction head on the frozen draft")
    head = output / "head"
    train(
        traces=str(output / "traces" / "train"),
        dev_traces=str(output / "traces" / "dev"),
        draft=str(folder / "draft"),
        out=str(head),
        seed=seed,
    )

    console.rule("3/5  profile and tune: what a forward costs here, and every setting replayed on the dev traces")
    loaded = load_pair(folder / "target", folder / "draft")
    dev, test = (
        load_prompts(str(folder / "prompts" / f"{split}.jsonl"), loaded.tokenizer, max_prompts=counts[split])
        for split in ("dev", "test")
    )
    costs = regress_rounds(loaded, [prompt.ids for prompt in dev[:COST_PROMPTS]]).costs
    write_json(output / "costs.json", asdict(costs))
    tune(
        traces=str(output / "traces" / "dev"),
        draft=str(folder / "draft"),
        head=[str(head)],
        costs=str(output / "costs.json"),
        rules=TUNED_RULES,
        out=str(output / "tuned.json"),
    )

    console.rule("4/5  decode: held-out prompts, every policy, really run")
    job = DecodeJob(folder, sampling, max_new_tokens, seed)
    chosen = _tuned(output / "tuned.json", head)
    grid = {f"head:{h}": (f"head:{head}:{h}", {"threshold": h, "k_min": 1, "k_max": 20}) for h in THRESHOLDS}
    fixed = {f"fixed:{k}": (f"fixed:{k}", {"k": k}) for k in FIXED_K}
    policies = {"none": ("none", {})} | fixed | grid | chosen
    measured = _decode_all(job, processes or min(4, os.cpu_count() or 1), policies, test)
    measured.append(_oracle(output / "traces" / "test"))
    rows = compare(measured, costs)
    tuned_head = next(iter(chosen))
    write_json(
        output / "summary.json",
        {
            "costs": asdict(costs),
            "sampling": job.sampling.to_dict(),
            "prompts": len(test),
            "max_new_tokens": max_new_tokens,
            "chosen_on_dev": list(chosen),
            "policies": rows,
        },
    )
    console.print(_table(rows, list(chosen)))
    console.print(_sentence(rows, tuned_head, len(test)))

    console.rule("5/5  report: the same policies replayed on the test traces, with plots and every round")
    report(
        traces=str(output / "traces" / "test"),
        draft=str(folder / "draft"),
        head=[str(head)],
        tuned=str(output / "tuned.json"),
        out=str(output / "report.html"),
    )
    console.print(f"{output / 'summary.json'} holds these numbers; {head} is the head.", highlight=False)
    console.print(f"Took {(time.monotonic() - start) / 60:.1f} minutes.", highlight=False)


@dataclass(frozen=True)
class DecodeJob:
    """What a decoding process needs to know."""

    folder: Path
    sampling: Sampling
    max_new_tokens: int
    seed: int


def _decode_all(
    job: DecodeJob, processes: int, policies: dict[str, tuple[str, dict[str, Any]]], prompts: Sequence[Prompt]
) -> list[Measured]:
    """Decode all prompts with each policy, in processes that each hold the pair. policies: name → (SPEC, params)."""
    batches = [prompts[start : start + DECODE_BATCH] for start in range(0, len(prompts), DECODE_BATCH)]
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    measured = []
    # Spawned, because threads of torch and tokenizers do not survive a fork.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start_decoder, initargs=(job,))
    try:
        futures = {name: [pool.submit(_decode, spec, b) for b in batches] for name, (spec, _) in policies.items()}
        with Progress(*columns) as progress:
            task = progress.add_task("decode", total=len(policies) * len(batches))
            for name, mine in futures.items():
                progress.update(task, description=f"decode {name:10}")
                counts: list[DecodeCounts] = []
                for future in mine:
                    counts += future.result()
                    progress.advance(task)
                measured.append(_measured(name, policies[name][1], counts))
    finally:
        pool.shutdown(cancel_futures=True)
    return measured


def _measured(name: str, params: dict[str, Any], counts: Sequence[DecodeCounts]) -> Measured:
    return Measured(name=name, params=params, counts=np.array([astuple(count) for count in counts]))


_decoder: tuple[DecodeJob, Pair] | None = None  # of this process


def _start_decoder(job: DecodeJob) -> None:
    global _decoder
    torch.set_num_threads(1)
    quiet_libraries()
    _decoder = job, load_pair(job.folder / "target", job.folder / "draft")


def _decode(spec: str, batch: Sequence[Prompt]) -> list[DecodeCounts]:
    assert _decoder is not None
    job, pair = _decoder
    _, stats = generate(
        pair.target,
        pair.draft,
        [prompt.ids for prompt in batch],
        policy=make_policy(spec, pair),
        sampling=job.sampling,
        max_new_tokens=job.max_new_tokens,
        seed=job.seed,
        row_ids=[prompt.index for prompt in batch],
    )
    return [row.counts for row in stats]


def _tuned(path: Path, head: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The settings that `tune` chose for the head, and the best rule that needs no training: name → (SPEC, params).

    A name is the SPEC without the head's path.
    """
    rows = [row for row in read_json(path)["policies"] if "threshold" in row["params"]]
    heads = [row for row in rows if row["name"].startswith("head:")]
    rival = max((row for row in rows if row not in heads), key=lambda row: row["throughput"])
    return {row["spec"].replace(f"head:{head}", "head"): (row["spec"], row["params"]) for row in (*heads, rival)}


def _oracle(folder: Path) -> Measured:
    """Theorem 4.1 on the coupled traces of the test prompts."""
    _, traces = read_traces(folder)
    counts = [oracle_counts(generated=len(row), rejections=row[:-1].count(False)) for row in traces["accepted"]]
    return _measured("oracle", {}, counts)


def _table(rows: list[dict[str, Any]], tuned: Sequence[str]) -> Table:
    table = Table(
        title="held-out prompts; throughput by eq. 3.1 with the forward times measured above",
        caption="* chosen on the dev prompts, by replay",
    )
    for column in ("policy", "discard\nrate", "verification\nrate", "tokens/s", "speed-up", "gain over\nbest fixed K"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    table.add_column("oracle gap\nclosed", justify="right")
    for row in rows:
        chosen = row["name"] in tuned
        table.add_row(
            f"{row['name']}{' *' if chosen else ''}",
            f"{row['discard_rate']:.3f}",
            f"{row['verification_rate']:.3f}",
            f"{row['throughput']:.0f}",
            f"{row['speedup']:.3f}x",
            f"{100 * row['gain_over_best_fixed']:+.1f} %",
            f"{100 * row['oracle_gap_closed']:+.1f} %",
            style="bold" if chosen else None,
        )
    return table


def _sentence(rows: list[dict[str, Any]], tuned: str, prompts: int) -> str:
    chosen = next(row for row in rows if row["name"] == tuned)
    fixed = max((row for row in rows if row["name"].startswith("fixed:")), key=lambda row: row["throughput"])
    low, high = (100 * bound for bound in chosen["ci95"]["oracle_gap_closed"])
    gain, gap = 100 * chosen["gain_over_best_fixed"], 100 * chosen["oracle_gap_closed"]
    return (
        f"On {prompts} held-out prompts the head ({tuned}) decodes {chosen['speedup']:.2f}x as fast as "
        f"the target alone and {abs(gain):.1f} % {'faster' if gain > 0 else 'slower'} than the best fixed draft length "
        f"(K = {fixed['params']['k']}), which {'closes' if gap > 0 else 'is'} {gap:.1f} % of the gap to an oracle "
        f"that knows every rejection (95 % interval {low:.1f} to {high:.1f} %)."
    )


def _clean(folder: Path) -> Path:
    """Remove the files of an earlier demo, and nothing else."""
    for name in ("traces", "head", "head-run"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / "summary.json", folder / "costs.json", folder / "tuned.json", *folder.glob("report.*")):
        path.unlink(missing_ok=True)
    return folder
