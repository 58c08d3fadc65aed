"""What every result file says of itself: command, versions, hardware, date."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accept_head.files import write_json
from accept_head.inference.profile.device import device_name
from accept_head.pair import default_device

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
TINY = REPOSITORY / "checkpoints" / "tiny"
THREADS = os.environ.get("OMP_NUM_THREADS")  # as the caller set it: vllm_engines.py sets a default of its own


def write_result(name: str, result: dict[str, Any], command: str | None = None) -> Path:
    """Write benchmarks/results/NAME.json: where and when it was measured, then `result`."""
    path = RESULTS / f"{name}.json"
    write_json(path, circumstances(command) | result)
    return path


def circumstances(command: str | None = None) -> dict[str, Any]:
    """Where and when something was measured. command: this process's when left out."""
    threads = f"OMP_NUM_THREADS={THREADS} " if THREADS else ""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    script = Path(sys.argv[0]).resolve()
    return {
        "command": threads + (command or " ".join(["python", str(script.relative_to(REPOSITORY)), *sys.argv[1:]])),
        "commit": commit,
        "versions": {package: version(package) for package in ("accept-head", "torch", "transformers")},
        "hardware": f"{device_name(default_device())}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
