"""The files that `tune` writes: its comparison, and `decoding.json` beside each head."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accept_head.files import writable_file, write_json
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.tune.search import Tuned
from accept_head.version import VERSION

DECODING_NAME = "decoding.json"


def write_tuned(path: Path, tuned: Tuned, rows: list[dict[str, Any]]) -> None:
    """Write the comparison of all policies."""
    values = {
        "costs": asdict(tuned.costs),
        "objective": tuned.objective,
        "traces": described(tuned.traces),
        "policies": rows,
        "date": datetime.date.today().isoformat(),
    }
    write_json(path, values)


def decoding_files(heads: Iterable[str]) -> dict[str, Path]:
    """The file of the choice for each head that is a local folder. Raises InputError when one cannot be written."""
    local = [name for name in heads if Path(name).is_dir()]
    return {name: writable_file(Path(name) / DECODING_NAME, "--head") for name in local}


def decoding(tuned: Tuned, head: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `decoding.json`: how to decode with this head, for which costs, and the expected results."""
    chosen = tuned.chosen[head]
    row = next(row for row in rows if row["name"] == chosen.name and row["params"] == chosen.params)
    return {
        **chosen.params,
        "objective": tuned.objective,
        "costs": asdict(tuned.costs),
        "expected": {name: value for name, value in row.items() if name not in ("name", "params", "spec")},
        "best_fixed": tuned.best_fixed.params["k"],
        "traces": described(tuned.traces),
        "accept_head": VERSION,
        "date": datetime.date.today().isoformat(),
    }


def described(traces: CoupledTraces) -> dict[str, Any]:
    """A description of the traces that figures were computed on."""
    return {
        "fingerprint": traces.config.fingerprint(),
        "prompts": len(traces.lengths),
        "tokens": traces.positions,
        "sampling": traces.config.sampling.to_dict(),
        "max_new_tokens": traces.config.max_new_tokens,
    }
