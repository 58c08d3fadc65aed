"""Runs all cells of a bench, one after the other. An interrupted run continues with the next cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from accept_head.files import atomic_path
from accept_head.inference.bench.arrivals import Arrival
from accept_head.inference.bench.cells import Job
from accept_head.inference.bench.plots import draw_plots
from accept_head.inference.bench.tables import cell_table, trace_table
from accept_head.inference.decode.unfinished import Unfinished
from accept_head.sampling import Sampling


class Place(NamedTuple):
    """The setting of one cell. trace: the file of its trace, or None."""

    trace: str | None
    batch: int
    sampling: Sampling

    @property
    def name(self) -> str:
        where = f"{self.trace}, " if self.trace else ""
        return f"{where}batch {self.batch}, temperature {self.sampling.temperature:g}"


def measured(
    job: Job, wanted: Sequence[Place], traces: Mapping[str, Sequence[Arrival]], kept: Unfinished, console: Console
) -> list[dict[str, Any]]:
    """The results of all cells, each shown when finished. Cells from an interrupted run are not measured again."""
    cells = {record["cell"]: record for record in kept.records.values()}
    if cells:
        console.print(f"going on: {len(cells)} cells are there", highlight=False)
    with kept:
        for place in wanted:
            if place.name not in cells:
                cell: dict[str, Any] = {"index": len(kept.records), "cell": place.name}
                cell |= {"batch_size": place.batch, "temperature": place.sampling.temperature}
                if place.trace:
                    cell |= {"trace": place.trace} | job.replay(traces[place.trace], place.batch, place.sampling)
                else:
                    cell |= job.measure(place.batch, place.sampling)
                kept.add(cell)
                cells[place.name] = cell
            console.print((trace_table if place.trace else cell_table)(cells[place.name]))
    return [{name: value for name, value in cells[place.name].items() if name != "index"} for place in wanted]


def write_plots(path: Path, result: Mapping[str, Any]) -> list[Path]:
    written = []
    for plot in draw_plots(result):
        written.append(path.with_name(f"{path.name.removesuffix('.json')}-{plot.name}.png"))
        with atomic_path(written[-1]) as temporary:
            temporary.write_bytes(plot.png)
    return written
