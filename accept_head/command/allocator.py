"""Makes glibc keep freed memory, which speeds up training on a CPU.

By default, glibc maps every block above 128 kB anew and unmaps it when it is freed. Nearly all tensors of a training
step are such blocks, so training would spend a tenth of its time or more in page faults.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

KEEP = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_TOP_PAD_": "268435456"}


def keep_freed_blocks() -> None:
    """Restart this command with an environment that makes glibc keep freed memory.

    glibc reads these variables only when a process starts. Does nothing when the user has set one of them, when there
    is a GPU, with another libc, or in a program whose command line is not this command's.
    """
    told = any(name.startswith("MALLOC_") for name in os.environ)
    ours = sys.orig_argv[len(sys.orig_argv) - len(sys.argv[1:]) :] == sys.argv[1:]
    if told or not ours or platform.libc_ver()[0] != "glibc" or Path("/dev/nvidiactl").exists():
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEP)
