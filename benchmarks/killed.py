"""Runs of a command that are killed with SIGKILL, and run again, until one of them ends by itself.

Commands run in forks of this process, which has imported the libraries already, so that a random moment falls into the
work and not into seconds of imports (tests/integration/warm_cli.py).
"""

from __future__ import annotations

import collections
import fnmatch
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "integration"))
warm_cli = importlib.import_module("warm_cli")

MOST_IN_A_ROW = 6  # kills of one work folder, after which it is left to finish
FROM_START = 6.0  # seconds in which a fresh interpreter imports the libraries and begins
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is killed. arguments: of the command line, with paths relative to a work folder where they are written to.

    prepare: fills a fresh work folder with the command's input. stage: says how far the work in a folder has come.
    ignored: patterns of files that differ from run to run. dated: of JSON files that name their date. elsewhere: gives
    artefacts that are not in the folder. environment: of its processes; before: what a fork calls first.
    """

    verb: str
    arguments: Sequence[Any]
    prepare: Callable[[Path], None] = lambda folder: None
    stage: Callable[[Path], str] = lambda folder: ""
    ignored: Sequence[str] = ()
    dated: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None
    elsewhere: Callable[[], dict[str, str]] = lambda: {}

    def artefacts(self, folder: Path) -> dict[str, str]:
        """{path: checksum of its content} of all files, hidden ones too, but for what is ignored."""
        found = {}
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in self.ignored):
                dated = any(fnmatch.fnmatch(name, pattern) for pattern in self.dated)
                found[name] = _checksum(path, dated=dated)
        return found | self.elsewhere()


def _checksum(path: Path, *, dated: bool) -> str:
    content = path.read_bytes()
    if dated:
        values = json.loads(content)
        values.pop("date")
        content = json.dumps(values).encode()
    return hashlib.sha256(content).hexdigest()


def import_libraries() -> None:
    for module in (*warm_cli.PRELOADED, "accept_head.inference.verbs.tune", "accept_head.hub.publish"):
        importlib.import_module(module)


def start(command: Command, folder: Path, *more: Any, kill_at_write: int | None = None) -> int:
    """Start the command in a fork, in `folder`; returns its process id. Its output goes to FOLDER.out and FOLDER.err.

    more: words for its command line. kill_at_write: it kills itself just before it touches a file of the folder for
    that time; 0 counts only, into FOLDER.writes.
    """
    if pid := os.fork():
        return pid
    os.setsid()
    os.chdir(folder)
    for stream in ("out", "err"):
        folder.with_suffix(f".{stream}").unlink(missing_ok=True)
    warm_cli.become(
        {
            "arguments": [str(word) for word in (*command.arguments, *more)],
            "env": dict(command.environment),
            "stdout": str(folder.with_suffix(".out")),
            "stderr": str(folder.with_suffix(".err")),
        }
    )
    writes = _count_writes(folder, kill_at_write) if kill_at_write is not None else []
    code: Any = 1
    try:
        command.before()
        sys.modules["accept_head.cli"].run()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if kill_at_write is not None:
        folder.with_suffix(".writes").write_text(str(len(writes)))
    warm_cli.finish(code)
    raise AssertionError("unreachable")


def _count_writes(folder: Path, kill_at: int) -> list[str]:
    """Watch what this process does to the folder's files; die just before the operation of that number."""
    seen: list[str] = []
    inside = f"{folder.resolve()}{os.sep}"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WRITES and not (event == "open" and _to_write(arguments)):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not os.path.abspath(path).startswith(inside):
            return
        seen.append(event)
        if len(seen) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return seen


def _to_write(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def wait(pid: int, seconds: float | None = None) -> int | None:
    """Exit code of a started command, negative for a signal. After so many seconds it is killed."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() >= end:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.002)


@dataclass
class Killed:
    """What came of it. moments: (seconds, stage) of each kill in time."""

    seconds: list[float]
    writes: int
    moments: list[tuple[float, str]] = field(default_factory=list)
    at_writes: list[tuple[int, str]] = field(default_factory=list)
    at_start: list[float] = field(default_factory=list)
    chains: int = 0
    longest: int = 0
    different: list[str] = field(default_factory=list)
    left_behind: int = 0


def torture(command: Command, place: Path, *, kills: int, write_kills: int, start_kills: int, seed: int) -> Killed:
    """Kill the command so many times at random moments of its work, at random writes, and while it starts; after each
    row of kills it is run to its end, and what it has made compared with an undisturbed run."""
    shutil.rmtree(place, ignore_errors=True)
    draw = random.Random(seed)
    undisturbed, result = _undisturbed(command, place)
    longest = sum(result.seconds) / len(result.seconds)
    while len(result.moments) < kills:
        row = lambda: {"seconds": draw.uniform(0, longest)}  # noqa: E731
        _chain(command, place, result, row, min(MOST_IN_A_ROW, kills - len(result.moments)), undisturbed)
    while result.writes and len(result.at_writes) < write_kills:
        row = lambda: {"write": draw.randint(1, result.writes)}  # noqa: E731
        _chain(command, place, result, row, min(MOST_IN_A_ROW // 2, write_kills - len(result.at_writes)), undisturbed)
    if start_kills:
        row = lambda: {"start": draw.uniform(0, FROM_START)}  # noqa: E731
        _chain(command, place, result, row, start_kills, undisturbed)
    return result


def _undisturbed(command: Command, place: Path) -> tuple[dict[str, str], Killed]:
    """Two runs, which must agree: how long they take, and how often they touch a file."""
    seconds, made = [], []
    for number in range(2):
        folder = _fresh(command, place / f"undisturbed-{number}")
        begin = time.monotonic()
        _finish(command, folder, kill_at_write=0)
        seconds.append(time.monotonic() - begin)
        made.append(command.artefacts(folder))
    assert made[0] == made[1], f"{command.verb}: two undisturbed runs differ in {_differences(*made)}"
    assert len(made[0]) > 2
    return made[0], Killed(seconds, int((place / "undisturbed-1.writes").read_text()))


def _fresh(command: Command, folder: Path) -> Path:
    folder.mkdir(parents=True)
    command.prepare(folder)
    return folder


def _finish(command: Command, folder: Path, **options: Any) -> None:
    code = wait(start(command, folder, **options))
    assert code == 0, f"{command.verb} ended with {code}: {folder.with_suffix('.err').read_text()[-3000:]}"


def _chain(
    command: Command,
    place: Path,
    result: Killed,
    row: Callable[[], dict[str, Any]],
    most: int,
    undisturbed: dict[str, str],
) -> None:
    """Kill one work folder's command until it ends before the kill, or `most` times; then compare."""
    result.chains += 1
    folder = _fresh(command, place / f"chain-{result.chains}")
    kills = 0
    while kills < most:
        when = row()
        code = _run_and_kill(command, folder, when)
        if code != -signal.SIGKILL:
            assert code == 0, f"{command.verb}, killed {kills} times: {folder.with_suffix('.err').read_text()[-3000:]}"
            break
        kills += 1
        if "seconds" in when:
            result.moments.append((round(when["seconds"], 3), command.stage(folder)))
        elif "write" in when:
            result.at_writes.append((when["write"], command.stage(folder)))
        else:
            result.at_start.append(round(when["start"], 3))
    else:
        _finish(command, folder)
    result.longest = max(result.longest, kills)
    made = command.artefacts(folder)
    if made != undisturbed:
        result.different.append(f"{folder.name} after {kills} kills: {_differences(undisturbed, made)}")
    result.left_behind += sum(path.name.endswith(".partial") for path in folder.rglob("*"))
    if made == undisturbed:
        shutil.rmtree(folder)


def _run_and_kill(command: Command, folder: Path, when: Mapping[str, Any]) -> int | None:
    if "start" in when:
        words = [sys.executable, "-m", "accept_head", *map(str, command.arguments)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, **command.environment}
        process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **quiet)
        time.sleep(when["start"])
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
    return wait(start(command, folder, kill_at_write=when.get("write")), when.get("seconds"))


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))


def summary(result: Killed) -> dict[str, Any]:
    """For the result file."""
    stages = collections.Counter(stage for _, stage in [*result.moments, *result.at_writes])
    return {
        "kills_at_random_moments": len(result.moments),
        "kills_before_random_file_operations": len(result.at_writes),
        "kills_while_starting": len(result.at_start),
        "rows_of_kills": result.chains,
        "most_kills_in_a_row": result.longest,
        "undisturbed_seconds": [round(seconds, 2) for seconds in result.seconds],
        "file_operations": result.writes,
        "killed_at_stage": dict(sorted(stages.items())),
        "moments_seconds": [seconds for seconds, _ in result.moments],
        "different": result.different,
        "temporary_files_left_behind": result.left_behind,
    }
