"""How an input is spoiled: bytes, JSON, YAML, safetensors and parquet. All of it follows from a random generator."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

SCRIPT = "<script>alert(1)</script>"
TEXTS = (
    "", " ", "\x00", "\x1b[2J", "a\nb", "\u2028", "\ud800", "é" * 3, SCRIPT, "x" * 5000,
    "../../../../escaped", "/escaped/absolute", "~/escaped", "file:///etc/passwd", "CON", "null", "nan", "1e999",
    "__import__('os').system('echo escaped > escaped')", "!!python/object/apply:os.system ['echo escaped > escaped']",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, -0.0, 0.5, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400)
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-", "0x10", "[" * 3000 + "]" * 3000, "9" * 5000, "{", '"', "'a'")
ODD = (None, True, False, [], {}, [[]], [None], {"": ""}, ["a", 1, None], [0] * 3000)


def spoil_bytes(data: bytes, random: Random) -> bytes:
    """One to three places: bits, whole bytes, cuts, repetitions, insertions."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        place = random.randrange(len(data) + 1)
        # Where headers and footers are, more often than by chance.
        place = random.choice((place, min(place % 64, len(data)), max(len(data) - 1 - place % 64, 0)))
        end = min(len(data), place + random.choice((1, 1, 2, 4, 8, 64, 1000)))
        junk = random.choice((b"\x00", b"\xff", b"\x80\x02", b"\xef\xbb\xbf", b'"', b"{", b"\n", random.randbytes(8)))
        data = random.choice(
            (
                data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
                if place < len(data)
                else data + junk,
                data[:place],
                data[place:],
                data[:place] + data[end:],
                data[:place] + junk + data[place:],
                data[:place] + junk * (end - place) + data[end:],
                data[:end] + data[place:],
                data[:place] + random.randbytes(end - place) + data[end:],
            )
        )
    return data


def spoil_value(value: Any, random: Random) -> Any:
    """A copy of a JSON value with one to three of its parts replaced, taken out, put in or renamed."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        holders = [found for found in _holders(value) if len(found)]
        if not holders or random.random() < 0.02:
            return _odd(value, random)
        holder = random.choice(holders)
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        action = random.random()
        if action < 0.7:
            holder[key] = _odd(holder[key], random)
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[random.choice((*TEXTS[:12], "version", "class_path", "config"))] = holder[key]
        else:
            holder.insert(random.randrange(len(holder) + 1), _odd(holder[key], random))
    return value


def spoil_json(value: Any, random: Random) -> bytes:
    """As text: mostly JSON of another value, else a value that JSON has not, else spoiled bytes."""
    kind = random.random()
    if kind < 0.65:
        return json.dumps(spoil_value(value, random), ensure_ascii=random.random() < 0.5).encode(
            "utf-8", "surrogatepass"
        )
    text = json.dumps(value)
    if kind < 0.8:
        places = [place for place, c in enumerate(text) if c in "0123456789[{"]
        place = random.choice(places)
        return (text[:place] + random.choice(RAW) + text[place + 1 :]).encode()
    return spoil_bytes(text.encode(), random)


def spoil_lines(lines: list[Any], random: Random) -> bytes:
    """JSON lines, one of them spoiled."""
    texts = [json.dumps(line).encode() for line in lines]
    place = random.randrange(len(texts))
    texts[place] = spoil_json(lines[place], random)
    return random.choice((b"\n", b"\n", b"\r\n", b"\n\n", b"\x0b")).join(texts)


YAML_TEXTS = (
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{n}: &{n} [{', '.join(['*' + chr(ord(n) - 1)] * 9)}]\n" for n in "bcdefghij"),
    "seed: !!python/object/apply:os.system ['echo escaped > escaped']\n",
    "seed: !!python/name:os.system\n",
    "!!python/object/new:os.system ['echo escaped > escaped']\n",
    "? [a, b]\n: 1\n", "seed: 1\nseed: 2\n", "seed: 0x7fffffffffffffffffff\n", "--- 1\n--- 2\n", "%YAML 9.9\n---\n{}\n",
    "\tseed: 1\n", "<<: {seed: 3}\n", "<<: *nowhere\n", "&a seed: *a\n", "&a [*a]\n", "seed: &a {x: *a}\n", "[]\n",
    "1\n", "\n", "#\n", "seed:\n", "{" * 2000, "- " * 2000, "seed: 2001-01-01\n", "seed: 1_000\n", "seed: 1:30\n",
    "seed: .nan\n", "seed: .inf\n", "config: /etc/passwd\n", "print_config: true\n", "help: true\n", "''\n",
)  # fmt: skip


def spoil_yaml(value: Any, random: Random) -> bytes:
    """YAML of another value, or what YAML alone can do, after the good part or instead of it."""
    import yaml

    kind = random.random()
    if kind < 0.45:
        changed = spoil_value(value, random)
        try:
            return yaml.safe_dump(changed).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, ValueError):
            return json.dumps(changed).encode()
    text = yaml.safe_dump(value)
    if kind < 0.75:
        special = random.choice(YAML_TEXTS)
        return (special if random.random() < 0.3 else text + special).encode()
    return spoil_bytes(text.encode(), random)


def spoil_safetensors(data: bytes, random: Random) -> bytes:
    """The header's length, the header as JSON, or any bytes."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = random.random()
    if kind < 0.15:
        wrong = random.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(data), 100_000_000))
        return wrong.to_bytes(8, "little") + header + rest
    if kind < 0.65:
        changed = spoil_json(json.loads(header), random)
        return len(changed).to_bytes(8, "little") + changed + rest
    return spoil_bytes(data, random)


def spoil_table(table: Any, random: Random) -> Any:
    """A pyarrow table of traces with one column spoiled: another type, nulls, ids and numbers that cannot be, another
    length, no column, two of a name, or the metadata of a pickled extension type."""
    import pyarrow as pa

    place = random.randrange(table.num_columns)
    name = table.column_names[place]
    kind = random.random()
    if kind < 0.07:
        return table.remove_column(place)
    if kind < 0.12:
        return table.append_column(name, table[name])
    if kind < 0.17:
        return table.slice(random.randrange(table.num_rows))
    if kind < 0.22:
        return pa.concat_tables([table, table])
    if kind < 0.32:
        return table.set_column(place, pa.field(name, table[name].type, metadata=PICKLED_TYPE), table[name])
    rows = table[name].to_pylist()
    row = random.randrange(len(rows))
    if isinstance(rows[row], list) and rows[row]:
        spot = random.randrange(len(rows[row]))
        if kind < 0.75:
            rows[row][spot] = random.choice((-1, 2**31 - 1, -(2**31), 0, 1, 4096, 10**6, None))
            if pa.types.is_floating(table[name].type.value_type):
                rows[row][spot] = random.choice((float("nan"), float("inf"), -1.0, 2.0, 1e30, -1e30, None, 0.0))
        elif kind < 0.85:
            rows[row] = rows[row][:spot]
        else:
            rows[row] = random.choice((None, [], rows[row] * 2, rows[row] * 200))
        try:
            column = pa.array(rows, type=table[name].type)
        except (pa.ArrowException, TypeError, OverflowError):  # no such value of that type: of another one then
            column = pa.array([str(values) for values in rows])
    else:
        values = (None, -1, 2**40, 0, "", SCRIPT, "../../escaped", "\x00", True, 0.5, b"\xff\xfe")
        rows[row] = random.choice(values)
        try:
            column = pa.array(rows, type=table[name].type)
        except (pa.ArrowException, TypeError, OverflowError):
            column = pa.array([str(value) for value in rows])
    return table.set_column(place, name, column)


class Escaping:
    """Unpickled, it makes a file."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, ("escaped", "w")


def escaping_pickle() -> bytes:
    import pickle

    return pickle.dumps({"model.0.weight": Escaping()})


PICKLED_TYPE = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": escaping_pickle()}


def torch_pickle() -> bytes:
    """A `pytorch_model.bin` that makes a file when it is unpickled."""
    import torch

    file = io.BytesIO()
    torch.save({"weight": torch.zeros(1), "more": Escaping()}, file)
    return file.getvalue()


def numpy_pickle() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Escaping()], dtype=object), allow_pickle=True)
    return file.getvalue()


def _holders(value: Any) -> list[Any]:
    """Every list and object in a JSON value, itself included."""
    if not isinstance(value, dict | list):
        return []
    parts = value.values() if isinstance(value, dict) else value[:50]
    return [value, *(found for part in parts for found in _holders(part))]


def _odd(value: Any, random: Random) -> Any:
    """Something else: of any type, or near to what it was."""
    kind = random.random()
    if kind < 0.35:
        return random.choice(NUMBERS)
    if kind < 0.6:
        return random.choice(TEXTS)
    if kind < 0.8:
        return copy.deepcopy(random.choice(ODD))
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return random.choice((-value, value * 1000, value - 1, str(value), [value]))
    return [value] if isinstance(value, dict) else value * 2
