"""accept-head: speculative decoding that chooses its own draft length.

A trained acceptance prediction head on the draft's hidden state says when to stop drafting (SpecDec++, COLM 2025).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accept_head.errors import InputError
from accept_head.version import VERSION

if TYPE_CHECKING:
    from accept_head.head.network import AcceptanceHead
    from accept_head.head_config import HeadConfig
    from accept_head.pair import Pair, load_pair
    from accept_head.sampling import Sampling

__version__ = VERSION

__all__ = ["AcceptanceHead", "HeadConfig", "InputError", "Pair", "Sampling", "__version__", "load_pair"]

# Imported on first use, so that the command line can reject a wrong option without waiting for torch.
_HOMES = {
    "AcceptanceHead": "head.network",
    "HeadConfig": "head_config",
    "Pair": "pair",
    "load_pair": "pair",
    "Sampling": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
