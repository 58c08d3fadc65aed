"""A CUDA device that is not there: tensors that say `cuda:0`, while a CPU does their arithmetic.

Everything but the kernels is what it is on a GPU: which branches the code takes, whether tensors of two devices meet,
and where the host waits for the device. So code that has never seen a GPU can be rehearsed on real models, and what
comes out must be what comes out on a CPU, bit for bit.

How: `Far` wraps a CPU tensor. PyTorch sees it on a device of its own (PrivateUse1, called "far"), whose operations
unwrap it, look at the devices and run on the CPU; everybody else sees "cuda:0". Registering that device changes a
process for good, so tests that use it have one of their own: tests/integration/test_rehearsal.py starts it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.inference.attention_contracts import flash_attention_forward, varlen_attn
from tests.inference.replayed import Recording


class FarModule(_DummyBackendModule):  # type: ignore[misc]
    """torch.far. Its random numbers without a generator are the CPU's, whose state is kept there."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


_setup_privateuseone_for_python_backend(rename="far", backend_module=FarModule())
FAR, CUDA, CPU = torch.device("far", 0), torch.device("cuda", 0), torch.device("cpu")
REPOSITORY, HERE, TORCH = Path(__file__).parents[2], str(Path(__file__)), str(Path(torch.__file__).parent)

aten = torch.ops.aten
# What the host needs an answer for: a number, or how large the result is.
ANSWERS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
IN_PARTS = "CompositeImplicitAutograd"  # operations that are done by others
RESHAPED = {aten.squeeze_, aten.unsqueeze_, aten.transpose_, aten.t_}
MEMORY = 64 * 2**30  # bytes
waits: Counter[tuple[str, str]] = Counter()


class MixedDevices(RuntimeError):
    """An operation was given tensors of two devices."""


class Far(Tensor):
    """inner: the CPU tensor that holds the numbers."""

    inner: Tensor
    is_cuda = True

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=FAR,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        """PyTorch itself is told where it really is."""
        return FAR if sys._getframe(1).f_code.co_filename.startswith(TORCH) else CUDA

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        wait("tolist")
        return Tensor.tolist(self.inner)  # which a stand-in for graphs may have replaced

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self) -> str:
        return f"Far({self.inner!r})"

    def __deepcopy__(self, memo: Any) -> Any:
        copied = Far(self.inner.detach().clone())
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _far, (self.inner.detach(), isinstance(self, torch.nn.Parameter), self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return operate(function, arguments, options or {})


def _far(inner: Tensor, is_parameter: bool, requires_grad: bool) -> Tensor:
    return torch.nn.Parameter(Far(inner), requires_grad) if is_parameter else Far(inner)


_Generator = torch.Generator


class FarGenerator(_Generator):
    """Random numbers of the device: those of a CPU, so that they can be compared."""

    device = CUDA


class _AnyGenerator(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)


class PretendedGenerator(metaclass=_AnyGenerator):
    """In place of torch.Generator."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return FarGenerator() if torch.device(device).type == "cuda" else _Generator()


def operate(function: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """One operation of PyTorch on tensors of which some are far, or whose result shall be."""
    if function is torch.ops.prim.device.default:
        return FAR
    if function is aten._fused_sdp_choice.default:
        return 0  # plain mathematics, which every device can do
    if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), IN_PARTS):
        # In inference mode PyTorch leaves that to us.
        return function._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *arguments, **options)
    name = function.overloadpacket
    given = tree_leaves((arguments, options))
    far = [each for each in given if isinstance(each, Far)]
    near = [each for each in given if isinstance(each, Tensor) and not isinstance(each, Far)]
    devices = [each for each in given if isinstance(each, torch.device)]
    to_far = devices[0].type == "far" if devices else bool(far)
    if name is aten.copy_:
        to_far = isinstance(arguments[0], Far)
        check_copy(to_far, far, near, [*arguments, False][2])
    elif name is aten._to_copy:
        check_copy(to_far, far, near, options.get("non_blocking", False))
    elif far:
        check(name, arguments, near)
    wrapped: dict[int, Far] = {}

    def unwrap(each: Far) -> Tensor:
        wrapped[id(each.inner)] = each
        return each.inner

    def wrap(each: Tensor) -> Tensor:
        if id(each) not in wrapped:
            return Far(each) if to_far else each
        assert wrapped[id(each)].shape == each.shape, f"{function} changes a shape in place"
        return wrapped[id(each)]

    on_cpu = tree_map_only(torch.device, lambda _: CPU, tree_map_only(Far, unwrap, (arguments, options)))
    result = function(*on_cpu[0], **on_cpu[1])
    if name in RESHAPED:  # of which the wrapper has a word, too
        with torch._C._DisableTorchDispatch():
            function(*arguments)
    return tree_map_only(Tensor, wrap, result)


def check_copy(to_far: bool, far: list[Any], near: list[Tensor], non_blocking: bool) -> None:
    """Between devices all copies are waited for, but those from memory that cannot be paged out."""
    if far and not to_far:
        wait("to the host")
    if near and to_far and not (non_blocking and all(hasattr(each, "is_pinned_here") for each in near)):
        wait("to the device")


def check(name: Any, arguments: Any, near: list[Tensor]) -> None:
    """Note what the host waits for, raise for what a GPU would refuse. near: the tensors of the CPU among them."""
    if name in ANSWERS:
        wait(str(name))
    if name in INDEXING:
        indices = [each for each in tree_leaves(arguments[1]) if isinstance(each, Tensor)]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            wait(f"{name} by a mask")
        if any(each is index for each in near for index in indices):
            wait(f"{name} by indices of the host")  # which a GPU takes
        near = [each for each in near if not any(each is index for index in indices)]
    shapes = [tuple(each.shape) for each in near if each.dim()]  # a number may stay on the host
    if shapes:
        raise MixedDevices(f"{name}: cuda:0 and cpu {shapes} in {place()}")


def check_generator(function: Any, arguments: Any, options: dict[str, Any]) -> None:
    """Raise for random numbers of another device than what they are for."""
    if isinstance(generator := options.get("generator"), _Generator):
        far = options.get("device") == FAR or any(isinstance(each, Far) for each in tree_leaves(arguments))
        if far != isinstance(generator, FarGenerator):
            raise MixedDevices(f"{function.__name__}: a generator of another device in {place()}")


def wait(what: str) -> None:
    waits[what, place()] += 1
    if sync_debug_mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


def place() -> str:
    """The innermost line of ours."""
    frame = sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(str(REPOSITORY)) and file != HERE and "/.venv" not in file:
            return f"{Path(file).resolve().relative_to(REPOSITORY.resolve())}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def register() -> list[torch.library.Library]:
    """The operations of the device; they are there as long as what is returned."""
    of_all, of_some = (torch.library.Library(name, "IMPL", "PrivateUse1") for name in ("_", "aten"))
    of_all.fallback(lambda function, *arguments, **options: operate(function, arguments, options), "PrivateUse1")
    # PyTorch itself makes an empty tensor and has it grow, which a wrapper cannot.
    for name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm"):
        overload = getattr(getattr(aten, name.split(".")[0]), [*name.split("."), "default"][1])
        of_some.impl(name, lambda *arguments, overload=overload, **options: operate(overload, arguments, options))
    kernel = torch.library.Library("aten", "IMPL", "CPU")
    kernel.impl("_flash_attention_forward", flash_attention)
    return [of_all, of_some, kernel]


def flash_attention(*arguments: Any, **options: Any) -> Any:
    """What that kernel promises, which only a GPU has: see attention_contracts."""
    if (table := options.pop("block_table", None)) is None:
        options.pop("num_splits", None)
        return flash_attention_forward(*arguments, **options)
    *given, dropout, causal, debug = arguments
    assert not dropout and not debug and options.get("alibi_slopes") is None, "not promised here"
    right = 0 if causal else options["window_size_right"]
    output = varlen_attn(
        *given,
        scale=options.get("scale"),
        window_size=(options["window_size_left"], right),
        enable_gqa=True,
        seqused_k=options["seqused_k"],
        block_table=table,
        num_splits=options.get("num_splits"),
    )
    return output, *(torch.empty(0) for _ in range(4))


library = register()


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


sync_debug_mode: Any = 0


def set_sync_debug_mode(mode: Any) -> Any:
    """torch.cuda.set_sync_debug_mode → the one before."""
    global sync_debug_mode
    before, sync_debug_mode = sync_debug_mode, mode
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
    "get_sync_debug_mode": lambda: sync_debug_mode,
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
