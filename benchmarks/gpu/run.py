"""Runs the parts of the GPU benchmark, each in a process of its own, within a number of minutes.

    a  overhead.py            loop overhead at the shapes of Llama 3 8B and 1B, recorded acceptance
    b  whole_flow.py          a pair trained here; collect, sweep, tune, bench; transformers' assisted generation
    c  head_sweep.py          20 heads at once, one by one, and by a plain loop
    d  collect_speed.py       tokens a second of responses and of scoring
    e  greedy_divergence.py   greedy text in bf16: speculative, and at another batch size
    h  head_cost.py           head and signals next to a draft forward

Every part writes OUT/PART.json after each cell and goes on where it was: run the same command again. A part that fails
or runs out of time does not stop the others; the exit status is 1 then. In the end: the table of aims.

python benchmarks/gpu/run.py --part a c --minutes 9 [--out FOLDER] [--work FOLDER] [--seed FOLDER] [--tiny]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import versions
from aims import report
from cells import REPOSITORY

HERE = Path(__file__).resolve().parent
SCRIPTS = {
    "a": "overhead.py",
    "b": "whole_flow.py",
    "c": "head_sweep.py",
    "d": "collect_speed.py",
    "e": "greedy_divergence.py",
    "h": "head_cost.py",
}
# Shares of the minutes of a part, next to the others that run; what one leaves over goes to those behind it.
WEIGHTS = {"a": 4.0, "b": 9.0, "c": 3.5, "d": 0.8, "e": 1.0, "h": 1.0}
GRACE = 40.0  # seconds for a cell that was begun in time, and for starting up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu")
    parser.add_argument("--work", type=Path, help="models and traces, which stay; OUT/work when left out")
    parser.add_argument("--text", type=Path, help="of part b: folder made by prepare_text.py")
    parser.add_argument("--stages", nargs="+", help="of part b: train, flow, bench, assisted")
    parser.add_argument("--seed", type=Path, help="folder with the JSON files of earlier commands, to go on from")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    versions.main()  # a mismatch explains what fails later
    work = options.work or options.out / "work"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.seed:
        take_over(options.seed, options.out)
    end = time.monotonic() + 60 * options.minutes
    failed = []
    for place, part in enumerate(options.part):
        left = end - time.monotonic()
        seconds = share(options.part[place:], left)
        if not run_part(part, seconds, left, work, options):
            failed.append(part)
    report(options.out)
    if failed:
        print(f"not whole: {', '.join(SCRIPTS[part] for part in failed)}", flush=True)
    return 1 if failed else 0


def share(parts: list[str], left: float) -> float:
    """Seconds of the first of these parts, which have so many together."""
    weights = [WEIGHTS[part] for part in parts]
    return left * weights[0] / sum(weights)


def run_part(part: str, seconds: float, most: float, work: Path, options: argparse.Namespace) -> bool:
    """Whether it did all that it was asked to. seconds: after which it begins no cell; most: that it may take."""
    script = HERE / SCRIPTS[part]
    print(f"--- {part}: {script.name}, {seconds / 60:.1f} minutes", flush=True)
    if not script.is_file():
        print(f"{script.name} is not there", flush=True)
        return False
    command = [sys.executable, "-u", str(script), "--out", str(options.out), "--work", str(work)]
    command += ["--minutes", f"{seconds / 60:.2f}"] + (["--tiny"] if options.tiny else [])
    if part == "b":
        command += ["--text", str(options.text)] if options.text else []
        command += ["--stages", *options.stages] if options.stages else []
    limit = min(seconds + GRACE, most) if part != options.part[-1] else most
    try:
        done = subprocess.run(command, timeout=max(limit, 10.0))
    except subprocess.TimeoutExpired:
        print(f"{script.name} was ended after {limit:.0f} s; its cells so far are written", flush=True)
        return False
    return done.returncode == 0


def take_over(folder: Path, out: Path) -> None:
    """Files of earlier commands that OUT does not have."""
    for script in SCRIPTS.values():
        name = Path(script).with_suffix(".json").name
        if (folder / name).is_file() and not (out / name).exists():
            shutil.copy(folder / name, out / name)


if __name__ == "__main__":
    raise SystemExit(main())
