"""Writing files so that a reader, or a run after `kill -9`, never sees half of one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accept_head.errors import InputError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file or folder name beside `path`; on success it is renamed to `path`, on failure removed."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield temporary
        if temporary.is_dir() and path.exists():  # a folder cannot be renamed over one that has files
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises InputError naming the file when it is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def writable_folder(path: Path, option: str = "--out") -> Path:
    """Make the folder if need be and prove that it can be written to. Raises InputError naming the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{uuid.uuid4().hex[:8]}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written to ({error.strerror})") from None
    return path


def writable_file(path: Path, option: str = "--out") -> Path:
    """Prove that a file can be written there. Raises InputError naming the option."""
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder, expected a file")
    writable_folder(path.parent, option)
    return path


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
