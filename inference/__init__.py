"""How a head is used: policies, the decode loop, and what they gain."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "accept_head.inference":
    raise ImportError("import this package as accept_head.inference: the folder is only where its source lives")

if TYPE_CHECKING:
    from accept_head.inference.decode.generate import Generated, generate
    from accept_head.inference.decode.rows import DecodeStats
    from accept_head.inference.policies.registry import make_policy
    from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, Signal, VerifyOutcome

__all__ = [
    "DecodeStats",
    "DraftPolicy",
    "DraftStep",
    "Generated",
    "RowPolicy",
    "Signal",
    "VerifyOutcome",
    "generate",
    "make_policy",
]

# Looked up when they are asked for: every process of vLLM loads the plugin, which lives below, used or not.
_HOMES = {
    "DecodeStats": "decode.rows",
    "DraftPolicy": "policy",
    "DraftStep": "policy",
    "Generated": "decode.generate",
    "RowPolicy": "policy",
    "Signal": "policy",
    "VerifyOutcome": "policy",
    "generate": "decode.generate",
    "make_policy": "policies.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
