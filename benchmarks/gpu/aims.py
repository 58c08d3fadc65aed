"""What the parts should reach, from their JSON files: aim, measured, holds.

python benchmarks/gpu/aims.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells import REPOSITORY, is_measured
from rich.table import Table

from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import read_json, write_json

Worst = tuple[float | None, str, int, int]  # the worst value, of what; cells that are there, and that there have to be
Place = tuple[int, float]  # batch size and temperature
TEMPERATURES = (0.0, 1.0)
BENCHED = set(itertools.product((1, 8, 32, 128), TEMPERATURES))
HEAD_COSTED = set(itertools.product((1, 8, 32), TEMPERATURES))
SWEEP_CELLS = 4  # the sweep and three single runs: without any of them nothing is compared
AT_BATCH_1 = set(itertools.product((1,), TEMPERATURES))
Results = dict[str, dict[str, Any]]  # by part
PARTS = ("overhead", "whole_flow", "head_sweep", "collect_speed", "greedy_divergence", "head_cost")
OVERHEAD, ASSISTED, HEAD_COST, SWEEP = 1.05, 3.0, 0.01, 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu")
    report(parser.parse_args().out)


def report(out: Path) -> list[dict[str, Any]]:
    """Print the table and write aims.json."""
    results = read_results(out)
    rows = aims(results)
    tiny = any(values.get("tiny") for values in results.values())
    write_json(out / "aims.json", {"tiny": tiny, "aims": rows})
    table = Table(title="aims" + (": --tiny, so these figures only show that they are computed" if tiny else ""))
    for column in ("aim", "measured", "holds", "of"):
        table.add_column(column)
    for row in rows:
        measured = "not measured" if row["measured"] is None else f"{row['measured']:.4g}"
        table.add_row(row["aim"], measured, {True: "yes", False: "NO", None: ""}[row["holds"]], row["of"])
    make_console(unseen_width=150).print(table)
    return rows


def read_results(out: Path) -> Results:
    results = {}
    for part in PARTS:
        try:
            results[part] = read_json(out / f"{part}.json")
        except InputError:  # it has not run
            results[part] = {}
    return results


def aims(results: Results) -> list[dict[str, Any]]:
    """One row an aim. measured: None where it was not measured. It fails by any cell, and holds by all: where some are
    missing, nothing is said."""
    rules: list[tuple[str, Callable[[Results], Worst], Callable[[float], bool]]] = [
        (f"loop overhead <= {OVERHEAD} at batch 1, compile=graphs", _overhead, lambda x: x <= OVERHEAD),
        (f">= {ASSISTED:g} x transformers' assisted tokens/s", _assisted, lambda x: x >= ASSISTED),
        (f"head + signals <= {HEAD_COST:.0%} of the 1B draft forward", _head_cost, lambda x: x <= HEAD_COST),
        ("head's gain over the best fixed K > 0, batch 1, T = 1", lambda r: _gain(r, 1.0), lambda x: x > 0),
        ("head's gain over the best fixed K > 0, batch 1, T = 0", lambda r: _gain(r, 0.0), lambda x: x > 0),
        ("recommended policy / autoregressive >= 1 at every batch size", _slowest, lambda x: x >= 1),
        (f"20-head sweep >= {SWEEP:g} x 20 single runs", _sweep, lambda x: x >= SWEEP),
    ]
    rows = []
    for aim, measure, holds in rules:
        value, of, there, wanted = measure(results)
        verdict = None if value is None or (holds(value) and there < wanted) else bool(holds(value))
        rows.append({"aim": aim, "measured": value, "holds": verdict, "of": f"{of}; {there} of {wanted} cells"})
    return rows


def cells_of(results: Results, part: str, start: str) -> list[dict[str, Any]]:
    """The measured cells whose name begins so."""
    cells = results.get(part, {}).get("cells", [])
    return [cell for cell in cells if cell["cell"].startswith(start) and is_measured(cell)]


def place_of(cell: dict[str, Any]) -> Place:
    return cell["settings"]["batch"], float(cell["settings"]["temperature"])


def _overhead(results: Results) -> Worst:
    """The worst policy of the worst temperature, with graphs."""
    found = [cell for cell in cells_of(results, "overhead", "graphs") if place_of(cell) in AT_BATCH_1]
    if not found:
        return None, results.get("overhead", {}).get("fallback") or "no cell with graphs at batch 1", 0, len(AT_BATCH_1)
    worst = max((row["overhead"], row["policy"], cell["cell"]) for cell in found for row in cell["policies"])
    return worst[0], f"the worst: {worst[1]}; {worst[2]}", len(set(map(place_of, found))), len(AT_BATCH_1)


def _assisted(results: Results) -> Worst:
    found = cells_of(results, "whole_flow", "assisted")
    rows = [(row["ratio"], row["policy"], cell["cell"]) for cell in found for row in cell["policies"]]
    if not rows:
        return None, "no cell", 0, len(TEMPERATURES)
    return min(rows)[0], f"the least: {min(rows)[1]}; {min(rows)[2]}", len(found), len(TEMPERATURES)


def _head_cost(results: Results) -> Worst:
    """Of what is used on a GPU."""
    found = [cell for cell in cells_of(results, "head_cost", "graph, kernels") if place_of(cell) in HEAD_COSTED]
    if not found:
        return None, results.get("head_cost", {}).get("fallback") or "no cell", 0, len(HEAD_COSTED)
    share, name = max((cell["default_share"], cell["cell"]) for cell in found)
    return share, f"the worst: {name}", len(set(map(place_of, found))), len(HEAD_COSTED)


def _bench(results: Results) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Cells in which the recommended policy was decoded, with their rows by name."""
    found = [
        (cell, {row["name"]: row for row in cell["policies"]}) for cell in cells_of(results, "whole_flow", "bench")
    ]
    return [(cell, rows) for cell, rows in found if cell["recommended"] in rows]


def _gain(results: Results, temperature: float) -> Worst:
    """Of the tuned head, as it is recommended for one request; beside it, with costs."""
    for cell, rows in _bench(results):
        if cell["settings"]["batch"] == 1 and cell["settings"]["temperature"] == temperature:
            row, priced = rows[cell["head"]], rows[cell["recommended"]]
            low, high = row["ci95"]["gain_over_best_fixed"]
            of = f"tuned head, 95 % {low:+.3f} to {high:+.3f}; with costs {priced['gain_over_best_fixed']:+.3f}; "
            of += f"noise floor {row['noise_floor']:.3f}; best {cell['best_fixed']}"
            return row["gain_over_best_fixed"], of, 1, 1
    return None, "no cell", 0, 1


def _slowest(results: Results) -> Worst:
    benched = _bench(results)
    rows = [(rows[cell["recommended"]]["speedup"], cell["cell"]) for cell, rows in benched]
    if not rows:
        return None, "no cell", 0, len(BENCHED)
    there = {place_of(cell) for cell, _ in benched} & BENCHED
    return min(rows)[0], f"the least: {min(rows)[1]}", len(there), len(BENCHED)


def _sweep(results: Results) -> Worst:
    compared = (results.get("head_sweep", {}).get("compared") or {}).get("1B shape")
    if not compared:
        return None, "the sweep, or a run that it is compared with, is missing", 0, SWEEP_CELLS
    plain = f"; {compared['sweep_over_plain']:.1f} x the plain loop" if "sweep_over_plain" in compared else ""
    return compared["sweep_over_singles"], f"1B shape{plain}", SWEEP_CELLS, SWEEP_CELLS


if __name__ == "__main__":
    main()
