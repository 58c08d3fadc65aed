"""Which ways of running the loop this code has, so that a script can say which of them it could not measure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

from accept_head.inference import policy
from accept_head.inference.engine.cache import Compile
from accept_head.pair import default_device

# Says of a policy's `start_round` that the host need not ask for its answer.
constant_budget: Callable[..., Any] = getattr(policy, "constant_budget", lambda start_round: start_round)


def modes() -> tuple[list[str], str | None]:
    """`compile` of every way that can run here, the best first; and why others cannot, if so."""
    if "graphs" not in get_args(Compile):
        return ["none"], "compile='graphs' is not in this code: measured with compile='none' only"
    if default_device().type != "cuda":
        return ["none"], "compile='graphs' needs a CUDA device: measured with compile='none' only"
    return ["graphs", "none"], None


_captured = 0


def captures() -> int:
    """Graphs that this process has captured so far."""
    return _captured


def _count_captures() -> None:
    """Capturing is no part of a round that is decoded a second time, and takes longer than all of it."""
    try:
        from accept_head.inference.engine.graphs import Graphs
    except ImportError:
        return
    capture = Graphs._capture

    def counted(*arguments: Any, **options: Any) -> Any:
        global _captured
        _captured += 1
        return capture(*arguments, **options)

    Graphs._capture = counted  # type: ignore[method-assign]


_count_captures()


def best_mode() -> str:
    return modes()[0][0]


def supported(call: Any, **options: Any) -> dict[str, Any]:
    """Those of the options that this code's `call` takes."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in options.items() if name in known and value is not None}
