"""Triton's interpreter with the check of compute-sanitizer: a kernel that accesses memory outside its tensors fails."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np


class OutOfBounds(AssertionError):
    """A kernel touched what is not its own."""


@contextmanager
def checked_memory():
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    begins, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    prepare = GridExecutor._init_args_hst

    def noting(self, given, options):
        nonlocal begins, ends
        made = prepare(self, given, options)
        tensors = [each for each in made[0] if hasattr(each, "untyped_storage")]
        # The storage, not the view: rows lie apart in what they are a part of.
        places = sorted((each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors)
        begins = np.array([begin for begin, _ in places], np.uint64)
        ends = np.array([begin + size for begin, size in places], np.uint64)
        return made

    def checked(name):
        touch = getattr(InterpreterBuilder, name)
        mask_at = {"create_masked_load": 0, "create_masked_store": 1, "create_atomic_rmw": 1}[name]

        def checking(self, *given):
            pointers, *others = given if name != "create_atomic_rmw" else given[1:]
            size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
            used = np.broadcast_to(others[mask_at].data, pointers.data.shape)
            places = pointers.data[used].astype(np.uint64)
            owner = np.searchsorted(begins, places, side="right").astype(np.int64) - 1
            if (owner < 0).any() or (places + np.uint64(size) > ends[owner]).any():
                raise OutOfBounds(f"{name} beside the tensors of the kernel")
            return touch(self, *given)

        return patch.object(InterpreterBuilder, name, checking)

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "_init_args_hst", noting))
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
            stack.enter_context(checked(name))
        yield
