"""What a rank does when another rank has died in the middle of a collective.

The other ranks only see a broken connection. The launcher knows which rank died: torchrun's agent, or Lightning in the
process that started the others. It needs a few seconds to notice this, to report it, and to end the rest. A rank that
fails before would be reported instead.
"""

from __future__ import annotations

import re
import sys
import time

BROKEN = re.compile(r"gloo/transport|NCCL|Connection (reset|closed) by peer|DistBackendError")
LAUNCHER_LOOKS = 15.0  # seconds; within these the launcher checks its ranks (Lightning checks every 5)


def lost_a_rank(error: BaseException | None) -> bool:
    """Whether the error comes from a failed collective, which means that another rank has ended."""
    while error is not None:
        if isinstance(error, RuntimeError) and BROKEN.search(f"{type(error).__name__} {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


def wait_for_the_launcher() -> int:
    """Print what happened, then wait until the launcher ends this process. Otherwise returns an exit code."""
    print(
        "accept-head: error: another rank has ended, so this one stops; its message is the one to read", file=sys.stderr
    )
    sys.stderr.flush()
    time.sleep(LAUNCHER_LOOKS)
    return 1
