"""What a command has written, and whether two runs of it wrote the same."""

from __future__ import annotations

import itertools
import json


def content(folder, *, hidden=True):
    """{path: bytes} of all files, but for logs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not (set(path.parts) & {"csv", "tensorboard"}) and (hidden or path.name[0] != ".")
    }


def the_same(one, other):
    """Whether all files are: but for seconds, dates, and the checkpoint, which holds its own path."""
    if set(one) != set(other):
        return False
    for name in one:
        if name.endswith(".ckpt") or name.endswith("stats.json"):
            continue
        pair = [one[name], other[name]]
        if name.endswith((".json", ".jsonl")):
            pair = [[json.loads(line) for line in _lines(name, data)] for data in pair]
            for values in itertools.chain(*pair):
                for timed in ("date", "seconds"):
                    values.pop(timed, None)
        if pair[0] != pair[1]:
            return False
    return True


def _lines(name, data):
    return data.splitlines() if name.endswith(".jsonl") else [data]
