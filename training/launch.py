"""How many processes this run has, and the options of Lightning's Trainer that follow from it.

It handles one process, `torchrun`, and `accelerate launch` (CPU or GPU, one host or many).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accept_head.errors import InputError

STARTER = "ACCEPT_HEAD_STARTED_BY"  # environment variable: the process that started the other ranks of this host
_before: list[tuple[int, int]] = []  # processes and hosts of this process's runs


def trainer_options(precision: str = "fp32") -> dict[str, Any]:
    """Options of `lightning.Trainer` shared by collect and train: devices, strategy, precision."""
    from lightning.pytorch.strategies import DDPStrategy

    from accept_head.training.checkpoints import AtomicCheckpoints

    use_cpu = use_cpu_only()
    devices, nodes = _processes()
    _before.append((devices, nodes))
    _stop_together(devices * nodes)
    return {
        "accelerator": "cpu" if use_cpu else "gpu",
        "devices": devices,
        "num_nodes": nodes,
        # Every rank has the same frozen draft and trains only the heads, so there are no buffers to broadcast.
        "strategy": DDPStrategy(broadcast_buffers=False, process_group_backend="gloo" if use_cpu else None)
        if devices * nodes > 1
        else "auto",
        "precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[precision],
        "use_distributed_sampler": False,  # our samplers divide by rank, without padding
        "enable_model_summary": False,
        "plugins": [AtomicCheckpoints()],
    }


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process where nobody handles it, as it would without Lightning, which only takes note of it
    in a predict run."""
    unhandled = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if unhandled:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if unhandled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def use_cpu_only() -> bool:
    return not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")


def local_device() -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    return torch.device("cpu") if use_cpu_only() else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def set_cpu_threads(count: int) -> None:
    """Set the number of threads of each matrix product on a CPU.

    A product on another number of threads can round differently, and one different sampled token changes the trace. So
    equal bits need an equal number.
    """
    if use_cpu_only():
        torch.set_num_threads(count)


def _stop_together(processes: int) -> None:
    """Make all ranks end when one rank dies. Otherwise the others would wait for it, or continue for nothing.

    torchrun's agent, or Lightning in rank 0, started the ranks. It watches them and reports which one ended. Here each
    rank only has to end when its starter ends.
    """
    if processes == 1:
        return
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    starter = int(os.environ.get(STARTER, os.getppid()))
    if "LOCAL_RANK" not in os.environ:
        os.environ[STARTER] = str(os.getpid())
    elif starter != os.getpid():  # Lightning also sets LOCAL_RANK in the process that starts the others
        threading.Thread(target=_end_with, args=(starter,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    rank = os.environ.get("RANK", os.environ["LOCAL_RANK"])
    print(f"accept-head: error: rank {rank} stops, as process {parent}, which started it, has ended", file=sys.stderr)
    os._exit(1)  # an ordinary exit would hang in a collective that waits for the dead rank


def _processes() -> tuple[int, int]:
    """(processes on this host, hosts)."""
    environment = os.environ
    # Lightning removes WORLD_SIZE after a run, and `fit` has several runs in one process.
    if "LOCAL_RANK" in environment and "WORLD_SIZE" not in environment and _before:
        return _before[-1]
    if "LOCAL_RANK" in environment and "WORLD_SIZE" in environment:  # started by torchrun, accelerate, or Lightning
        world = int(environment["WORLD_SIZE"])
        # Lightning sets no RANK and starts processes on one host only. A LOCAL_WORLD_SIZE without RANK is from another
        # program: vLLM leaves one behind in a process that had an engine.
        local = int(environment.get("LOCAL_WORLD_SIZE", world)) if "RANK" in environment else world
        return local, world // local
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
        count = _accelerate_cpu_processes()
        environment.pop("MASTER_PORT", None)  # accelerate's constant; Lightning picks a free port for this host
        return count, 1
    return 1, 1


def _accelerate_cpu_processes() -> int:
    """N of `accelerate launch --cpu --num_processes N`.

    Without MPI, accelerate (1.15) starts one process and does not pass N on. So N is read from accelerate's command
    line, and Lightning starts the other processes.
    """
    import psutil
    from accelerate.commands.launch import launch_command_parser, load_config_from_file

    parent = psutil.Process().parent()
    words = parent.cmdline() if parent is not None else []
    starts = [i for i, word in enumerate(words) if word == "launch" or ("accelerate" in word and "launch" in word)]
    if not starts:
        raise InputError(
            "MASTER_ADDR is set as by accelerate launch, but the launcher's command line cannot be read; use torchrun"
        )
    options = launch_command_parser().parse_known_args(words[starts[0] + 1 :])[0]
    if options.num_processes:
        return int(options.num_processes)
    return int(load_config_from_file(options.config_file).num_processes)
