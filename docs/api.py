"""The API reference, built from the docstrings: `make docs`, or `python docs/api.py OUT`.

A page for each package and module that imports without vLLM and Triton. A docstring or a name that pdoc cannot read is
an error.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pdoc

# The second needs vLLM, the third Triton.
LEFT_OUT = (
    "accept_head.__main__",
    "accept_head.inference.adapters.vllm",
    "accept_head.inference.kernels.triton",
)


def modules(name: str) -> Iterator[str]:
    """A module and those below it, but for what pdoc finds by itself: it passes over modules not in an `__all__`."""
    yield name
    module = importlib.import_module(name)
    if not hasattr(module, "__all__"):
        return
    for public in module.__all__:  # some are looked up only when they are asked for: pdoc reads what is there already
        setattr(module, public, getattr(module, public))
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if info.name not in LEFT_OUT:
            yield from modules(info.name)


def name_types(module: ModuleType) -> None:
    """Give the constructors of a module's named tuples their types: Python leaves them texts that pdoc cannot place."""
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, tuple) and value.__module__ == module.__name__:
            value.__new__.__annotations__ = get_type_hints(value)


def build(out: Path, package: str = "accept_head") -> None:
    """Write the pages below `out`, beginning with index.html. Raises what pdoc would only warn of."""
    names = list(modules(package))
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not info.name.startswith(LEFT_OUT):
            importlib.import_module(info.name)
    for name in list(sys.modules):
        if name.startswith(f"{package}."):
            name_types(sys.modules[name])
    warnings.filterwarnings("error", module="pdoc")
    pdoc.render.configure(docformat="google", footer_text="accept-head")
    pdoc.pdoc(*names, *(f"!{name.replace('.', '[.]')}" for name in LEFT_OUT), output_directory=out)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(Path(sys.argv[1]) / "index.html")
