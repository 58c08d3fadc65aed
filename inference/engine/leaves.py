"""Splits a function's arguments and results into a list of tensors and the structure around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

PLAIN = (int, float, bool, str, type(None), frozenset)


def take_apart(value: Any, leaves: list[Tensor]) -> Any:
    """Add the value's tensors to `leaves` → the rest of it, which can be compared and hashed. It must be fast: a round
    has a dozen calls, each with a dozen values, and after a sync the device waits for them."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return Tensor
    kind = type(value)
    if kind in PLAIN:
        return (None, value)
    if isinstance(value, (list, tuple)):
        return (kind, *[take_apart(each, leaves) for each in value])
    if kind is dict:
        return (dict, *[(name, take_apart(each, leaves)) for name, each in value.items()])
    if names := _field_names(kind):
        return (kind, *[take_apart(getattr(value, name), leaves) for name in names])
    return (None, value)


_names: dict[Any, tuple[str, ...]] = {}


def _field_names(kind: Any) -> tuple[str, ...]:
    """The field names of a dataclass; empty for other types."""
    if kind not in _names:
        _names[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    return _names[kind]


def put_together(shape: Any, leaves: Iterator[Tensor]) -> Any:
    """The value that `take_apart` split."""
    if shape is Tensor:
        return next(leaves)
    kind, *parts = shape
    if kind is None:
        return parts[0]
    if kind is dict:
        return {name: put_together(part, leaves) for name, part in parts}
    values = [put_together(part, leaves) for part in parts]
    if kind is list or kind is tuple:
        return kind(values)
    # A named tuple, or a dataclass, whose fields may be keyword-only.
    names = _field_names(kind)
    return kind(**dict(zip(names, values, strict=True))) if names else kind(*values)
