"""The batch map that `profile` makes from real rounds: the best draft length for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from accept_head.errors import InputError
from accept_head.files import writable_file
from accept_head.inference.costs.batch_table import FIELD
from accept_head.inference.profile.rounds import RoundGrid, check_rounds_fit

BATCH_SIZES, DRAFT_LENGTHS = (1, 2, 4, 8, 16, 32), (0, 1, 2, 3, 4, 6, 8)


class MapPlan(NamedTuple):
    """The file of the map, and the grid to measure for it, both axes ascending."""

    path: Path
    batch_sizes: tuple[int, ...]
    draft_lengths: tuple[int, ...]


def planned_map(
    batch_map: str | None,
    costs_file: Path,
    batch_sizes: Sequence[int] | None,
    draft_lengths: Sequence[int] | None,
    max_new_tokens: int,
) -> MapPlan | None:
    """The plan that the options of the command line ask for; None when no map is asked for.

    Raises InputError when the options contradict each other.
    """
    if batch_map is None:
        if batch_sizes is not None or draft_lengths is not None:
            raise InputError("batch_sizes and draft_lengths are of a batch map: give --batch_map FILE")
        return None
    path = writable_file(Path(batch_map), "--batch_map")
    if path.resolve() == costs_file.resolve():
        raise InputError(f"--batch_map {batch_map}: is the file of the costs, expected another one")
    sizes = _axis("batch_sizes", batch_sizes, BATCH_SIZES, 1)
    lengths = _axis("draft_lengths", draft_lengths, DRAFT_LENGTHS, 0)
    check_rounds_fit(lengths[-1], max_new_tokens)
    return MapPlan(path, sizes, lengths)


def _axis(name: str, values: Sequence[int] | None, default: tuple[int, ...], first: int) -> tuple[int, ...]:
    """One axis, ascending. Raises InputError when it does not begin at `first`, which interpolation needs."""
    axis = tuple(sorted(set(default if values is None else values)))
    if not axis or axis[0] != first:
        raise InputError(f"{name} are {list(axis)}, expected {first} and larger numbers")
    return axis


def map_values(grid: RoundGrid) -> dict[str, Any]:
    """The content of a batch map's file: the table by vLLM's name, and the measurements it was made from.

    acceptance: of a token whose predecessors were accepted. al: tokens per round with 0, 1, 2, … draft tokens. goodput:
    tokens/s of one row.
    """
    return {
        FIELD: [list(row) for row in grid.table],
        "batch_sizes": list(grid.batch_sizes),
        "draft_lengths": list(grid.draft_lengths),
        "round_seconds": grid.seconds.tolist(),
        "rounds": grid.rounds.tolist(),
        "context_tokens": grid.context_tokens.tolist(),
        "acceptance": grid.acceptance.tolist(),
        "at_risk": grid.at_risk.tolist(),
        "al": grid.tokens.tolist(),
        "goodput": grid.goodput.tolist(),
    }


def map_table(grid: RoundGrid) -> Table:
    """For a terminal: tokens/s of one row at every measured batch size and draft length, and the best draft length."""
    table = Table(title="tokens/s of one row, by batch size and draft tokens")
    for name in ("batch size", *map(str, grid.draft_lengths), "to draft"):
        table.add_column(name, justify="right")
    chosen = {size: k for first, last, k in grid.table for size in range(first, last + 1)}
    for size, row in zip(grid.batch_sizes, grid.goodput, strict=True):
        best = row.argmax()
        cells = (f"[bold]{value:.1f}[/bold]" if place == best else f"{value:.1f}" for place, value in enumerate(row))
        table.add_row(str(size), *cells, str(chosen[size]))
    return table
