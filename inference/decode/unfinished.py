"""Records of an unfinished run, in a hidden file beside its output, so that an interrupted run can resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accept_head.files import atomic_path, sha256


class Unfinished:
    """Records by their `index`. settings: all settings that records depend on; records of a run with other settings are
    ignored. Add records inside `with`."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.hidden = path, path.with_name(f".{path.name}.unfinished")
        self.first_line = json.dumps({"settings": sha256(json.dumps(settings, sort_keys=True))})
        self.records: dict[int, dict[str, Any]] = {}
        if self.hidden.is_file():
            first, *lines = self.hidden.read_text(encoding="utf-8").split("\n")
            if first == self.first_line:
                self._read(lines)

    def _read(self, lines: Sequence[str]) -> None:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # the line that a killed run was writing
                continue
            self.records[record["index"]] = record

    def __enter__(self) -> Unfinished:
        with atomic_path(self.hidden) as temporary:
            lines = [self.first_line, *(json.dumps(record) for record in self.records.values())]
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.file = self.hidden.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, record: dict[str, Any]) -> None:
        self.records[record["index"]] = record
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def forget(self) -> None:
        """Delete the hidden file, once the output is written."""
        self.hidden.unlink(missing_ok=True)
