"""CUDA graphs: record a function of tensors on a GPU and replay it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from accept_head.errors import InputError


class GraphBackend(Protocol):
    """Captures and replays functions: CUDA, or a stand-in in tests. captures: how many so far."""

    captures: int

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Run the function before its capture. Raises RuntimeError when it waits for the device."""
        ...

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record the function's work → a function that replays it."""
        ...


class CudaGraphs:
    """torch.cuda.CUDAGraph, all in one pool of memory, captured on one side stream."""

    def __init__(self, device: torch.device):
        self.device, self.captures = device, 0
        with torch.cuda.device(device):
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def warm_up(self, function: Callable[[], Any]) -> None:
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                function()  # the first run sets up libraries, which may wait for the device
                with _waiting_is_an_error():
                    function()
        finally:
            here.wait_stream(self.stream)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # thread_local: the work of other threads, for example data loaders, is no part of the capture.
        options: Any = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.device(self.device), torch.cuda.graph(graph, **options):
                function()
        finally:
            torch.cuda.set_stream(here)  # after a failed capture torch keeps the side stream
        self.captures += 1
        return graph.replay


def check_one_device(model: torch.nn.Module) -> None:
    """Raises InputError for a model on several devices."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise InputError(f"compile is 'graphs', which needs a model on one device, but it is on {sorted(devices)}")


def graph_backend(device: torch.device) -> GraphBackend:
    """CUDA graphs on this device. Raises InputError for a device without them."""
    if device.type != "cuda":
        raise InputError(f"compile is 'graphs', which needs a CUDA device, but the models are on {device}")
    return CudaGraphs(device)


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode does not detect every sync
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
