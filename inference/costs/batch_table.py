"""Tables from batch size to draft length: made from measured rounds, read from files, and written as vLLM's option.

    goodput(B, K) = AL(K) / ITL(B, K), tokens per second of one row;   K*(B) = argmax over K, 0 allowed
    AL(K) = 1 + Σ_{j≤K} S_j,   S_j = Π_{i≤j} acc_i

ITL: seconds of a round of B rows that draft K tokens each. acc_i: the chance that the i-th drafted token is accepted if
all tokens before it were. S_j: the chance that the first j are accepted (Su et al., arXiv 2310.18813).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from accept_head.errors import InputError
from accept_head.files import read_json

FIELD = "num_speculative_tokens_per_batch_size"  # vLLM's name of a table
Range = tuple[int, int, int]  # first batch size, last batch size, tokens to draft


def checked_table(table: Any) -> list[Range]:
    """The ranges in order, after the checks that vLLM makes. Raises InputError naming the wrong row."""
    if not isinstance(table, list | tuple) or not table:
        raise InputError(f"a batch map is {table!r}, expected a list of rows [from, to, tokens]")
    for row in table:
        if not isinstance(row, list | tuple) or len(row) != 3 or any(type(value) is not int for value in row):
            raise InputError(f"row {_shown(row)} of a batch map is not three integers, [from, to, tokens]")
        first, last, k = row
        if not 1 <= first <= last:
            raise InputError(f"row {_shown(row)} of a batch map is not a range of batch sizes: 1 <= from <= to")
        if k < 0:
            raise InputError(f"row {_shown(row)} of a batch map drafts {k} tokens, expected 0 or more")
    ranges: list[Range] = sorted((first, last, k) for first, last, k in table)
    if ranges[0][0] != 1:
        raise InputError(f"row {_shown(ranges[0])} is a batch map's first, expected one that starts at batch size 1")
    for before, row in pairwise(ranges):
        if row[0] <= before[1]:
            raise InputError(f"row {_shown(row)} of a batch map overlaps row {_shown(before)}")
    return ranges


def _shown(row: Any) -> str:
    return str(list(row)) if isinstance(row, tuple) else repr(row)


# --- making one ------------------------------------------------------------------------------------------------------


def tokens_per_round(survival: np.ndarray) -> np.ndarray:
    """AL(K) for K = 0, 1, 2, … survival: S_1, S_2, …"""
    return np.concatenate([[1.0], 1 + np.cumsum(survival)])


def interpolate(values: np.ndarray, batch_sizes: Sequence[int], draft_lengths: Sequence[int]) -> np.ndarray:
    """Bilinear: (B, K) at the measured sizes and lengths → (largest B, longest K + 1) at all sizes and lengths."""
    all_lengths = np.arange(draft_lengths[-1] + 1)
    by_length = np.stack([np.interp(all_lengths, draft_lengths, row) for row in values])
    all_sizes = np.arange(1, batch_sizes[-1] + 1)
    return np.stack([np.interp(all_sizes, batch_sizes, column) for column in by_length.T], axis=1)


def best_table(
    seconds: np.ndarray, batch_sizes: Sequence[int], draft_lengths: Sequence[int], tokens: np.ndarray
) -> list[Range]:
    """K*(B) for every B from 1 to the largest, the shortest of equally good K. Neighbours with equal K make a range.

    seconds: (B, K). tokens: AL(K) for K = 0, 1, …, as far as known; larger K are not used.
    """
    goodput = tokens / interpolate(seconds, batch_sizes, draft_lengths)[:, : len(tokens)]
    table: list[Range] = []
    for size, k in enumerate(goodput.argmax(1).tolist(), start=1):
        first = table.pop()[0] if table and table[-1][2] == k else size
        table.append((first, size, k))
    return table


# --- files -----------------------------------------------------------------------------------------------------------


def read_batch_table(path: Path) -> list[Range]:
    """A table from a file of `accept-head profile --batch_map` or a speculative config of vLLM.

    vLLM drafts at most `num_speculative_tokens`. When a file has this field, the table respects it too. Raises
    InputError naming the file and the field.
    """
    values = read_json(path)
    try:
        table = checked_table(values.get(FIELD))
    except InputError as error:
        raise InputError(f"{path}: field {FIELD!r}: {error}") from None
    most = values.get("num_speculative_tokens")
    if most is None:
        return table
    if type(most) is not int or most < 1:
        raise InputError(f"{path}: field 'num_speculative_tokens' is {most!r}, expected a positive integer")
    return [(first, last, min(k, most)) for first, last, k in table]


def vllm_option(table: Sequence[Range], draft: str) -> str | None:
    """The option of `vllm serve` for this table. None when the table never speculates: then vLLM needs no option."""
    most = max(k for _, _, k in table)
    if most == 0:
        return None
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": most, FIELD: [list(r) for r in table]}
    return f"--speculative-config {shlex.quote(json.dumps(config))}"
