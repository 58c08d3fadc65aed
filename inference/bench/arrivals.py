"""When requests arrive: traces of real services, and an iterator that hands requests out at their times.

Azure      CSV    TIMESTAMP (date and time), ContextTokens, GeneratedTokens
BurstGPT   CSV    Timestamp (seconds), Request tokens, Response tokens
Mooncake   JSONL  timestamp (milliseconds), input_length, output_length
Any of them may be gzipped. Requests without output are left out; in BurstGPT these are failed requests.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accept_head.errors import InputError
from accept_head.inference.decode.rows import Request


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. seconds: since the first request. prompt_tokens, output_tokens: from the real service."""

    seconds: float
    prompt_tokens: int
    output_tokens: int


class Fields(NamedTuple):
    """A format's names for its three numbers."""

    time: str
    prompt: str
    output: str


MOONCAKE = Fields("timestamp", "input_length", "output_length")
CSV_FORMATS = (
    Fields("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    Fields("Timestamp", "Request tokens", "Response tokens"),
)


def read_trace(path: Path, requests: int | None = None) -> list[Arrival]:
    """Arrivals in the order of time, the first at 0 seconds.

    requests: the most requests to use. Raises InputError naming the file, and the line if one is wrong.
    """
    found = sorted(_arrivals(path), key=lambda arrival: arrival.seconds)[:requests]
    if not found:
        raise InputError(f"{path}: has no requests")
    return [replace(arrival, seconds=arrival.seconds - found[0].seconds) for arrival in found]


def _arrivals(path: Path) -> Iterator[Arrival]:
    """The requests with output, in the file's order. seconds: since an arbitrary moment."""
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise InputError(f"{path}: is empty, expected an arrival trace")
    read = _json_lines if first[1].lstrip().startswith("{") else _csv_lines
    return (arrival for arrival in read(path, first, lines) if arrival.output_tokens > 0)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) for each line that is not blank."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as a text file ({error})") from None


def _json_lines(path: Path, first: tuple[int, str], rest: Iterable[tuple[int, str]]) -> Iterator[Arrival]:
    for number, line in (first, *rest):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: is not JSON") from None
        if not isinstance(record, dict):
            raise InputError(f"{where}: is {type(record).__name__}, expected an object with {', '.join(MOONCAKE)}")
        for name in MOONCAKE:
            if name not in record:
                raise InputError(f"{where}: field {name!r} is missing")
        yield Arrival(
            _seconds(record["timestamp"], "timestamp", where) / 1000,
            _tokens(record["input_length"], "input_length", where),
            _tokens(record["output_length"], "output_length", where),
        )


def _csv_lines(path: Path, first: tuple[int, str], rest: Iterable[tuple[int, str]]) -> Iterator[Arrival]:
    header = [name.strip() for name in next(csv.reader([first[1].removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")]))]
    fields = next((fields for fields in CSV_FORMATS if set(fields) <= set(header)), None)
    if fields is None:
        known = "; or ".join(", ".join(fields) for fields in CSV_FORMATS)
        raise InputError(f"{path}, line {first[0]}: columns are {header}, expected {known}; or JSON lines")
    places = [header.index(name) for name in fields]
    for number, line in rest:
        where, values = f"{path}, line {number}", next(csv.reader([line]))
        if len(values) <= max(places):
            raise InputError(f"{where}: has {len(values)} of {len(header)} columns")
        moment, prompt, output = (values[place].strip() for place in places)
        yield Arrival(
            _moment(moment, fields.time, where) if fields.time == "TIMESTAMP" else _seconds(moment, fields.time, where),
            _tokens(prompt, fields.prompt, where),
            _tokens(output, fields.output, where),
        )


def _moment(text: str, field: str, where: str) -> float:
    """A date and time in seconds. Without a time zone it is read as UTC; only differences matter here."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{where}: {field} is {text!r}, expected a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _seconds(value: Any, field: str, where: str) -> float:
    if math.isnan(number := _number(value)):
        raise InputError(f"{where}: {field} is {value!r}, expected a time of 0 or more")
    return number


def _tokens(value: Any, field: str, where: str) -> int:
    number = _number(value)
    if math.isnan(number) or number != int(number):
        raise InputError(f"{where}: {field} is {value!r}, expected a number of tokens")
    return int(number)


def _number(value: Any) -> float:
    """The value as a number of at least 0, otherwise NaN."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if 0 <= number < math.inf else math.nan


def match_prompts(arrivals: Sequence[Arrival], lengths: Sequence[int]) -> tuple[list[int], Literal["length", "order"]]:
    """Which prompt is used for each arrival, and how prompts were chosen. lengths: tokens of each prompt.

    `length`: the unused prompt of the nearest length. This is used when at least half of the arrivals have a length
    between the shortest and the longest prompt. Otherwise most arrivals would be nearest to the same few prompts, and
    prompts are taken in `order`. After all prompts were used, they are used again.
    """
    low, high = min(lengths), max(lengths)
    if 2 * sum(low <= arrival.prompt_tokens <= high for arrival in arrivals) < len(arrivals):
        return [index % len(lengths) for index in range(len(arrivals))], "order"
    unused: list[tuple[int, int]] = []
    chosen = []
    for arrival in arrivals:
        unused = unused or sorted((length, index) for index, length in enumerate(lengths))
        place = bisect_left(unused, (arrival.prompt_tokens, 0))
        nearest = min(unused[max(0, place - 1) : place + 1], key=lambda item: abs(item[0] - arrival.prompt_tokens))
        unused.remove(nearest)
        chosen.append(nearest[1])
    return chosen, "length"


class Paced(Iterator[Request | None]):
    """Gives requests to the decode loop at their times. Yields None while the next request has not arrived.

    seconds: arrival of each request, since the loop first asked, in ascending order. clock: monotonic seconds.
    """

    def __init__(
        self, requests: Sequence[Request], seconds: Sequence[float], clock: Callable[[], float] = time.perf_counter
    ):
        assert len(requests) == len(seconds)
        self.arrivals, self.clock = list(zip(requests, seconds, strict=True)), clock
        self.handed: list[float] = []  # seconds at which the loop took each request, in the order of arrival
        self.begin: float | None = None

    @property
    def now(self) -> float:
        """Seconds since the loop first asked."""
        if self.begin is None:
            self.begin = self.clock()
        return self.clock() - self.begin

    def __next__(self) -> Request | None:
        if len(self.handed) == len(self.arrivals):
            raise StopIteration
        request, due = self.arrivals[len(self.handed)]
        if (now := self.now) < due:
            return None
        self.handed.append(now)
        return request
