"""The console for tables. It prints names unchanged, and tables at full width when no width is set."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console


def make_console(*, unseen_width: int | None = None, **options: Any) -> Console:
    """Make a console. unseen_width: columns when the output is no terminal.

    Emoji codes are off, because rich would replace `:ship:` in `head:ship:0.5`.
    """
    return Console(width=None if sys.stdout.isatty() else unseen_width, emoji=False, **options)
