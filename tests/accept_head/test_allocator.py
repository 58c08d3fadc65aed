"""A command keeps freed memory: tensors as large as a vocabulary's take no new pages, unless the user wants it so."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")

# Page faults while blocks of 40 MB, in which each page is written to, are allocated and freed again.
PROGRAM = """
import resource
from accept_head import cli

def count(words):
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes(40 << 20), bytearray(b"x") * (40 << 20)
    before = faults()
    for _ in range(10):
        bytearray(b"x") * (40 << 20)
    print(faults() - before)
    return 0

if {told}:
    cli.main = count
    cli.run()
else:
    count([])
"""


def page_faults(told=True, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM.format(told=told)]
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment, check=True)
    return int(done.stdout)


@glibc
def test_a_command_keeps_freed_memory():
    assert page_faults() < 25_000
    assert page_faults(told=False) > 50_000, "the measurement sees nothing"


@glibc
def test_users_who_set_the_allocator_are_left_alone():
    assert page_faults(MALLOC_ARENA_MAX="2") > 50_000
