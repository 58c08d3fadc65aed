"""What the adapter counts while vLLM serves, and how it gets out of the worker's process.

A worker counts each verified round (DraftMetrics) and at most once a second writes the sums to a JSON file of its own,
in a folder that the front end made and that an environment variable names, which spawned processes inherit. The front
end reads the files when vLLM's /metrics or `LLM.get_metrics()` asks (scrape.py). Figures of another process are
therefore up to a second old, those of an engine in the front end's own process are not. Every `log_every` seconds the
worker logs them too.

Not everywhere is there a shared folder or one front end. Several API servers (`--api-server-count`, data parallelism)
publish only what prometheus_client's own multiprocess files hold, and a worker on another host writes on that host:
there the log line and the JSON files remain.

Importing this imports neither torch, nor vLLM, nor prometheus_client: every process of vLLM does it.
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

FOLDER = "ACCEPT_HEAD_METRICS_DIR"  # environment variable; set it yourself to keep the files
VERSION = 1  # of a file
WRITE_EVERY = 1.0  # seconds

Counts = dict[str, Any]


class DraftMetrics:
    """Sums over the verified rounds of one engine, in one worker. Ranks that draft the same need only one of these.

    k_max: tokens of the longest draft. publish: write the sums to the folder that FOLDER names, if it names one.
    logger: for a line every log_every seconds; 0 = never.
    """

    in_this_process: ClassVar[weakref.WeakSet[DraftMetrics]] = weakref.WeakSet()  # those that publish
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
        self.lock = threading.Lock()  # of the sums: the timer's thread and a scrape read them
        self.timer: threading.Timer | None = None
        self.file = self._publish() if publish else None
        self.logger, self.log_every = logger if log_every > 0 else None, log_every
        self.logged, self.logged_at = self.read(), 0.0  # what the last line said, and since when there is more

    def _publish(self) -> Path | None:
        """The file to write to; it goes when this engine goes."""
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
        """Count one round of a batch. steps: its draft forwards. seconds: that head and policy took, as far as the host
        knows."""
        with self.lock:
            if self.rounds == self.logged["rounds"]:
                self.logged_at = time.monotonic()  # time without rounds is none of a line's
            self.counts.add(verified)
            self.rounds += 1
            self.draft_forwards += steps
            self.policy_seconds += seconds
            self._flush_soon()

    def read(self) -> Counts:
        """The sums so far.

        rounds: of the batch. row_rounds: rounds of single rows, that is their target steps, by what ended the draft:
        `policy`, `limit`, `none` (nothing was drafted). drafted, verified, accepted: tokens. draft_forwards: of the
        batch. policy_seconds. depths: at depth 1, 2, … the columns of counts.py.
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
        """So that the last rounds before a pause get out too, without a round that would come after them."""
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
        """Write the sums now, and return them. A folder that is gone is none of serving's business."""
        counts = self.read()
        if self.file is not None:
            with contextlib.suppress(OSError):
                write_json(self.file, {"version": VERSION, "engine": self.engine, "pid": os.getpid(), **counts})
        return counts

    def log(self, counts: Counts) -> None:
        """One line on the rounds since the last one."""
        assert self.logger is not None
        now = time.monotonic()
        self.logger.info("%s", log_line(since(counts, self.logged), now - self.logged_at))
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
    """In the style of vLLM's "SpecDecoding metrics". Depths that no row reached are left out.

    Tokens per target step: of one row, (accepted + 1 each) / its rounds; vLLM's "mean acceptance length" leaves rounds
    without a draft out.
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
    """Mean predicted acceptance at one depth, over its scored rows, of which there must be some."""
    return float(depth["predicted"] / depth["scored"])


def observed(depth: Counts) -> float:
    """The share of the same rows that were accepted."""
    return float(depth["scored_accepted"] / depth["scored"])
