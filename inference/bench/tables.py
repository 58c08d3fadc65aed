"""Tables of a bench's cells for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from accept_head.inference.report.data import printable


def cell_table(cell: Mapping[str, Any]) -> Table:
    """Policies on chunks of prompts: speed, gain, time per output token, rates."""
    noise, slo = cell["noise"], cell["slo_limits"]
    priced = any(row["priced"] for row in cell["policies"])
    columns = ["tokens/s", "speed-\nup", "gain over\nbest K", "95 %", "ms a token\np50, p99", "discard\nrate"]
    columns += ["tokens\na round", "drafted\na round"]
    columns += ["SLO"] * bool(slo) + ["gap\nclosed"] * bool(priced)
    best = ", ".join(f"{domain} {name}" for domain, name in cell["best_fixed_by_domain"]["names"].items())
    table = _table(
        columns,
        f"{cell['cell']}: best fixed {cell['best_fixed']}; noise floor {100 * noise['floor']:.1f} %; "
        f"this process had a processor {100 * cell['cpu_share']:.0f} % of the time",
        f"Noise: {noise['name']} twice. Gains in parentheses are within it."
        + (f" Best of each domain: {best}." if best else "")
        + different(cell),
    )
    for row in cell["policies"]:
        low, high = row["ci95"]["gain_over_best_fixed"]
        gain = f"{100 * row['gain_over_best_fixed']:+.1f} %"
        table.add_row(
            short(row["name"]),
            f"{row['throughput']:.1f}",
            f"{row['speedup']:.2f}x",
            gain if row["beyond_noise"] else f"({gain})",
            f"{100 * low:+.0f} to {100 * high:+.0f}",
            ", ".join(f"{1e3 * row['time_per_token'][name]:.1f}" for name in ("p50", "p99")),
            f"{row['discard_rate']:.3f}",
            *(f"{row[name]:.2f}" for name in ("block_efficiency", "mean_drafted")),
            *([_percent(row["slo_attainment"]["1"])] if slo else []),
            *([_percent(row["priced"]["oracle_gap_closed"]) if row["priced"] else ""] if priced else []),
        )
    return table


def trace_table(cell: Mapping[str, Any]) -> Table:
    """Policies on a trace's arrivals: latency, queueing, time per output token, attainment."""
    noise, load = cell["noise"], cell["load"]
    columns = ["latency, s\nmean", "\np50", "\np99", "speed-\nup", "queueing, s\nmean", "\np99"]
    table = _table(
        [*columns, "ms a token\np50, p99", "SLO", "tokens/s", "drafted\na round"],
        f"{cell['cell']}: {cell['requests']} requests, {cell['time_scale']:.3g} s for a second of the trace"
        + (f", load {load:.2f} of what the target alone sustains" if load else ""),
        f"Two replays of {noise['name']} differ by {100 * noise['floor']:.1f} % in mean latency." + different(cell),
    )
    for row in cell["policies"]:
        latency, queueing = row["latency"], row["queueing"]
        table.add_row(
            short(row["name"]),
            *(f"{latency[name]:.2f}" for name in ("mean", "p50", "p99")),
            f"{row['latency_speedup']:.2f}x",
            *(f"{queueing[name]:.2f}" for name in ("mean", "p99")),
            ", ".join(f"{1e3 * row['time_per_token'][name]:.1f}" for name in ("p50", "p99")),
            _percent(row["slo_attainment"]["1"]),
            f"{row['throughput']:.1f}",
            f"{row['mean_drafted']:.2f}",
        )
    return table


def different(cell: Mapping[str, Any]) -> str:
    """A sentence if responses differ that should be equal."""
    wrong = {row["name"]: row["differs_from_none"] for row in cell["policies"] if row["differs_from_none"]}
    counts = ", ".join(f"{short(name)} {count}" for name, count in wrong.items())
    return f" Responses that are not the target's own: {counts}." if wrong else ""


def short(name: str, longest: int = 30) -> str:
    """A policy's name, with paths in it cut to their last part."""
    kind, colon, rest = name.partition(":")
    text = printable(f"{kind}{colon}{rest.rpartition('/')[2]}")
    return text if len(text) <= longest else "…" + text[1 - longest :]


def _table(columns: list[str], title: str, caption: str) -> Table:
    table = Table(title=escape(title), caption=escape(caption), box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("policy", *columns):
        table.add_column(column, justify="left" if column == "policy" else "right")
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
