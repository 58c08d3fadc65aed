"""Where tables go: as wide as they are where nobody says how wide, and with every name as it is."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console


def make_console(*, unseen_width: int | None = None, **options: Any) -> Console:
    """unseen_width: columns where the output is no terminal. Without emoji, which rich would see in `head:ship:0.5`."""
    return Console(width=None if sys.stdout.isatty() else unseen_width, emoji=False, **options)
