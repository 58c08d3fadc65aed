"""The results of `tune` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from accept_head.inference.replay.comparison import BOUNDS
from accept_head.inference.tune.search import Tuned


def tuned_table(rows: list[dict[str, Any]], tuned: Tuned) -> Table:
    """A table of the target alone, the best fixed length and its neighbours, the tuned policies, and the bounds."""
    best = tuned.best_fixed.params["k"]
    table = Table(
        title=f"replayed on {len(tuned.traces.lengths)} traces, {tuned.traces.positions} tokens; throughput by eq. 3.1",
        caption=f"c = {tuned.costs.ratio:.3f}; chosen by {tuned.objective}; 95 % bootstrap over prompts",
    )
    columns = ("policy", "k", "discard\nrate", "verification\nrate", "tokens/s", "speed-up", "gain over\nbest fixed K")
    shares = [("oracle gap\nclosed", "oracle_gap_closed"), ("informed\ngap closed", "informed_gap_closed")]
    shares = [(title, name) for title, name in shares if name in rows[0]]
    for column in (*columns, *(part for title, _ in shares for part in (title, "95 %"))):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        params = row["params"]
        if "k" in params and abs(params["k"] - best) > 1:
            continue
        kind, _, rest = row["name"].rpartition("/")  # a head's folder without its parents
        table.add_row(
            (f"head:{rest}" if kind else rest) + (f", lag {params['lag']}" if "lag" in params else ""),
            f"{params.get('k_min', 0)} to {params['k_max']}" if "k_max" in params else "",
            f"{row['discard_rate']:.3f}",
            f"{row['verification_rate']:.3f}",
            f"{row['throughput']:.1f}",
            f"{row['speedup']:.3f}x",
            f"{100 * row['gain_over_best_fixed']:+.1f} %",
            *(part for _, name in shares for part in (f"{100 * row[name]:+.1f} %", _span(row, name))),
        )
    return table


def _span(row: Mapping[str, Any], name: str) -> str:
    """The interval of a share, for tuned policies."""
    low, high = row["ci95"][name]
    tuned = row["name"].partition(":")[0] not in ("none", "fixed", *BOUNDS)
    return f"{100 * low:.1f} to {100 * high:.1f}" if tuned else ""


def remarks(rows: list[dict[str, Any]], tuned: Tuned) -> Iterator[str]:
    """Remarks that complete the table."""
    if tuned.objective == "discard":
        for name, policy in tuned.chosen.items():
            if policy.total.verification_rate > tuned.best_fixed.total.verification_rate:
                yield f"{name}: no setting calls the target as seldom as {tuned.best_fixed.name}."
    if all(row["speedup"] <= 1 for row in rows if row["name"] not in ("none", *BOUNDS)):
        yield "No policy is faster than the target alone at these costs: decode with --policy none."
