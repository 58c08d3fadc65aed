"""Question: what does the demo measure on this machine? Runs it and keeps its summary, with where and when.

python benchmarks/demo.py                    # benchmarks/results/demo.json
python benchmarks/demo.py --temperature 0    # benchmarks/results/demo_greedy.json
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from accept_head.files import read_json, write_json

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=1.0)
    temperature = parser.parse_args().temperature
    name = "demo" if temperature else "demo_greedy"
    options = ["demo", "--out", f"runs/{name}"] + ([] if temperature == 1 else ["--temperature", f"{temperature:g}"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "accept_head", *options], cwd=REPOSITORY, env=environment, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    write_json(
        REPOSITORY / "benchmarks" / "results" / f"{name}.json",
        {
            "command": "OMP_NUM_THREADS=1 accept-head " + " ".join(options),
            "commit": commit,
            "versions": {package: version(package) for package in ("accept-head", "torch", "transformers")},
            "hardware": f"{processor()}, {os.cpu_count()} cores",
            "date": datetime.date.today().isoformat(),
            "summary": read_json(REPOSITORY / "runs" / name / "summary.json"),
            "head_metrics": read_json(REPOSITORY / "runs" / name / "head" / "metrics.json"),
        },
    )


def processor() -> str:
    """The processor's name, where Linux tells it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
