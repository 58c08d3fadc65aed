"""Training on a CPU spends a tenth of its time or more in page faults: glibc maps every block above 128 kB anew, and
unmaps it when it is freed, and nearly all tensors of a training step are such blocks."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

KEEP = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_TOP_PAD_": "268435456"}


def keep_freed_blocks() -> None:
    """Start this command anew with glibc told to keep freed memory for itself: it reads that from the environment only,
    before anything runs. Does nothing where the user has set any of it, where there is a GPU, with another libc, or in
    a program that was started with other words than this command's."""
    told = any(name.startswith("MALLOC_") for name in os.environ)
    ours = sys.orig_argv[len(sys.orig_argv) - len(sys.argv[1:]) :] == sys.argv[1:]
    if told or not ours or platform.libc_ver()[0] != "glibc" or Path("/dev/nvidiactl").exists():
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | KEEP)
