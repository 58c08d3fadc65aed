"""Our kernels with one place of their source changed: what tests of them must see."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import accept_head.inference
from accept_head.inference.kernels import signals as fused_signals


def use_kernels(monkeypatch, folder, module, change=None):
    """In place of accept_head.inference.`module`. change: (what stands there once, what shall)."""
    source = Path(accept_head.inference.__path__[0], f"{module}.py").read_text(encoding="utf-8")
    if change is not None:
        assert source.count(change[0]) == 1
        source = source.replace(*change)
    path = folder / f"changed_{module}.py"
    path.write_text(source, encoding="utf-8")  # Triton reads the text of what it compiles
    spec = importlib.util.spec_from_file_location(path.stem, path)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    monkeypatch.setattr(accept_head.inference, module, kernels, raising=False)
    monkeypatch.setattr(fused_signals, "_counters", {})
