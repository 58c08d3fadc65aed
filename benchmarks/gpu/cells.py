"""A part's results: one JSON file, written after every cell, so that a command that is cut off loses nothing.

A cell that is there under the same settings is not measured again. One that could not be measured says why: no cell is
left out without a word.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from versions import versions

from accept_head.errors import InputError
from accept_head.files import read_json, write_json
from accept_head.inference.profile.device import device_name
from accept_head.pair import default_device

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "checkpoints" / "tiny"
sys.path.append(str(REPOSITORY / "benchmarks"))  # scripts here import their elders: record, vs_transformers
sys.path.append(str(REPOSITORY / "checkpoints" / "recipe"))

Cell = dict[str, Any]


class Cells:
    """The cells of one part. minutes: after which no further cell is begun. copy: a second file, from which a later
    command goes on where the first is gone."""

    def __init__(
        self,
        part: str,
        path: Path,
        *,
        minutes: float,
        tiny: bool,
        settings: dict[str, Any] | None = None,
        copy: Path | None = None,
    ):
        self.part, self.tiny = part, tiny
        self.files = [path] + ([copy] if copy else [])
        self.end = time.monotonic() + 60 * minutes
        self.where = where()
        self.settings = settings or {}
        self.cells: dict[str, Cell] = {}
        self.asked: list[str] = []
        for file in self.files:
            if not self.cells and file.is_file() and (old := _read(file)).get("device") == self.where["device"]:
                self.cells = {cell["cell"]: cell for cell in old.get("cells", [])}

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def measure(
        self,
        name: str,
        settings: dict[str, Any],
        call: Callable[[], Cell],
        *,
        needs: float = 0.0,
        made: Path | None = None,
        after: Sequence[Cell] = (),
    ) -> Cell:
        """The cell of this name: as it is there, or as `call` measures it now.

        needs: seconds that it takes, about, where it is not tiny. made: what it leaves on the disk: the cell counts
        only while that is there. after: cells without which it cannot be measured.
        """
        asked = {**settings, "tiny": self.tiny}
        self.asked.append(name)
        old = self.cells.get(name)
        there = made is None or made.exists()
        if old is not None and old.get("settings") == asked and is_measured(old) and there:
            print(f"{self.part}: {name}: is there", flush=True)
            return old
        cell: Cell = {"cell": name, "settings": asked}
        missing = [other["cell"] for other in after if not is_measured(other)]
        if missing:
            cell["not_run"] = f"needs {missing[0]}"
        elif self.seconds_left < (0 if self.tiny else needs) or self.seconds_left <= 0:
            left = max(0.0, self.seconds_left)
            cell["not_run"] = f"{left:.0f} s left, takes about {needs:.0f} s"
        else:
            begin = time.monotonic()
            try:
                cell |= call()
            except Exception as error:  # whatever it is, the other cells can still be measured
                cell["error"] = f"{type(error).__name__}: {error}"
                cell["traceback"] = traceback.format_exc().splitlines()[-12:]
                traceback.print_exc()
            cell["cell_seconds"] = round(time.monotonic() - begin, 2)
        self.cells[name] = cell
        self.write()
        print(f"{self.part}: {name}: {_short(cell)}", flush=True)
        return cell

    def write(self, **more: Any) -> None:
        self.settings |= more
        values = {"part": self.part, **self.where, "tiny": self.tiny, **self.settings}
        for file in self.files:
            write_json(file, {**values, "cells": list(self.cells.values())})

    @property
    def status(self) -> int:
        """1 if a cell that was asked for could not be measured."""
        return int(not all(is_measured(self.cells[name]) for name in self.asked))


def is_measured(cell: Cell) -> bool:
    return "not_run" not in cell and "error" not in cell


def where() -> dict[str, Any]:
    """Command, versions, hardware and date of this process."""
    device = default_device()
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
    return {
        "command": " ".join(["python", str(Path(sys.argv[0])), *sys.argv[1:]]),
        "commit": _commit(),
        "versions": versions(),
        "device": device_name(device),
        "device_memory_gib": memory and round(memory, 1),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }


def part_parser(text: str | None) -> argparse.ArgumentParser:
    """What every part can be told."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu", help="folder of the JSON files")
    parser.add_argument("--work", type=Path, help="folder of models and traces; OUT/work when left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no cell after so many minutes")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few prompts: tests the script, any device")
    return parser


def open_cells(part: str, options: argparse.Namespace, **settings: Any) -> tuple[Cells, Path]:
    """The part's file in --out, with a copy in --work, and the folder --work."""
    work = options.work or options.out / "work"
    path, copy = options.out / f"{part}.json", work / "results" / f"{part}.json"
    for folder in (options.out, copy.parent):
        folder.mkdir(parents=True, exist_ok=True)
    cells = Cells(part, path, minutes=options.minutes, tiny=options.tiny, settings=settings, copy=copy)
    return cells, work


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = read_json(path)
    except InputError:
        return {}
    return values


def _commit() -> str:
    """On the device machine there may be no git, and the command says it."""
    if given := os.environ.get("COMMIT"):
        return given
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _short(cell: Cell) -> str:
    kept = {k: v for k, v in cell.items() if k not in ("cell", "settings", "traceback")}
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in kept.items() if not isinstance(v, dict | list)}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
