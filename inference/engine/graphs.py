"""Functions of tensors that are captured once, as CUDA graphs, and replayed: one launch in place of hundreds.

A replay runs the same kernels on the same memory and nothing of Python. Hence the rules, which `Graphs` keeps:

- What goes in is copied to buffers of the graph, but for tensors whose addresses never change (`keep`).
- What comes out is copied to buffers, too. All graphs share one pool of memory, for what they need in between: whatever
  order they are replayed in, nothing that outlives a replay lies there.
- What is no tensor, a depth, a width, is part of the key: another number is another graph. So are shapes and dtypes.
- A function is run before it is captured, so that kernels are loaded and buffers have shapes; what it changes in place
  (`mutates`) is put back. It must not read a value on the host; a call that does is refused while it is tried.
- An object whose attributes the function rebinds is given as `state`; its `capture` (capture.py) names them: they go in
  and out like arguments and results, those that the function only reads go in.

The result of a call is valid until the next call of that name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.cuda import GraphBackend
from accept_head.inference.engine.leaves import put_together, take_apart

SMALL = 1 << 14  # numbers of a tensor
MOST_GRAPHS = 512  # of one model, or of one policy's small functions; what comes later is run as it is

Function = Callable[..., Any]


@dataclass
class _Graph:
    """One captured call."""

    copied: list[tuple[int, Tensor]]  # (place among the inputs, the graph's buffer for it)
    replay: Callable[[], None]
    result: Any
    state: dict[str, Any]


class Graphs:
    """Captured functions by name. also: other graphs; tensors that they keep need no copy here either. beside: graphs
    that are never in use at the same time as these; both share the memory of their results, and what they keep."""

    def __init__(
        self,
        backend: GraphBackend,
        also: Iterable[Graphs] = (),
        most: int = MOST_GRAPHS,
        beside: Graphs | None = None,
    ):
        self.backend, self.also, self.most = backend, list(also), most
        self.captured: dict[Any, _Graph] = {}
        # Of results; and, by the address of their storage, which cannot be anybody else's meanwhile, what is kept.
        self.buffers: dict[Any, Tensor] = beside.buffers if beside else {}
        self.kept: dict[int, Tensor] = beside.kept if beside else {}
        # What `_described` says of the very tensors that come again and again, which lie here so that their ids stay.
        self.known: dict[int, tuple[Tensor, Any]] = beside.known if beside else {}
        self.refused: set[str] = set()

    def keep(self, *tensors: Tensor) -> None:
        """These stay where they are: they may be used as they lie, by calls that are given them and by functions that
        hold them."""
        for tensor in tensors:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
            self.known[id(tensor)] = tensor, self._described(tensor)

    def forget(self, *names: str) -> None:
        """What the functions hold, those of these names or all, is no longer what or where it was."""
        for key in [key for key in self.captured if not names or key[0] in names]:
            del self.captured[key]

    def free(self) -> None:
        """Give all memory back. Nothing that was returned, or that others captured of it, may be used any more."""
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
        """function(*inputs), whose tensors may stand in tuples, lists, dictionaries and dataclasses.

        renews: the function makes the state anew: what it was does not count. copy: kept tensors are copied, too: one
        graph for whatever is given. optional: a function that waits for the device is run as it is, which the log says
        once; else that is an InputError.
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
                reason = " ".join(str(error).split())[:200]
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
        """(where it lies if that is kept, shape, dtype, device)"""
        if copy:
            return None, leaf.shape, leaf.dtype, leaf.device
        for graphs in (self, *self.also):
            if (known := graphs.known.get(id(leaf))) is not None:
                return known[1]
        return self._address(leaf), leaf.shape, leaf.dtype, leaf.device

    def _address(self, leaf: Tensor) -> Any:
        """Where a kept tensor lies; None for others."""
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
        # What is handed through is where it was; all else gets a place that no replay of any graph writes to.
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
        """One for all graphs of a name whose results have this shape."""
        key = (name, place, like.shape, like.dtype)
        if key not in self.buffers:
            self.buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self.keep(self.buffers[key])
        return self.buffers[key]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """From the second to the first of each: small ones of one dtype by one kernel, which has few programs for each."""
    together: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for to, tensor in pairs:
        if tensor.is_contiguous() and tensor.numel() <= SMALL:
            together.setdefault(tensor.dtype, []).append((to, tensor))
        else:
            to.copy_(tensor)
    for several in together.values():
        torch._foreach_copy_([to for to, _ in several], [tensor for _, tensor in several])


def run_directly(name: str, function: Function, *inputs: Any, **_: Any) -> Any:
    """In place of `Graphs`, where nothing is captured."""
    return function(*inputs)


def _carried(state: Any) -> dict[str, Any]:
    return {} if state is None else {name: attrgetter(name)(state) for name in state.capture.carried}


def _read(state: Any) -> dict[str, Any]:
    return {} if state is None else {name: attrgetter(name)(state) for name in state.capture.read}


def _restore(state: Any, carried: dict[str, Any]) -> None:
    for name, value in carried.items():
        *path, last = name.split(".")
        owner = attrgetter(".".join(path))(state) if path else state
        setattr(owner, last, list(value) if isinstance(value, list) else value)  # a function may append to it


_said: set[str] = set()


def _warn_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        logging.getLogger(__name__).warning("accept-head: %s", line)
