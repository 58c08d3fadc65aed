"""The workers' counts as Prometheus metrics of the front end, shown by vLLM's own /metrics and `LLM.get_metrics()`.

Each metric is of one engine (label `engine`: the worker's process id). Metrics that end in `_per_pos` have one sample a
`position`, counted from 0 as in vLLM. `LLM.get_metrics()` rounds counters down to integers, /metrics does not.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accept_head.inference.adapters.vllm.metrics import FOLDER, VERSION, Counts, DraftMetrics, observed, predicted

PREFIX = "vllm:accept_head_"
# name: its description, and its key in the counts.
TOTALS = {
    "num_rounds": ("Rounds of the batch.", "rounds"),
    "num_draft_forwards": ("Forwards of the draft.", "draft_forwards"),
    "num_drafted_tokens": ("Tokens drafted.", "drafted"),
    "num_verified_tokens": ("Drafted tokens that the target verified.", "verified"),
    "num_accepted_tokens": ("Drafted tokens that were accepted.", "accepted"),
    "policy_seconds": ("Seconds that head and policy took.", "policy_seconds"),
}
ROW_ROUNDS = "num_row_rounds"
PER_POSITION = {
    "num_drafted_tokens_per_pos": ("Tokens drafted.", "drafted"),
    "num_verified_tokens_per_pos": ("Drafted tokens that the target verified.", "verified"),
    "num_judged_tokens_per_pos": ("Tokens at risk: verified, and all before them accepted.", "judged"),
    "num_accepted_tokens_per_pos": ("Drafted tokens that were accepted.", "accepted"),
    "num_scored_tokens_per_pos": ("Judged tokens whose acceptance the policy had predicted.", "scored"),
    "num_scored_accepted_tokens_per_pos": ("Those of them that were accepted.", "scored_accepted"),
    "predicted_accepted_tokens_per_pos": ("Those of them that were expected to be.", "predicted"),
}
RATES = {
    "predicted_acceptance_per_pos": ("Mean predicted acceptance of scored tokens so far.", predicted),
    "observed_acceptance_per_pos": ("Share of the same tokens that were accepted.", observed),
}


def share_metrics() -> None:
    """Register the metrics; called in each process of vLLM. The first process, the front end, makes the folder, and
    removes it when it ends. A second call in a process has no effect."""
    if not os.environ.get(FOLDER):
        folder = tempfile.mkdtemp(prefix="accept-head-metrics-")
        os.environ[FOLDER] = folder
        atexit.register(_remove, folder, os.getpid())
    register_collector()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits the exit handler
        shutil.rmtree(folder, ignore_errors=True)


def register_collector() -> None:
    """Add the counts to prometheus_client's registry, which vLLM publishes. Works once a process."""
    from prometheus_client import REGISTRY

    with contextlib.suppress(ValueError):  # the names are taken: it is registered already
        REGISTRY.register(CountsCollector())


class CountsCollector:
    """A custom collector in prometheus_client's sense; it reads the files only when asked."""

    def describe(self) -> list[Any]:
        """The names alone; the registry then refuses a second collector."""
        return families({})

    def collect(self) -> list[Any]:
        for metrics in list(DraftMetrics.in_this_process):
            metrics.flush()
        return families(read_folder())


def families(engines: Mapping[str, Counts]) -> list[Any]:
    """prometheus_client's metric families of all engines' counts."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    ended = "Rounds of single rows, by what ended their draft: the policy, its limit, or none was begun."
    made = {
        **{name: CounterMetricFamily(PREFIX + name, text, labels=["engine"]) for name, (text, _) in TOTALS.items()},
        ROW_ROUNDS: CounterMetricFamily(PREFIX + ROW_ROUNDS, ended, labels=["engine", "ended"]),
    }
    for kind, table in ((CounterMetricFamily, PER_POSITION), (GaugeMetricFamily, RATES)):
        for name, (text, _) in table.items():
            made[name] = kind(PREFIX + name, text, labels=["engine", "position"])
    for engine, counts in engines.items():
        for sample in samples(counts):
            made[sample.name].add_metric([engine, *sample.labels], sample.value)
    return list(made.values())


class Sample(NamedTuple):
    name: str
    labels: tuple[str, ...]  # besides the engine
    value: float


def samples(counts: Counts) -> Iterator[Sample]:
    """All published samples of one engine's counts."""
    for name, (_, field) in TOTALS.items():
        yield Sample(name, (), float(counts[field]))
    for ended, rounds in counts["row_rounds"].items():
        yield Sample(ROW_ROUNDS, (ended,), float(rounds))
    for position, depth in enumerate(counts["depths"]):
        for name, (_, column) in PER_POSITION.items():
            yield Sample(name, (str(position),), float(depth[column]))
        for name, (_, rate) in RATES.items():
            if depth["scored"]:
                yield Sample(name, (str(position),), rate(depth))


def read_folder() -> dict[str, Counts]:
    """The counts of all engines that still run, by name. A missing folder, foreign files and incomplete files are
    ignored."""
    folder = os.environ.get(FOLDER)
    files = sorted(Path(folder).glob("*.json")) if folder else []
    return {file.stem: counts for file in files if (counts := _read(file)) is not None}


def _read(file: Path) -> Counts | None:
    try:
        counts = json.loads(file.read_text(encoding="utf-8"))
        if counts["version"] != VERSION or counts["engine"] != file.stem or not _runs(counts["pid"]):
            return None
        # One bad value would stop the whole scrape, including vLLM's own metrics.
        good = all(math.isfinite(sample.value) for sample in samples(counts))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    return dict(counts) if good else None


def _runs(pid: int) -> bool:
    """Whether a process has this id."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True
