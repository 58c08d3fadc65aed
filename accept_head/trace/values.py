"""Which values a trace may hold: a shard can be whole and still not be true, if somebody else wrote it.

Ids index embedding matrices and labels are probabilities; what breaks that is refused where it is read, by name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from accept_head.errors import InputError

ROUNDING = 1e-3  # a sum of float32 probabilities may pass 1 by so much
BOUNDS = {
    "acceptance": (0.0, 1.0),
    "overlap": (0.0, 1 + ROUNDING),
    "target_logprob": (-math.inf, ROUNDING),
    "divergence": (0.0, math.inf),
    "draft_logprob": (-math.inf, ROUNDING),
    "draft_entropy": (-ROUNDING, math.inf),
    "draft_max_prob": (0.0, 1 + ROUNDING),
    "alternative_logprob": (-math.inf, ROUNDING),
    "alternative_acceptance": (0.0, 1.0),
}
IDS = ("prompt_ids", "response_ids", "draft_ids", "alternative_ids")


def check_values(path: Path, table: Any, *, vocab_size: int, unknown: tuple[str, ...] = ()) -> None:
    """Raises InputError naming the shard and the column that holds what it cannot.

    table: a pyarrow table with the columns of a trace, without nulls; those of alternatives may be missing. unknown:
    columns in which NaN is allowed.
    """
    import pyarrow.compute as pc

    prompts, responses = (pc.list_value_length(table[name]) for name in ("prompt_ids", "response_ids"))
    if pc.any(pc.and_(pc.equal(prompts, 0), pc.greater(responses, 0))).as_py():
        raise InputError(f"{path}: column 'prompt_ids' is empty where there is a response")
    for name in (name for name in IDS if name in table.schema.names):
        ids = pc.min_max(pc.list_flatten(table[name])).as_py()
        if ids["min"] is not None and not (ids["min"] >= 0 and ids["max"] < vocab_size):
            raise InputError(f"{path}: column {name!r} has ids beyond the vocabulary (0 to {vocab_size - 1})")
    for name, (least, most) in BOUNDS.items():
        if name not in table.schema.names:
            continue
        values = pc.list_flatten(table[name])
        # min_max passes over NaN, so it is looked for by itself.
        if name not in unknown and pc.any(pc.is_nan(values)).as_py():
            raise InputError(f"{path}: column {name!r} has NaN in it")
        found = pc.min_max(values).as_py()
        for value in () if found["min"] is None else found.values():
            if not math.isnan(value) and not (least <= value <= most and math.isfinite(value)):
                raise InputError(f"{path}: column {name!r} has {value} in it, expected numbers from {least} to {most}")


def check_context(folder: Path, traces: Any, tokens: int) -> None:
    """Raises InputError naming the folder when a prompt with its response is longer than the draft's context, which has
    so many tokens. traces: all records of a folder, a data set."""
    import pyarrow.compute as pc

    lengths = [pc.list_value_length(traces.data.column(name)) for name in ("prompt_ids", "response_ids")]
    longest = pc.max(pc.add(*lengths)).as_py()
    if longest is not None and longest > tokens:
        raise InputError(f"{folder}: has a trace of {longest} tokens, but the draft's context has {tokens}")
