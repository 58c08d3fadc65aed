"""Runs of the console command that are killed, and the folders of traces that they leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pyarrow.parquet as pq


def besides_progress(said):
    """What was printed to stderr, but for lines of progress (accept_head.console.Progress)."""
    return [line for line in said.splitlines() if not re.match(r".+: \d+/\d+ \w+ after \d\d:\d\d, ", line)]


def content(folder):
    """{file name: bytes} of everything in a trace folder, hidden files included."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def visible(folder):
    """The same without hidden files: a kill may leave a temporary one, which nothing reads."""
    return {name: data for name, data in content(folder).items() if not name.startswith(".")}


def records(folder):
    return [row for path in shards(folder) for row in pq.read_table(path).to_pylist()]


def shards(folder):
    return sorted(folder.glob("shard-*.parquet"))


def start_and_kill(command, environment, ready):
    """SIGKILL the process group as soon as `ready()` holds; fails when the process ends before."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True, **quiet)
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "it never got ready to be killed"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
