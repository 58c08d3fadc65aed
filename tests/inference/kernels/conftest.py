"""Fixtures for the tests of kernels."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from accept_head.inference.kernels import usable as door
from tests.inference.support.kernels import INTERPRETED, TRITON
from tests.inference.support.memory_check import checked_memory


@pytest.fixture
def anywhere(monkeypatch):
    """Kernels are used where they can be run, and touch no memory but their own."""
    monkeypatch.setattr(door, "ON_ANY_DEVICE", True)
    if INTERPRETED and TRITON:  # which multiplies the bits of bfloat16 as if they were integers
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

        dot = InterpreterBuilder.create_dot

        def widened(handle):
            return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        def of_bfloat16(self, a, b, *others):
            return dot(self, widened(a), widened(b), *others) if a.dtype == tl.bfloat16 else dot(self, a, b, *others)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", of_bfloat16)
    with checked_memory() if INTERPRETED and TRITON else nullcontext():
        yield
