"""The adapter's counts while vLLM serves, and how they leave the worker's process.

A worker counts each verified round (DraftMetrics). At most once a second it writes the sums to its own JSON file. The
folder is made by the front end and named by an environment variable, which spawned processes inherit. The front end
reads the files for vLLM's /metrics and `LLM.get_metrics()` (scrape.py). So figures of another process are up to a
second old; those of an engine in the front end's process are current. Every `log_every` seconds the worker logs them.

Some setups have no shared folder or several front ends. Several API servers (`--api-server-count`, data parallelism)
publish only prometheus_client's own multiprocess files. A worker on another host writes its files there. In both cases
the log line and the JSON files remain.

Every process of vLLM imports this module, so it imports neither torch, nor vLLM, nor prometheus_client.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accept_head.files import write_json

if TYPE_CHECKING:
    from accept_head.inference.adapters.vllm.counts import VerifiedRound
    from accept_head.inference.costs.learnt import LearntCosts

FOLDER = "ACCEPT_HEAD_METRICS_DIR"  # environment variable; set it yourself to keep the files
VERSION = 1  # of the file format
WRITE_EVERY = 1.0  # seconds

Counts = dict[str, Any]


class DraftMetrics:
    """Sums over the verified rounds of one engine, in one worker. Tensor-parallel ranks draft alike and need only one.

    k_max: tokens of the longest draft. publish: write the sums to the folder that FOLDER names, if it is set. logger:
    gets a line every log_every seconds; 0 = never.
    """

    in_this_process: ClassVar[weakref.WeakSet[DraftMetrics]] = weakref.WeakSet()  # instances that publish
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(
        self,
        k_max: int,
        *,
        publish: bool = True,
        logger: logging.Logger | None = None,
        log_every: float = 10.0,
    ):
        from accept_head.inference.adapters.vllm.counts import DraftCounts

        self.counts = DraftCounts(k_max)
        self.rounds, self.draft_forwards, self.policy_seconds = 0, 0, 0.0
        self.costs: LearntCosts | None = None  # what the policy has learnt of them, if it does
        self.lock = threading.Lock()  # guards the sums: the timer's thread and a scrape read them
        self.timer: threading.Timer | None = None
        self.file = self._publish() if publish else None
        self.logger, self.log_every = logger if log_every > 0 else None, log_every
        self.logged, self.logged_at = self.read(), 0.0  # counts of the last log line, and the start of the next

    def _publish(self) -> Path | None:
        """The file to write to; it is deleted together with this object."""
        folder = os.environ.get(FOLDER)
        if not folder:
            return None
        number = next(self._numbers)
        self.engine = f"{os.getpid()}-{number}" if number else str(os.getpid())
        file = Path(folder) / f"{self.engine}.json"
        weakref.finalize(self, file.unlink, missing_ok=True)
        self.in_this_process.add(self)
        return file

    def record(self, verified: VerifiedRound, steps: int, seconds: float) -> None:
        """Count one round of a batch. steps: its draft forwards. seconds: of head and policy, as far as measured."""
        with self.lock:
            if self.rounds == self.logged["rounds"]:
                self.logged_at = time.monotonic()  # a log line does not count time without rounds
            self.counts.add(verified)
            self.rounds += 1
            self.draft_forwards += steps
            self.policy_seconds += seconds
            self._flush_soon()

    def read(self) -> Counts:
        """The sums so far.

        rounds: of the batch. row_rounds: rounds of single rows, which are their target steps, by what ended the draft:
        `policy`, `limit`, or `none` if nothing was drafted. drafted, verified, accepted: tokens. draft_forwards: of the
        batch. policy_seconds: of head and policy. depths: the columns of counts.py at depth 1, 2, …
        """
        from accept_head.inference.adapters.vllm.counts import COLUMNS, ENDS

        with self.lock:
            rows, ends = self.counts.read()
            rounds, forwards, seconds = self.rounds, self.draft_forwards, self.policy_seconds
        depths = [
            {name: value if name == "predicted" else int(value) for name, value in zip(COLUMNS, row, strict=True)}
            for row in rows
        ]
        totals = {name: sum(depth[name] for depth in depths) for name in ("drafted", "verified", "accepted")}
        return {
            "rounds": rounds,
            "row_rounds": {name: int(value) for name, value in zip(ENDS, ends, strict=True)},
            "draft_forwards": forwards,
            **totals,
            "policy_seconds": seconds,
            "depths": depths,
        }

    def _flush_soon(self) -> None:
        """Start a timer, so that the last rounds before a pause are written too."""
        if self.timer is None and (self.file is not None or self.logger is not None):
            self.timer = threading.Timer(WRITE_EVERY, self._on_timer)
            self.timer.daemon = True
            self.timer.start()

    def _on_timer(self) -> None:
        with self.lock:
            self.timer = None
        counts = self.flush()
        if self.logger is not None and counts["rounds"] > self.logged["rounds"]:
            if time.monotonic() - self.logged_at >= self.log_every:
                self.log(counts)
            else:
                with self.lock:
                    self._flush_soon()

    def flush(self) -> Counts:
        """Write the sums now, and return them. A missing folder is ignored: it must not stop serving."""
        counts = self.read()
        if self.file is not None:
            learnt = {} if self.costs is None else {"costs": self.costs.believed()}
            with contextlib.suppress(OSError):
                write_json(
                    self.file, {"version": VERSION, "engine": self.engine, "pid": os.getpid(), **counts, **learnt}
                )
        return counts

    def log(self, counts: Counts) -> None:
        """Log one line about the rounds since the last line."""
        assert self.logger is not None
        now = time.monotonic()
        learnt = "" if self.costs is None else f", Costs: {self.costs}"
        self.logger.info("%s%s", log_line(since(counts, self.logged), now - self.logged_at), learnt)
        with self.lock:
            self.logged, self.logged_at = counts, now


def since(now: Counts, before: Counts) -> Counts:
    """now − before, number by number."""
    difference: Counts = {}
    for name, value in now.items():
        if isinstance(value, Mapping):
            difference[name] = since(dict(value), before[name])
        elif isinstance(value, list):
            difference[name] = [since(new, old) for new, old in zip(value, before[name], strict=True)]
        else:
            difference[name] = value - before[name]
    return difference


def log_line(counts: Counts, seconds: float) -> str:
    """A line in the style of vLLM's "SpecDecoding metrics". Depths that no row reached are left out.

    Tokens per target step: (accepted + 1) per round of a row. vLLM's "mean acceptance length" leaves out rounds without
    a draft.
    """
    row_rounds = sum(counts["row_rounds"].values())
    ended = ", ".join(f"{name} {value}" for name, value in counts["row_rounds"].items())
    depths = [depth for depth in counts["depths"] if depth["drafted"]]
    judged = ", ".join(f"{depth['accepted']}/{depth['judged']}" for depth in depths)
    scored = [depth for depth in depths if depth["scored"]]
    calibration = ", ".join(f"{predicted(depth):.3f}/{observed(depth):.3f}" for depth in scored)
    parts = [
        f"Tokens per target step: {1 + counts['accepted'] / max(row_rounds, 1):.2f}",
        f"Drafted: {counts['drafted']} tokens in {counts['draft_forwards']} forwards",
        f"Verified: {counts['verified']} tokens",
        f"Accepted: {counts['accepted']} tokens ({counts['accepted'] / seconds:.2f} tokens/s)",
        f"Per-position accepted/judged: {judged or 'none'}",
        f"Per-position predicted/observed acceptance: {calibration or 'none'}",
        f"Drafts ended by: {ended}",
        f"Policy: {1000 * counts['policy_seconds'] / max(counts['rounds'], 1):.2f} ms/round",
    ]
    return f"accept_head metrics: {', '.join(parts)}"


def predicted(depth: Counts) -> float:
    """Mean predicted acceptance at one depth, over its scored rows; there must be at least one."""
    return float(depth["predicted"] / depth["scored"])


def observed(depth: Counts) -> float:
    """The share of the same rows whose token was accepted."""
    return float(depth["scored_accepted"] / depth["scored"])
