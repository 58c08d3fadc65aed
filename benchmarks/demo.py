"""Question: what does the demo measure on this machine? Runs it and keeps its summary, with where and when.

python benchmarks/demo.py    # benchmarks/results/demo.json
"""

from __future__ import annotations

import os
import subprocess
import sys

from record import REPOSITORY, write_result

from accept_head.files import read_json


def main() -> None:
    options = ["demo", "--out", "runs/demo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "accept_head", *options], cwd=REPOSITORY, env=environment, check=True)
    folder = REPOSITORY / "runs" / "demo"
    found = {"summary": read_json(folder / "summary.json"), "head_metrics": read_json(folder / "head" / "metrics.json")}
    write_result("demo", found, command="accept-head " + " ".join(options))


if __name__ == "__main__":
    main()
