"""Captures functions of tensors once, as CUDA graphs, and replays them: one launch instead of hundreds.

A replay runs the same kernels on the same memory, and no Python. So `Graphs` follows these rules:

- Inputs are copied to buffers of the graph, except tensors whose addresses never change (`keep`).
- Results are copied to buffers too. All graphs share one memory pool for intermediate values. Graphs may be replayed in
  any order, because nothing in the pool outlives a replay.
- Values that are not tensors, for example a depth or a width, are part of the key, and so are shapes and dtypes.
  Another value is another graph.
- A function runs once before its capture, so that kernels are loaded and shapes of buffers are known. Its changes in
  place (`mutates`) are undone. It must not read a value on the host; the run before the capture detects that.
- An object whose attributes the function rebinds is given as `state`. Its `capture` (capture.py) names the attributes:
  carried ones are inputs and results, read ones are inputs.

The result of a call is valid until the next call of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accept_head.errors import InputError, one_line
from accept_head.inference.engine.cuda import GraphBackend
from accept_head.inference.engine.leaves import put_together, take_apart

SMALL = 1 << 14  # elements of a tensor
MOST_GRAPHS = 512  # of one model, or of one policy's small functions; further calls run without a graph

Function = Callable[..., Any]


@dataclass
class _Graph:
    """One captured call."""

    copied: list[tuple[int, Tensor]]  # (place among the inputs, the graph's buffer for it)
    replay: Callable[[], None]
    result: Any
    state: dict[str, Any]


class Graphs:
    """Captured functions by name. also: other graphs; tensors that they keep are not copied here either. beside: graphs
    that are never used at the same time as these; both share the buffers of results and the kept tensors."""

    def __init__(
        self,
        backend: GraphBackend,
        also: Iterable[Graphs] = (),
        most: int = MOST_GRAPHS,
        beside: Graphs | None = None,
    ):
        self.backend, self.also, self.most = backend, list(also), most
        self.captured: dict[Any, _Graph] = {}
        # Buffers of results, and kept tensors by the address of their storage, which stays theirs while they are kept.
        self.buffers: dict[Any, Tensor] = beside.buffers if beside else {}
        self.kept: dict[int, Tensor] = beside.kept if beside else {}
        # `_described` of kept tensors, by id. Holding the tensor here keeps its id from being reused.
        self.known: dict[int, tuple[Tensor, Any]] = beside.known if beside else {}
        self.refused: set[str] = set()

    def keep(self, *tensors: Tensor) -> None:
        """Declare that these tensors keep their addresses, so that calls use them without a copy."""
        for tensor in tensors:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
            self.known[id(tensor)] = tensor, self._described(tensor)

    def forget(self, *names: str) -> None:
        """Drop the graphs of these names, or all, because values or addresses that they contain have changed."""
        for key in [key for key in self.captured if not names or key[0] in names]:
            del self.captured[key]

    def free(self) -> None:
        """Release all memory. Returned tensors, and graphs of others that contain them, must not be used any more."""
        self.captured.clear()
        self.buffers.clear()
        self.kept.clear()
        self.known.clear()

    def __call__(
        self,
        name: str,
        function: Function,
        *inputs: Any,
        state: Any = None,
        mutates: Sequence[Tensor] = (),
        renews: bool = False,
        copy: bool = False,
        optional: bool = False,
    ) -> Any:
        """function(*inputs), by a graph. Tensors may stand in tuples, lists, dictionaries and dataclasses.

        renews: the function makes the carried state anew and ignores the old one. copy: copy kept tensors too, so that
        one graph serves all inputs. optional: a function that waits for the device runs without a graph, which is
        logged once; otherwise it raises InputError.
        """
        if name in self.refused:
            return function(*inputs)
        leaves: list[Tensor] = []
        shape = take_apart((inputs, _read(state) | ({} if renews else _carried(state))), leaves)
        described = [self._described(leaf, copy) for leaf in leaves]
        key = (name, shape, *described)
        known = self.captured.get(key)
        if known is None:
            if len(self.captured) >= self.most:
                _warn_once(f"more than {self.most} graphs are wanted: {name} and others are run without")
                return function(*inputs)
            try:
                places = [place for place, *_ in described]
                known = self._capture(name, function, shape, leaves, places, state, mutates)
            except RuntimeError as error:
                reason = one_line(error)
                if not optional:
                    raise InputError(f"compile is 'graphs', but {name} cannot be captured ({reason})") from error
                self.refused.add(name)
                _warn_once(f"{name} is not captured ({reason}), hence slower")
                return function(*inputs)
            self.captured[key] = known
        else:
            for place, buffer in known.copied:
                buffer.copy_(leaves[place])
        known.replay()
        _restore(state, known.state)
        return known.result

    def _described(self, leaf: Tensor, copy: bool = False) -> Any:
        """(address if kept, shape, dtype, device)"""
        if copy:
            return None, leaf.shape, leaf.dtype, leaf.device
        for graphs in (self, *self.also):
            if (known := graphs.known.get(id(leaf))) is not None:
                return known[1]
        return self._address(leaf), leaf.shape, leaf.dtype, leaf.device

    def _address(self, leaf: Tensor) -> Any:
        """The address of a kept tensor; None for others."""
        pointer = leaf.untyped_storage().data_ptr()
        if pointer in self.kept or any(pointer in other.kept for other in self.also):
            return pointer, leaf.storage_offset(), leaf.stride()
        return None

    def _capture(
        self,
        name: str,
        function: Function,
        shape: Any,
        leaves: Sequence[Tensor],
        places: Sequence[Any],
        state: Any,
        mutates: Sequence[Tensor],
    ) -> _Graph:
        copied = [(i, torch.empty_like(leaf).copy_(leaf)) for i, leaf in enumerate(leaves) if places[i] is None]
        given = list(leaves)
        for place, buffer in copied:
            given[place] = buffer
        begun = _carried(state) | _read(state)

        def once() -> tuple[Any, list[Tensor]]:
            rest = iter(given)
            arguments, carried = put_together(shape, rest)
            _restore(state, carried)
            results: list[Tensor] = []
            result = function(*arguments)
            return take_apart((result, _carried(state)), results), results

        tried: list[tuple[Any, list[Tensor]]] = []
        before = [tensor.clone() for tensor in mutates]

        def put_back() -> None:
            for tensor, value in zip(mutates, before, strict=True):
                tensor.copy_(value)

        def trial() -> None:
            put_back()
            tried[:] = [once()]

        try:
            self.backend.warm_up(trial)
        finally:
            put_back()
            _restore(state, begun)
        outcome, results = tried[0]
        # A result that is an input needs no buffer; every other result gets one outside the pool.
        own = {id(tensor) for tensor in given}
        out = [
            tensor if id(tensor) in own else self._buffer(name, place, tensor) for place, tensor in enumerate(results)
        ]

        def recorded() -> None:
            again, made = once()
            if again != outcome:
                raise RuntimeError("its result has another form each time")
            _copy([(buffer, tensor) for buffer, tensor in zip(out, made, strict=True) if buffer is not tensor])

        try:
            replay = self.backend.capture(recorded)
        finally:
            _restore(state, begun)
        result, carried = put_together(outcome, iter(out))
        return _Graph(copied, replay, result, carried)

    def _buffer(self, name: str, place: int, like: Tensor) -> Tensor:
        """The buffer of a result, shared by all graphs of a name with results of this shape."""
        key = (name, place, like.shape, like.dtype)
        if key not in self.buffers:
            self.buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self.keep(self.buffers[key])
        return self.buffers[key]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first. One kernel copies all small ones of a dtype; it has few
    programs for each tensor, so large ones are copied one by one."""
    together: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for to, tensor in pairs:
        if tensor.is_contiguous() and tensor.numel() <= SMALL:
            together.setdefault(tensor.dtype, []).append((to, tensor))
        else:
            to.copy_(tensor)
    for several in together.values():
        torch._foreach_copy_([to for to, _ in several], [tensor for _, tensor in several])


def run_directly(name: str, function: Function, *inputs: Any, **_: Any) -> Any:
    """Used in place of `Graphs` when nothing is captured."""
    return function(*inputs)


def _carried(state: Any) -> dict[str, Any]:
    return {} if state is None else {name: attrgetter(name)(state) for name in state.capture.carried}


def _read(state: Any) -> dict[str, Any]:
    return {} if state is None else {name: attrgetter(name)(state) for name in state.capture.read}


def _restore(state: Any, carried: dict[str, Any]) -> None:
    for name, value in carried.items():
        *path, last = name.split(".")
        owner = attrgetter(".".join(path))(state) if path else state
        setattr(owner, last, list(value) if isinstance(value, list) else value)  # the function may append to it


_said: set[str] = set()


def _warn_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        logging.getLogger(__name__).warning("accept-head: %s", line)
