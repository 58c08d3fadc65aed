"""Which ways of running the loop can be measured here, and how many CUDA graphs it has captured."""

from __future__ import annotations

from typing import Any

from accept_head.inference.engine.graphs import Graphs
from accept_head.pair import default_device


def modes() -> tuple[list[str], str | None]:
    """`compile` of every way that can run here, the best first; and why others cannot, if so."""
    if default_device().type != "cuda":
        return ["none"], "compile='graphs' needs a CUDA device: measured with compile='none' only"
    return ["graphs", "none"], None


def best_mode() -> str:
    return modes()[0][0]


_captured = 0


def captures() -> int:
    """Graphs that this process has captured so far."""
    return _captured


def _count_captures() -> None:
    """Capturing is no part of a round that is decoded a second time, and takes longer than all of it."""
    capture = Graphs._capture

    def counted(*arguments: Any, **options: Any) -> Any:
        global _captured
        _captured += 1
        return capture(*arguments, **options)

    Graphs._capture = counted  # type: ignore[method-assign]


_count_captures()
