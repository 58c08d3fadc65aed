"""Training restarts itself with an allocator that keeps freed memory: once, and only if the user has chosen none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from accept_head.command.allocator import KEEP

PROGRAM = "import os; from accept_head import cli; cli.main = lambda words: print(os.getpid(), words, " \
    "[os.environ.get(name) for name in {names}]); cli.run()"  # fmt: skip
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")


def started(*words, **environment):
    """What a new process prints, without its number, and whether it is still the process that was started."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM.format(names=list(KEEP)), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=inherited | environment)
    number, _, rest = process.communicate()[0].strip().partition(" ")
    return rest, int(number) == process.pid


@glibc
def test_train_keeps_freed_memory_and_its_words_and_its_process_number():
    rest, same = started("train", "--depth", "3", "a b")
    assert rest == f"{['train', '--depth', '3', 'a b']} {list(KEEP.values())}"
    assert same, "accelerate launch waits for the process that it started"


@glibc
def test_a_program_that_calls_the_command_line_is_not_started_anew():
    program = f"import sys; sys.argv = ['accept-head', 'train', '--depth', '3']; {PROGRAM.format(names=list(KEEP))}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", program, "other"], capture_output=True, text=True, env=inherited)
    assert done.stdout.strip().endswith("['train', '--depth', '3'] [None, None, None]")


@glibc
@pytest.mark.parametrize(
    ("words", "environment"), [(("generate", "train"), {}), ((), {}), (("train",), {"MALLOC_ARENA_MAX": "2"})]
)
def test_other_verbs_and_users_who_set_the_allocator_are_left_alone(words, environment):
    assert started(*words, **environment) == (f"{list(words)} [None, None, None]", True)
