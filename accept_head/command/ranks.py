"""What a rank does when another one has died in the middle of a collective.

The dead one cannot say so, and the others only see a connection that broke. The launcher knows: torchrun's agent, or
Lightning in the process that started the others. It needs a few seconds to notice, to say which rank it was, and to end
the rest; a rank that fails before that would be taken for the culprit.
"""

from __future__ import annotations

import re
import sys
import time

BROKEN = re.compile(r"gloo/transport|NCCL|Connection (reset|closed) by peer|DistBackendError")
LAUNCHER_LOOKS = 15.0  # seconds in which it does; Lightning every 5


def lost_a_rank(error: BaseException | None) -> bool:
    """Whether a collective failed, which only another rank's end makes it do."""
    while error is not None:
        if isinstance(error, RuntimeError) and BROKEN.search(f"{type(error).__name__} {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


def wait_for_the_launcher() -> int:
    """Say what happened and let the launcher end this process; returns an exit code, should nobody do that."""
    print(
        "accept-head: error: another rank has ended, so this one stops; its message is the one to read", file=sys.stderr
    )
    sys.stderr.flush()
    time.sleep(LAUNCHER_LOOKS)
    return 1
