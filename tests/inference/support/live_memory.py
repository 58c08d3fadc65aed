"""Bytes that torch holds, counted per storage."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of all storages alive, each once, and their peak. What was there before is not counted."""

    def __init__(self, before):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0
        self.known = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage):
        key = storage._cdata
        if key in self.sizes or key in self.known:
            return
        self.sizes[key] = storage.nbytes()
        weakref.finalize(storage, self.forget, key)
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)

    def forget(self, key):
        self.now -= self.sizes.pop(key)
