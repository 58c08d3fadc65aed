"""Question: what does a sweep of 20 heads cost next to one head?

The paper's grid (SpecDec++ table 3: depth 0 to 4, w_rej 1, 3, 6, 12) in one `accept-head train`, against the same
command for one head, of depth 3 and of the largest depth. Whole processes with their start-up run in turns, so that a
slow moment of the machine touches all of them. The fastest of the repeats counts, and CPU seconds stand beside it.
`fit` is the training alone. All of it runs on two threads (`--threads`; two is what `accept-head train` takes by itself
on two cores: the draft runs a batch ahead of the heads), and on one. Then: how far the weights of the sweep's heads are
from those of the heads trained alone.

OMP_NUM_THREADS=1 python benchmarks/sweep.py [--repeats 3] [--threads 2 1] [--traces FOLDER with train and dev]
"""

from __future__ import annotations

import argparse
import datetime
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import REPOSITORY, RESULTS, TINY, write_result
from safetensors.torch import load_file

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.trace.shards import read_traces
from accept_head.training.collect.verb import collect

DEPTHS, WEIGHTS = (0, 1, 2, 3, 4), (1, 3, 6, 12)
RECIPES = {"default": 1, "specdecpp": 6}  # and the w_rej of a head trained alone
COUNTS = {"train": 480, "dev": 64}  # traces, as in the demo
CHECKED = ((0, 1), (1, 12), (3, 6), (4, 3))  # depth, w_rej

# `accept-head train`, which says how long Trainer.fit took.
PROGRAM = """
import sys, time
from accept_head import cli
from accept_head.command.allocator import keep_freed_blocks
keep_freed_blocks()
import lightning
fit = lightning.Trainer.fit
def timed(*arguments, **options):
    start = time.perf_counter()
    fit(*arguments, **options)
    print("fit seconds", time.perf_counter() - start)
lightning.Trainer.fit = timed
raise SystemExit(cli.main(sys.argv[1:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--traces", default=str(REPOSITORY / "runs" / "demo" / "traces"))
    parser.add_argument("--recipe", choices=RECIPES)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        traces = usable_traces(Path(options.traces), folder)
        recipes = [options.recipe] if options.recipe else list(RECIPES)
        measured = {recipe: measure(recipe, traces, folder, options) for recipe in recipes}
    settings = {"traces": COUNTS, "depth": DEPTHS, "w_rej": WEIGHTS}
    print(f"wrote {write_result('sweep', {**settings, 'recipes': measured_before() | measured})}")


def measured_before() -> dict[str, Any]:
    """Of a recipe that is not measured now."""
    path = RESULTS / "sweep.json"
    before: dict[str, Any] = read_json(path)["recipes"] if path.is_file() else {}
    return before


def usable_traces(folder: Path, temporary: Path) -> Path:
    """The demo's traces if they are there, else new ones like them."""
    try:
        if all(len(read_traces(folder / split)[1]) == count for split, count in COUNTS.items()):
            return folder
    except InputError as error:
        print(f"collecting traces: {error}")
    for split, count in COUNTS.items():
        collect(
            target=str(TINY / "target"),
            draft=str(TINY / "draft"),
            prompts=str(TINY / "prompts" / f"{split}.jsonl"),
            out=str(temporary / "traces" / split),
            temperature=1.0,
            top_k=50,
            max_new_tokens=80,
            max_prompts=count,
            batch_size=40,
            shard_size=80,
        )
    return temporary / "traces"


def measure(recipe: str, traces: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By the number of threads."""
    weight = RECIPES[recipe]
    jobs: dict[str, dict[str, Any]] = {
        "depth3": {"depth": 3, "w_rej": weight},
        "depth4": {"depth": 4, "w_rej": weight},
        "sweep": {"depth": as_list(DEPTHS), "w_rej": as_list(WEIGHTS)},
    }
    times: dict[int, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(options.repeats):
        for threads in options.threads:
            of_job = times.setdefault(threads, {name: [] for name in jobs})
            for name, settings in jobs.items():
                out = folder / f"{recipe}-{threads}-{name}"
                of_job[name].append(train(recipe, traces, out, {**settings, "threads": threads}))
                rounded = {key: round(value, 1) for key, value in of_job[name][-1].items()}
                print(recipe, repeat, f"{threads} threads", name, rounded, flush=True)
    sweeps = [folder / f"{recipe}-{threads}-sweep" for threads in options.threads]
    alone: dict[int, list[dict[str, float]]] = {threads: of_job["depth3"][:1] for threads, of_job in times.items()}
    differences = {}
    for number, (depth, w_rej) in enumerate(CHECKED):
        threads = options.threads[number % len(options.threads)]
        settings = {"depth": depth, "w_rej": w_rej, "threads": threads}
        alone[threads].append(train(recipe, traces, folder / "alone", settings))
        head = f"depth{depth}-w_rej{w_rej}"
        differences[head] = max(largest_difference(sweep / head, folder / "alone") for sweep in sweeps)
    result = {
        "date": datetime.date.today().isoformat(),  # the recipes of the file may be of several runs
        "repeats": options.repeats,
        "by_threads": {threads: figures(of_job, alone[threads]) for threads, of_job in times.items()},
        "largest_weight_difference_to_alone": differences,
    }
    for threads, of_threads in result["by_threads"].items():
        print(recipe, threads, {name: value for name, value in of_threads.items() if name != "all_repeats"}, flush=True)
    print(differences, flush=True)
    return result


def figures(times: dict[str, list[dict[str, float]]], alone: list[dict[str, float]]) -> dict[str, Any]:
    """times: of each job, its repeats. alone: of single heads of several depths."""
    best = {name: {key: min(one[key] for one in ones) for key in ones[0]} for name, ones in times.items()}
    each = {key: sum(one[key] for one in alone) / len(alone) for key in alone[0]}
    heads = len(DEPTHS) * len(WEIGHTS)
    return {
        "seconds": best,
        "all_repeats": times,
        "sweep_over_one_head": {
            name: {key: best["sweep"][key] / best[name][key] for key in best[name]} for name in ("depth3", "depth4")
        },
        "all_heads_alone_over_sweep": {key: heads * each[key] / best["sweep"][key] for key in each},
    }


def train(recipe: str, traces: Path, out: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of one command: wall, cpu (user and system) and fit (wall). What was at `out` before is removed."""
    for path in (out, out.with_name(f"{out.name}-run")):
        shutil.rmtree(path, ignore_errors=True)
    data = ["--traces", str(traces / "train"), "--dev_traces", str(traces / "dev"), "--draft", str(TINY / "draft")]
    words = [*data, "--recipe", recipe, "--out", str(out), *(f"--{name}={value}" for name, value in settings.items())]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROGRAM, "train", *words], capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr)
    fit = next(float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("fit seconds"))
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "fit": fit}


def largest_difference(one: Path, other: Path) -> float:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max((first[name] - second[name]).abs().max().item() for name in first)


def as_list(values: tuple[int, ...]) -> str:
    return str(list(values)).replace(" ", "")


if __name__ == "__main__":
    main()
