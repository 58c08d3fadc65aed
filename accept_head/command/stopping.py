"""Ends a command on SIGTERM or Ctrl-C: soon, with what is finished kept, and with one line that says how to go on."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

LONGEST_CLEANUP = 7.0  # seconds; then the process ends anyway, which loses nothing, as all writes are atomic

# What a verb leaves when it is stopped, and goes on from. The other verbs write one result at their end.
KEPT = {
    "collect": "finished shards",
    "train": "checkpoints",
    "tune": "finished rollouts",
    "generate": "finished responses",
    "bench": "finished cells",
    "fit": "finished steps",
    "demo": "finished steps",
}


class Stopped(BaseException):
    """A signal asks the process to end. Not an Exception, so that no handler of errors goes on after it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


def leave(code: int) -> NoReturn:
    """End the process as Python does, but do not dismantle its modules: one that was stopped while it was loaded, or
    while its own threads ran, may crash then."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    os._exit(code)


@contextmanager
def stopping_on_signals(verb: str) -> Iterator[None]:
    """Raise Stopped in the main thread at the first SIGTERM or SIGINT, and ignore further ones while cleaning up.

    Python swallows what is raised in a `__del__`. The work then goes on for some seconds, and ends in Stopped as well.
    A library may take it for an error of its own, say while it is imported: what it raises then is Stopped, too.
    """
    stopped: Stopped | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped is not None:
            return
        stopped = Stopped(number)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            kept = (
                f"{KEPT[verb]} are kept; the same command goes on" if verb in KEPT else "the same command starts anew"
            )
            line = f"\naccept-head: stopped by {signal.Signals(number).name}: {kept}\n"
            os.write(2, line.encode())  # `print` would fail while the main thread is printing
        end = threading.Timer(LONGEST_CLEANUP, os._exit, [stopped.exit_code])
        end.daemon = True
        end.start()
        raise stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
        if stopped is not None:
            raise stopped
    except Exception as error:
        if stopped is not None:
            raise stopped from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
