"""Runs `accept-head` commands in forks of one process that has already imported the libraries.

Importing torch, transformers, Lightning and datasets, and tearing them down again, takes longer than most commands
under test. A fork is still a process of its own: exit code, stdout, stderr and exit functions equal those of the
console command. conftest.py starts this file as a script and exchanges JSON lines with it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import sys
import traceback
from typing import Any

PRELOADED = (
    "jsonargparse",
    "torch.utils.tensorboard",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "accept_head.cli",
    "accept_head.inference.verbs.generate",
    "accept_head.training.collect.verb",
    "accept_head.training.learn.run",
)


def serve() -> dict[str, Any] | None:
    """Answer requests until stdin ends (None); in a fork, return the request that it is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            return request
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Take on the streams, environment and arguments of the request."""
    for stream, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.update(request["env"])
    sys.argv = ["accept-head", *request["arguments"]]


def finish(code: Any) -> None:
    """Leave as the interpreter does, but without freeing what it shares with the parent: that takes seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # or a fork's first collection would copy every page
    if (mine := serve()) is not None:
        become(mine)
        try:
            sys.modules["accept_head.cli"].run()
        except SystemExit as stop:
            finish(stop.code)
        except BaseException:
            traceback.print_exc()
            finish(1)
    os._exit(0)
