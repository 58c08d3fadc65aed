"""Compiles a small function of tensors into one native call: starting its operations costs more than their work.

Between two calls the models run and push everything out of the CPU's caches. Then starting an operation of torch takes
10 to 20 µs on a CPU, and the wrapper of torch.compile, mostly guards, takes 250 µs. AOTInductor's runner takes about
40 µs a call. It checks nothing, so `Compiled` does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accept_head.errors import one_line

# Weights that a function holds are not copied into the package: one compilation serves all heads of a shape.
UNPACKED = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}

Function = Callable[..., Any]  # of tensors, to a tensor or a tuple of them
Example = Sequence[Tensor | None]
Run = Callable[[list[Tensor]], list[Tensor]]


class Compiled:
    """Calls `run`, the compiled `function`, for inputs like `example`; for all others, `function` itself. Inputs that
    are None in the example are ignored. Returns one result as it is, several as a tuple. See `compiled`."""

    def __init__(self, function: Function, run: Run, example: Example, *, name: str, several: bool):
        self.function, self.run, self.name, self.several = function, run, name, several
        self.expected = [
            (place, each.dtype, each.device, each.shape[1:]) for place, each in enumerate(example) if each is not None
        ]
        self.holds: object = None
        self.missed = False  # whether it got inputs that it was not compiled for

    def __call__(self, *inputs: Tensor | None) -> Any:
        ready, batch = [], -1
        for place, dtype, device, rest in self.expected:
            given = inputs[place]
            if given is None or given.dtype is not dtype or given.device != device:
                return self._uncompiled(inputs)
            shape = given.shape
            if batch < 0:
                batch = shape[0] if shape else 0
            if not batch or not shape or shape[0] != batch or shape[1:] != rest:
                return self._uncompiled(inputs)
            ready.append(given if given.is_contiguous() else given.contiguous())
        results = self.run(ready)
        return tuple(results) if self.several else results[0]

    def _uncompiled(self, inputs: Sequence[Tensor | None]) -> Any:
        empty = isinstance(inputs[0], Tensor) and not inputs[0].numel()
        if not (empty or self.missed):
            self.missed = True
            got = ", ".join("none" if each is None else f"{each.dtype} {tuple(each.shape)}" for each in inputs)
            _log().warning("accept-head: %s was not compiled for %s, hence slower", self.name, got)
        return self.function(*inputs)


def compiled(function: Function, example: Example, *, name: str, logger: logging.Logger | None = None) -> Function:
    """`function`, compiled for any batch from 1. If it cannot be compiled, `function` itself, and the log says why.
    Takes seconds the first time, less from a cache on disk. Compiles for a CPU only.

    function: pure, of tensors (batch, …). Tensors that it holds are used without a copy, and may only be changed in
    place. example: inputs with a batch of 2 or more; their dtypes, and shapes without the batch, are fixed. None stands
    for an input that the function does not read. name: for messages. logger: gets the messages.
    """
    log = logger or _log()
    given = [each for each in example if each is not None]
    if any(each.device.type != "cpu" for each in given):
        return function
    began = time.perf_counter()
    try:
        made = _compile(function, example, name)
    except Exception as error:  # for example no compiler: the function works without
        reason = one_line(error)
        log.warning("accept-head: %s is not compiled (%s: %s), hence slower", name, type(error).__name__, reason)
        return function
    log.info("accept-head: %s compiled in %.1f s", name, time.perf_counter() - began)
    return made


class _Module(nn.Module):
    """The function as a module of only the inputs that it reads, as export requires."""

    def __init__(self, function: Function, example: Example):
        super().__init__()
        self.function, self.reads = function, [each is not None for each in example]

    def forward(self, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        return self.function(*[next(rest) if read else None for read in self.reads])


class _Holding(nn.Module):
    """An exported graph with its constants as buffers: held0, held1, …"""

    def __init__(self, exported: Any):
        super().__init__()
        self.graph = exported.graph_module
        values = {**exported.state_dict, **exported.constants}
        # The graph's inputs in order: one with a target is a constant, the others are arguments.
        targets = [spec.target for spec in exported.graph_signature.input_specs]
        self.held = [None if target is None else f"held{place}" for place, target in enumerate(targets)]
        for name, target in zip(self.held, targets, strict=True):
            if name is not None:
                self.register_buffer(name, values[target].detach())

    def forward(self, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        return self.graph(*[next(rest) if name is None else getattr(self, name) for name in self.held])


def _compile(function: Function, example: Example, name: str) -> Compiled:
    """Export the function, compile it unless the cache has it, load it and test it."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package
    from torch.export import Dim, export

    # vLLM may build under inference mode, whose tensors cannot be exported.
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = tuple(each.clone() for each in example if each is not None)
        any_batch = ({0: Dim.DYNAMIC},) * len(inputs)  # raises if the batch cannot be dynamic
        traced = export(_Module(function, example), inputs, dynamic_shapes=(any_batch,), strict=True)
        exported = export(_Holding(traced), inputs, dynamic_shapes=(any_batch,))
        package = _folder() / f"{_key(exported, inputs)}.pt2"
        if not package.is_file():
            _write(
                lambda path: aoti_compile_and_package(exported, package_path=path, inductor_configs=dict(UNPACKED)),
                package,
            )
        model, held = aoti_load_package(str(package)), exported.state_dict
        if names := model.get_constant_fqns():
            model.load_constants({key: held[key] for key in names}, check_full_update=True, user_managed=True)
        run: Run = model.loader.run  # skips the copying of argument trees
        several = _check(function, example, run)
    made = Compiled(function, run, example, name=name, several=several)
    made.holds = model, held  # `run` points at them
    return made


def _write(make: Callable[[str], object], package: Path) -> None:
    """Write the package atomically: other engines may start at the same time."""
    package.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        made = Path(folder) / "model.pt2"
        make(str(made))
        os.replace(made, package)


def _check(function: Function, example: Example, run: Run) -> bool:
    """Whether the function has several results. Raises AssertionError if the compiled results differ."""
    several = False
    for batch in (1, 2, 5):
        inputs = [None if each is None else each[:1].expand(batch, *each.shape[1:]).contiguous() for each in example]
        expected, found = function(*inputs), run([each for each in inputs if each is not None])
        several = not isinstance(expected, Tensor)
        torch.testing.assert_close(found, list(expected) if several else [expected], rtol=1e-3, atol=1e-3)
    return several


def _key(exported: Any, inputs: Sequence[Tensor]) -> str:
    """A hash of everything that the machine code depends on, without the values of held tensors."""
    parts = [torch.__version__, torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()), str(UNPACKED)]
    parts += [str(exported.graph_module.code)]
    for name, tensor in [*sorted(exported.state_dict.items()), *enumerate(inputs)]:
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "accept_head"


def _log() -> logging.Logger:
    return logging.getLogger(__name__)
