"""Checks of the values in a trace. A shard that somebody else wrote can be undamaged and still hold wrong values.

Ids must index embedding matrices, and labels must be probabilities. Other values are refused when the trace is read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from accept_head.errors import InputError

ROUNDING = 1e-3  # a sum of float32 probabilities may exceed 1 by this much
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
    """Raises InputError naming the shard and the column when it holds an impossible value.

    table: a pyarrow table with the columns of a trace, without nulls. The columns of alternatives may be missing.
    unknown: columns in which NaN is allowed.
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
        # min_max ignores NaN.
        if name not in unknown and pc.any(pc.is_nan(values)).as_py():
            raise InputError(f"{path}: column {name!r} has NaN in it")
        found = pc.min_max(values).as_py()
        for value in () if found["min"] is None else found.values():
            if not math.isnan(value) and not (least <= value <= most and math.isfinite(value)):
                raise InputError(f"{path}: column {name!r} has {value} in it, expected numbers from {least} to {most}")


def check_context(folder: Path, traces: Any, tokens: int) -> None:
    """Raises InputError naming the folder when a prompt with its response is longer than the draft's context.

    traces: all records of a folder, a data set. tokens: length of the draft's context.
    """
    import pyarrow.compute as pc

    lengths = [pc.list_value_length(traces.data.column(name)) for name in ("prompt_ids", "response_ids")]
    longest = pc.max(pc.add(*lengths)).as_py()
    if longest is not None and longest > tokens:
        raise InputError(f"{folder}: has a trace of {longest} tokens, but the draft's context has {tokens}")
