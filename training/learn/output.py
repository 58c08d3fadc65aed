"""The files of a training run: a folder for each head, and a run folder with checkpoints and logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, writable_folder, write_json
from accept_head.head.saved import save_head
from accept_head.quality import Quality
from accept_head.trace.config import TraceConfig
from accept_head.training.learn.candidates import Outcome
from accept_head.training.learn.recipe import Recipe

RUN_NAME = "run.json"
CHECKPOINT_VERSION = 2  # 1 held a single head under other names


def prepare_run(out: Path, run: dict[str, Any], *, sweep: bool) -> Path:
    """Make the folder of checkpoints and logs. Raises InputError when it belongs to a run with other settings."""
    check_out(out, sweep=sweep)
    folder = writable_folder(out.parent / f"{out.name}-run")
    path = folder / RUN_NAME
    run = json.loads(json.dumps({**run, "checkpoint_version": CHECKPOINT_VERSION}))  # tuples become lists, as in a file
    if path.exists() and (folder / "last.ckpt").exists():
        if changed := _first_change(read_json(path), run):
            raise InputError(
                f"--out {out}: {folder} holds an unfinished or finished run with another {changed}; "
                "choose another --out or remove that folder"
            )
    else:
        write_json(path, run)
    return folder


def check_out(out: Path, *, sweep: bool) -> None:
    """Raises InputError when a head, or the heads of a sweep, cannot be written there."""
    if out.exists() and not (_is_sweep(out) if sweep else _is_head(out)):
        made = "a folder of heads made by a sweep" if sweep else "a head"
        raise InputError(f"--out {out}: exists and is not {made}; choose another folder")
    writable_folder(out.parent)


def _first_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """`name (before, now after)` for the first setting that differs; "" when none differs.

    The name alone when the values are long.
    """
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                return f"{key}: {_first_change(old, new)}"
            change = f"{key} ({old}, now {new})"
            return change if len(change) < 200 else key
    return ""


def _is_head(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def _is_sweep(folder: Path) -> bool:
    """Whether the folder holds only heads with names of a sweep."""
    return folder.is_dir() and all(path.name.startswith("depth") and _is_head(path) for path in folder.iterdir())


def save_heads(
    out: Path,
    outcomes: Sequence[Outcome],
    recipes: dict[str, Recipe],
    *,
    metrics: dict[str, Any],
    training: dict[str, Any],
    traces: TraceConfig,
) -> None:
    """Write the head to `out`, or every head of a sweep to its own folder there. Writes all of them or none.

    metrics, training: the entries that all heads share.
    """

    def save(made: Outcome, folder: Path) -> None:
        found = {"dev": _numbers(made.dev), "train": made.train}
        if made.base is not None:
            found["base"] = _numbers(made.base)
        save_head(
            made.head,
            folder,
            metrics={**found, **metrics},
            training={**training, **asdict(recipes[made.name]), "decay": made.decay},
            traces=traces,
        )

    if list(recipes) == [""]:
        return save(outcomes[0], out)
    with atomic_path(out) as temporary:
        temporary.mkdir()
        for made in outcomes:
            save(made, temporary / made.name)


def _numbers(found: dict[str, Quality]) -> dict[str, dict[str, float]]:
    return {prediction: quality.to_dict() for prediction, quality in found.items()}


def print_quality(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Print some lines about one head, or a table about a sweep."""
    if len(outcomes) > 1:
        return make_console().print(_table(out, outcomes))
    (made,) = outcomes
    for name, quality in made.dev.items():
        print(
            f"{out}: {name} head, dev binary KL {quality.binary_kl:.4f} nats "
            f"({quality.constant_kl:.4f} for the best constant), AUROC {quality.auroc:.3f}, "
            f"ECE {quality.ece:.3f}, predicted {quality.mean_predicted:.3f}, observed {quality.mean_observed:.3f}"
        )
    if made.base is not None and made.head.config.residual:
        kls = ", ".join(f"{name} {quality.binary_kl:.4f}" for name, quality in made.base.items())
        print(f"{out}: base and residual; the base alone has dev binary KL {kls}")
    elif made.base is not None:
        print(f"{out}: the base alone")


def _table(out: Path, outcomes: Sequence[Outcome]) -> Table:
    table = Table(title=f"{out}: binary KL in nats")
    for column in ("head", "predicts"):
        table.add_column(column, no_wrap=True)
    for column in ("train KL", "dev KL", "base's", "AUROC", "ECE", "predicted", "observed"):
        table.add_column(column, justify="right")
    for made in outcomes:
        for prediction, dev in made.dev.items():
            base = f"{made.base[prediction].binary_kl:.4f}" if made.base is not None else ""
            values = (dev.auroc, dev.ece, dev.mean_predicted, dev.mean_observed)
            kls = (made.train[prediction]["binary_kl"], dev.binary_kl)
            numbers = [*(f"{kl:.4f}" for kl in kls), base, *(f"{value:.3f}" for value in values)]
            table.add_row(made.name, prediction, *numbers)
    return table
