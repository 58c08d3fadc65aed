"""`accept-head calibrate`: maps that make a head's probabilities right at each depth, fitted on coupled traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from accept_head.calibration import CALIBRATION_NAME, Rounds, fit_temperatures
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import writable_file
from accept_head.head.origin import check_unseen
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.calibration import calibrated, rounds_of, survival_quality
from accept_head.inference.replay.coupled import LONGEST, load_coupled
from accept_head.inference.tune.heads import load_heads
from accept_head.pair import load_draft
from accept_head.trace.shards import finished_config


def calibrate(
    traces: str,
    draft: str,
    head: str,
    max_prompts: int | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Fit a temperature for each depth on traces that the head was not trained on, and write it beside the head.

    They are fitted in order, each to the chance that all tokens up to its depth are accepted (DSpark's sequential
    temperature scaling).

    It is used where the policy says so, head:PATH:0.5,calibration=true. Probabilities then mean something else, so that
    the threshold has to be chosen anew.

    Args:
        traces: Folder made by `accept-head collect`, of prompts that the head was not trained on.
        draft: The draft that the traces were made with.
        head: Folder of the head; `calibration.json` is written there.
        max_prompts: Use the first so many traces.
        dtype: float32, bfloat16, float16, or auto; of the draft.
        trust_remote_code: Run model code that comes with the draft.
    """
    if not Path(head).is_dir():
        raise InputError(f"--head {head}: expected a local folder, where {CALIBRATION_NAME} is written")
    writable_file(Path(head) / CALIBRATION_NAME, "--head")
    model = load_draft(draft, "--draft", dtype=dtype, trust_remote_code=trust_remote_code)
    fingerprint = checkpoint_fingerprint(draft)
    (loaded,) = load_heads([head], model).values()
    check_unseen(head, Path(head), Path(traces), finished_config(Path(traces)))
    coupled = load_coupled(Path(traces), model, fingerprint, k_max=LONGEST, max_prompts=max_prompts)
    rounds = rounds_of(coupled, HeadPolicy(loaded, 0.5))
    used = {"traces": coupled.config.fingerprint(), "prompts": len(coupled.lengths), "rounds": len(rounds.predicted)}
    fitted = fit_temperatures(rounds, used)
    path = fitted.save(Path(head))
    console = make_console(unseen_width=100)
    console.print(quality_table({"head": rounds, "temperature": calibrated(rounds, fitted)}))
    print(f"wrote {path}; use it with --policy head:{head}:THRESHOLD,calibration=true")  # to be copied, so unbroken


def quality_table(rounds: dict[str, Rounds]) -> Table:
    """By depth, before and after."""
    table = Table(title="chance that all tokens up to a depth are accepted, on the traces of the fit")
    rows = {name: survival_quality(each) for name, each in rounds.items()}
    columns: Sequence[str] = ("depth", "rounds", *(f"{what}\n{name}" for what in ("binary KL", "ECE") for name in rows))
    for column in columns:
        table.add_column(column, justify="right")
    for each in zip(*rows.values(), strict=True):
        values: list[Any] = [f"{row[what]:.4f}" for what in ("binary_kl", "ece") for row in each]
        table.add_row(f"{each[0]['depth']:g}", f"{each[0]['count']:g}", *values)
    return table
