"""A simulated CUDA device: torch.cuda around the tensors of far.py.

Everything except the kernels is as on a GPU: the branches of the code, errors when tensors of two devices meet, and the
places where the host waits. So code for GPUs can be rehearsed on real models, and its results must equal those of a CPU
to the bit.

Importing far.py changes a process permanently, so tests that use this run in their own process:
tests/integration/test_rehearsal.py starts it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.inference.support.replayed import Recording
from tests.rehearsal.far import FAR, PretendedGenerator, check_generator, waiting, waits

MEMORY = 64 * 2**30  # bytes


class Translated(TorchFunctionMode):
    """Who asks PyTorch for "cuda" gets the device that is not there."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is Tensor.pin_memory:
            pinned = arguments[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if function is not torch.device:
            arguments, options = tree_map(translated, (arguments, options or {}))
            check_generator(function, arguments, options)
        return function(*arguments, **(options or {}))


def translated(value: Any) -> Any:
    if isinstance(value, torch.device):
        return FAR if value.type == "cuda" else value
    if isinstance(value, str) and value in ("cuda", "cuda:0"):
        return FAR
    return value


class NoDevice(nullcontext):  # type: ignore[type-arg]
    """torch.cuda.device: there is only one."""

    def __init__(self, *_: Any):
        super().__init__()


class Event:
    """torch.cuda.Event: everything is done when it has been asked for."""

    def __init__(self, **_: Any):
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.seconds - self.seconds)


class Stream:
    """torch.cuda.Stream: all is done in order anyway."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


class CUDAGraph:
    """torch.cuda.CUDAGraph: what was recorded is done again, on the same memory."""

    recording: Recording

    def replay(self) -> None:
        self.recording.replay()


class Graph:
    """torch.cuda.graph: within it nothing is done, and nothing may wait."""

    def __init__(self, graph: CUDAGraph, **_: Any):
        self.graph, self.recording = graph, Recording()

    def __enter__(self) -> None:
        self.before = set_sync_debug_mode("error")
        self.recording.__enter__()

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.recording.__exit__(kind, *error)
        set_sync_debug_mode(self.before)
        self.recording.undo()
        self.graph.recording = self.recording


def set_sync_debug_mode(mode: Any) -> Any:
    """torch.cuda.set_sync_debug_mode → the one before."""
    before, waiting["mode"] = waiting["mode"], mode
    return before


STAND_INS = {
    "device": NoDevice,
    "device_of": NoDevice,
    "stream": NoDevice,
    "Event": Event,
    "Stream": Stream,
    "current_stream": Stream,
    "CUDAGraph": CUDAGraph,
    "graph": Graph,
    "graph_pool_handle": lambda: 0,
    "set_stream": lambda stream: None,
    "set_sync_debug_mode": set_sync_debug_mode,
    "get_sync_debug_mode": lambda: waiting["mode"],
}


@contextmanager
def pretend_cuda() -> Iterator[Counter[tuple[str, str]]]:
    """torch.cuda has one device, with 64 GiB. Gives how often the host has waited since, by (what, file:line)."""
    waits.clear()
    lifted = torch._C._only_lift_cpu_tensors()
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "get_device_name": "pretended",
        "get_device_properties": SimpleNamespace(name="pretended", total_memory=MEMORY, multi_processor_count=1),
        "get_device_capability": (8, 0),
        "is_bf16_supported": True,
        "mem_get_info": (MEMORY, MEMORY),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "synchronize": None,
        "set_device": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "manual_seed_all": None,
        "get_rng_state": torch.zeros(0, dtype=torch.uint8),  # its random numbers are the CPU's
        "set_rng_state": None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for name, stand_in in STAND_INS.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(torch, "Generator", PretendedGenerator))
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes it here and sends it there
        stack.enter_context(Translated())
        yield waits
