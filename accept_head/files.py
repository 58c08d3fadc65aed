"""Atomic writing of files: a reader, or a run after `kill -9`, never sees half a file. Also strict reading of JSON."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from accept_head.errors import InputError

HALF_PAIR = "half of a surrogate pair, \\ud800 to \\udfff, is no text"
DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
_unfinished: set[Path] = set()  # temporary files of this process


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file or folder name beside `path`. On success it is renamed to `path`, on failure removed.

    Temporary files that killed processes left for `path` are removed first. Raises OSError naming `path` when the disk
    is full, whatever error the writing library raised.
    """
    for left in _left_behind(path):
        _remove(left)
    temporary = _temporary(path)
    _unfinished.add(temporary)
    try:
        yield temporary
        _replace(temporary, path)
    except Exception as error:
        if (fault := machine_fault(error)) is None:
            raise
        raise OSError(fault.errno, fault.strerror, str(path)) from error
    finally:
        _remove(temporary)
        _unfinished.discard(temporary)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:4]}.partial")


def _left_behind(path: Path) -> list[Path]:
    """Temporary files for `path` from dead processes of this host. Files from other hosts may be in use."""
    found = []
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HOST}-*.partial"):
        process = int(left.name.split("-")[-2])
        if left not in _unfinished if process == os.getpid() else not psutil.pid_exists(process):
            found.append(left)
    return found


def _replace(temporary: Path, path: Path) -> None:
    if not (temporary.is_dir() and path.is_dir() and not path.is_symlink()):
        os.replace(temporary, path)
        return
    aside = _temporary(path)  # a folder cannot be renamed over a folder with files
    os.rename(path, aside)
    try:
        os.replace(temporary, path)
    except OSError:
        os.rename(aside, path)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    """Remove a temporary file or folder as far as possible. The rest is hidden, and nothing reads it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def machine_fault(error: BaseException | None) -> OSError | None:
    """The OSError behind an exception that comes from a full, read-only or broken disk or a missing permission.

    None for any other exception. Libraries in Rust name the error only in their message.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            return error
        if isinstance(error, PermissionError) and error.filename:
            return error
        if (said := re.search(r"\(os error (\d+)\)", str(error))) and int(said[1]) in DISK_FAULTS:
            return OSError(int(said[1]), os.strerror(int(said[1])))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON strictly. Raises ValueError, or RecursionError when it is nested too deeply.

    Refuses NaN and infinity, numbers that fit neither a float nor a 64-bit integer, and half surrogate pairs.
    """
    value = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_no_constant)
    if has_half_pairs(text, value):
        raise ValueError(HALF_PAIR)
    return value


def has_half_pairs(text: str, value: Any) -> bool:
    """Whether a value read from JSON contains half a surrogate pair.

    JSON can express one (\\ud800), but it cannot be written as UTF-8.
    """
    if "\\ud" not in text.lower():
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def is_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(f"the number {text[:24]} is too large")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:24]} is too large")
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises InputError naming the file when it is missing or not a JSON object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def writable_folder(path: Path, option: str = "--out") -> Path:
    """Make the folder if necessary, and test that it can be written to. Raises InputError naming the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # has no name, so a kill leaves nothing
            pass
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written to ({error.strerror})") from None
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes of ours out of a folder. Raises InputError naming it when one is at work there."""
    path = folder / ".lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another accept-head process is at work there; wait, or give another --out"
            ) from None
        yield


def writable_file(path: Path, option: str = "--out") -> Path:
    """Test that a file can be written there. Raises InputError naming the option."""
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder, expected a file")
    writable_folder(path.parent, option)
    return path


def readable_size(count: float) -> str:
    """A number of bytes as text, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
