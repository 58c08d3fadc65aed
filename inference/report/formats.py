"""The format of the report's numbers and words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from accept_head.inference.report.data import printable

NO_NUMBER = "–"
MINUS = "\N{MINUS SIGN}"


def words(text: object) -> str:
    """Any text as HTML."""
    return escape(printable(str(text)))


def rate(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else NO_NUMBER


def speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def times(value: float) -> str:
    return f"{value:.3f}\N{MULTIPLICATION SIGN}"


def per_cent(value: float | None, *, sign: bool = True) -> str:
    """A share like +2.9 %, with a true minus sign and a non-breaking space."""
    if value is None or not math.isfinite(value):
        return NO_NUMBER
    text = f"{abs(value) * 100:.1f}\N{NARROW NO-BREAK SPACE}%"
    if text.startswith("0.0"):
        return text
    return (MINUS if value < 0 else "+" if sign else "") + text


def interval(bounds: Sequence[float] | None) -> str:
    """An interval like '2.8 to 12.6 %', or ''."""
    if not bounds or not all(math.isfinite(bound) for bound in bounds):
        return ""
    low, high = ((MINUS if bound < 0 else "") + f"{abs(bound) * 100:.1f}" for bound in bounds)
    return f"{low} to {high}\N{NARROW NO-BREAK SPACE}%"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g}\N{NARROW NO-BREAK SPACE}ms"


def other_params(params: Mapping[str, Any]) -> str:
    """The parameters that a policy's name does not say."""
    return ", ".join(f"{key} {value}" for key, value in params.items() if key not in ("k", "threshold"))
