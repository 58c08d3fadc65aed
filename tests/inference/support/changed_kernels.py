"""Our kernels with one change in their source, which tests of them must detect."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from pathlib import Path

import accept_head.inference
from accept_head.inference.kernels import launch

PACKAGE = "accept_head.inference.kernels.triton"


def use_kernels(monkeypatch, folder, module, change=None):
    """In place of kernels/triton/`module`, also where other kernels import from it. change: (what stands there once,
    what shall)."""
    source = Path(accept_head.inference.__path__[0], "kernels", "triton", f"{module}.py").read_text(encoding="utf-8")
    if change is not None:
        assert source.count(change[0]) == 1
        source = source.replace(*change)
    path = folder / f"changed_{module}.py"
    path.write_text(source, encoding="utf-8")  # Triton reads the text of what it compiles
    for each in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        importlib.import_module(each.name)  # or what is imported below would stay
        monkeypatch.delitem(sys.modules, each.name)  # to be imported anew, with the changed one
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{module}", path)
    kernels = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, kernels)
    spec.loader.exec_module(kernels)
    monkeypatch.setattr(launch, "_counters", {})
