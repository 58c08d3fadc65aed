"""What is printed while and after something runs: tables with names unchanged, and progress that a log can show."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from tqdm import tqdm

LINE_EVERY = 15.0  # seconds
LINE = "{desc}: {n_fmt}/{total_fmt} {unit}s after {elapsed}, {remaining} left, {rate_fmt}{postfix}"


def make_console(*, unseen_width: int | None = None, **options: Any) -> Console:
    """Make a console. unseen_width: columns when the output is no terminal.

    Emoji codes are off, because rich would replace `:ship:` in `head:ship:0.5`.
    """
    return Console(width=None if sys.stdout.isatty() else unseen_width, emoji=False, **options)


class Progress(tqdm):
    """tqdm's bar on a terminal. Where stderr is none: a line at the start, at the end, and every LINE_EVERY seconds,
    also when nothing has been finished since."""

    disable: bool

    def __init__(self, *arguments: Any, **options: Any):
        self.lines = not sys.stderr.isatty()
        if self.lines:
            options |= {"mininterval": LINE_EVERY, "miniters": 1, "bar_format": LINE}
        self.closed, self.shown = threading.Event(), 0.0
        super().__init__(*arguments, **options)
        if self.lines and not self.disable:
            threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self.closed.wait(LINE_EVERY):
            if time.monotonic() - self.shown >= LINE_EVERY:
                self.refresh()

    def display(self, *arguments: Any, **options: Any) -> Any:
        self.shown = time.monotonic()
        return super().display(*arguments, **options)

    def close(self) -> None:
        self.closed.set()
        if self.lines and not self.disable:  # tqdm would end its one line, and ours have ended
            self.refresh()
            self.disable = True
            self._decr_instances(self)
        super().close()

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        if file.isatty():
            return tqdm.status_printer(file)

        def print_line(text: str) -> None:
            if text:
                print(text, file=file, flush=True)

        return print_line
