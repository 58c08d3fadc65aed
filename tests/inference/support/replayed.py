"""A strict stand-in for CUDA graphs that runs on any device.

During capture it records every aten operation with its tensors. A replay repeats the same operations on the same
tensors. So a value that depended on a Python number, or on a tensor that has moved since, is out of date. Memory
allocated during capture is overwritten after every replay, as another graph's replay may do.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}


class Waited(RuntimeError):
    """The host read what is on the device, or sent it something."""


def tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    return tensor.untyped_storage()


class NoWaiting(TorchDispatchMode):
    """Raises at what a GPU's host would wait for."""

    def __enter__(self):
        self.patches = ExitStack()
        for name in ("tolist", "item", "numpy", "cpu", "new_tensor"):
            self.patches.enter_context(patch.object(torch.Tensor, name, refuse(name)))
        for name in ("tensor", "as_tensor"):  # a copy from the host
            self.patches.enter_context(patch.object(torch, name, refuse(name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        # `mask[..., :1] = 0` fills with a number that stays on the host; any other data of the host is copied.
        if function in WAITS or (function is aten.lift_fresh.default and arguments[0].dim()):
            raise Waited(f"{function} waits for the device")
        indexes = function.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        if indexes and any(each.dtype in (torch.bool, torch.uint8) for each in tensors(arguments[1])):
            raise Waited(f"{function} by a mask waits for the device")
        return self.do(function, arguments, options or {})

    def do(self, function, arguments, options):
        return function(*arguments, **options)


def refuse(name):
    def refused(*_, **__):
        raise Waited(f"{name} waits for the device")

    return refused


class Recording(NoWaiting):
    """All operations, and what they wrote to that was there before."""

    def __init__(self):
        super().__init__()
        self.operations, self.pool, self.changed = [], {}, {}

    def do(self, function, arguments, options):
        given = tensors((arguments, options))
        for each, argument in zip(arguments, function._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.note_change(each)
        result = function(*arguments, **options)
        known = {storage(each).data_ptr() for each in given}
        made = [each for each in tensors(result) if storage(each).data_ptr() not in known]
        for each in made:
            self.pool[storage(each).data_ptr()] = each
        self.operations.append((function, arguments, options, [id(each) for each in made], tensors(result)))
        return result

    def note_change(self, value):
        for each in tensors(value):
            pointer = storage(each).data_ptr()
            if pointer not in self.pool and pointer not in self.changed:
                self.changed[pointer] = each, storage(each).clone()

    def undo(self):
        """A GPU does nothing while it captures."""
        for each, before in self.changed.values():
            storage(each).copy_(before)
        self.spoil()

    def spoil(self):
        for each in self.pool.values():
            storage(each).fill_(0xFF)  # no number, or −1

    def replay(self):
        for function, arguments, options, made, results in self.operations:
            again = tensors(function(*arguments, **options))
            for before, now in zip(results, again, strict=True):
                if id(before) in made:
                    before.copy_(now)
        self.spoil()


class ReplayedGraphs:
    """In place of CudaGraphs."""

    def __init__(self):
        self.captures = self.replays = 0

    def warm_up(self, function):
        function()
        with NoWaiting():
            function()

    def capture(self, function):
        self.captures += 1
        with Recording() as recording:
            function()
        recording.undo()

        def replay():
            self.replays += 1
            recording.replay()

        return replay


@contextmanager
def standing_in():
    """compile="graphs" works on a CPU."""
    backend = ReplayedGraphs()
    with ExitStack() as stack:
        for module in ("decode.loop", "engine.cache"):
            stack.enter_context(patch(f"accept_head.inference.{module}.graph_backend", lambda device: backend))
        yield backend
