"""Tensors that claim to be on `cuda:0` while a CPU computes them. Also counts when the host waits for them.

`Far` wraps a CPU tensor. PyTorch sees it on a separate device (PrivateUse1, called "far"). The operations of this
device unwrap it, check the devices and run on the CPU. All other code sees "cuda:0".

Importing this module registers the device, which changes the process permanently.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.inference.support.attention_contracts import flash_attention_forward, varlen_attn


class FarModule(_DummyBackendModule):  # type: ignore[misc]
    """torch.far. Its random numbers without a generator are the CPU's, whose state is kept there."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


_setup_privateuseone_for_python_backend(rename="far", backend_module=FarModule())
FAR, CUDA, CPU = torch.device("far", 0), torch.device("cuda", 0), torch.device("cpu")
REPOSITORY, TORCH = Path(__file__).parents[2], str(Path(torch.__file__).parent)
PRETENDING = {__file__, str(Path(__file__).with_name("pretend_cuda.py"))}

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
waits: Counter[tuple[str, str]] = Counter()  # by (what, file:line)
waiting: dict[str, Any] = {"mode": 0}  # torch.cuda.set_sync_debug_mode


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
            if not to_far:
                return each
            with torch.inference_mode(each.is_inference()):  # not every view is, that is made in inference mode
                return Far(each)
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
    if waiting["mode"] == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


def place() -> str:
    """The innermost line of ours."""
    frame = sys._getframe(1)
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(str(REPOSITORY)) and file not in PRETENDING and "/.venv" not in file:
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
