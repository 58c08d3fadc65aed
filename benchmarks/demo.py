"""Question: what does the demo measure on this machine? Runs it and keeps its summary, with where and when.

python benchmarks/demo.py                    # benchmarks/results/demo.json
python benchmarks/demo.py --temperature 0    # benchmarks/results/demo_greedy.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from record import REPOSITORY, write_result

from accept_head.files import read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=1.0)
    temperature = parser.parse_args().temperature
    name = "demo" if temperature else "demo_greedy"
    options = ["demo", "--out", f"runs/{name}"] + ([] if temperature == 1 else ["--temperature", f"{temperature:g}"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "accept_head", *options], cwd=REPOSITORY, env=environment, check=True)
    write_result(
        name,
        {
            "summary": read_json(REPOSITORY / "runs" / name / "summary.json"),
            "head_metrics": read_json(REPOSITORY / "runs" / name / "head" / "metrics.json"),
        },
        command="accept-head " + " ".join(options),
    )


if __name__ == "__main__":
    main()
