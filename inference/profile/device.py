"""The machine that is measured: its description, that of the software, and waiting for it."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accept_head.inference.engine.cache import Compile
from accept_head.pair import Pair


def conditions(target: str, draft: str, pair: Pair, compile: Compile) -> dict[str, Any]:
    """The conditions of a measurement, for its file."""
    return {
        "target": target,
        "draft": draft,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "compile": compile,
        "device": device_name(pair.target.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("accept-head", "torch", "transformers")}


def command_line() -> str:
    """The command that this process was started with."""
    return shlex.join(["accept-head", *sys.argv[1:]])


def device_name(device: torch.device) -> str:
    """The processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")  # on Linux
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def finish(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
