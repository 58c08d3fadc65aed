"""Training data of the SpecDec++ research code: one JSON file, a list of records.

Most of their lists are strings, like "[1, 2]", which their code evaluates. Here they are parsed as JSON. Nothing is
evaluated or unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accept_head.errors import InputError, one_line
from accept_head.files import parse_json


@dataclass(frozen=True)
class Record:
    """One record of their data. Positions are those of the target's response.

    prompt_ids: their `prefix`. response_ids: `tokens`, the target's X. draft_ids: `draft`, Y_i ∼ q given the prompt and
    X_<i, drawn independently of X_i. acceptance: `p_acc`, a(Y_i). logprobs: each `log_p_NAME`, log Q(Y_i) of one model
    Q.
    """

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    draft_ids: list[int]
    acceptance: list[float]
    logprobs: dict[str, list[float]]


def read_records(path: Path, vocab_size: int) -> list[Record]:
    """Read their JSON file. Raises InputError naming the record and the field.

    The whole file and its records are in memory. vocab_size: all ids must be below it.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({one_line(error)})") from None
    if not isinstance(values, list) or not values:
        raise InputError(f"{path}: expected a JSON list of at least one record, found {_kind(values)}")
    return [_record(f"{path}, record {place}", value, place, vocab_size) for place, value in enumerate(values)]


def _record(where: str, value: Any, place: int, vocab_size: int) -> Record:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, found {_kind(value)}")
    ids = {name: _ids(where, name, _numbers(where, value, name), vocab_size) for name in ("prefix", "tokens", "draft")}
    numbers = {name: _numbers(where, value, name) for name in value if name == "p_acc" or name.startswith("log_p_")}
    if "p_acc" not in numbers:
        raise InputError(f"{where}: field 'p_acc' is missing")
    for name, column in {"draft": ids["draft"], **numbers}.items():
        if len(column) != len(ids["tokens"]):
            raise InputError(f"{where}: field {name!r} has {len(column)} values, but 'tokens' has {len(ids['tokens'])}")
    if outside := [p for p in numbers["p_acc"] if not 0 <= p <= 1]:
        raise InputError(f"{where}: field 'p_acc' has {outside[0]!r} in it, expected probabilities")
    named = value.get("id", place)
    if not isinstance(named, str | int):
        raise InputError(f"{where}: field 'id' is {_kind(named)}, expected text or a number")
    logprobs = {name: column for name, column in numbers.items() if name != "p_acc"}
    return Record(str(named), ids["prefix"], ids["tokens"], ids["draft"], numbers["p_acc"], logprobs)


def _numbers(where: str, record: dict[str, Any], name: str) -> list[Any]:
    """A field with a list of numbers, which may be stored as a string."""
    if name not in record:
        raise InputError(f"{where}: field {name!r} is missing")
    value = record[name]
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: field {name!r} is a text that is no JSON list of numbers") from None
    if not isinstance(value, list) or not all(type(number) in (int, float) for number in value):
        raise InputError(f"{where}: field {name!r} is not a list of numbers")
    return value


def _ids(where: str, name: str, values: Sequence[Any], vocab_size: int) -> list[int]:
    if not values:
        raise InputError(f"{where}: field {name!r} is empty")
    if wrong := [v for v in values if not isinstance(v, int) or not 0 <= v < vocab_size]:
        raise InputError(f"{where}: field {name!r} has {wrong[0]} in it, expected ids from 0 to {vocab_size - 1}")
    return list(values)


def _kind(value: Any) -> str:
    return f"an empty {type(value).__name__}" if value in ([], {}, "") else type(value).__name__
