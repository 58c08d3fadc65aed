"""What the options of the decode loop mean, once for all verbs that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

TEXTS = {
    "compile": "How forwards are run: none, as they come; graphs, as CUDA graphs, together with the steps between "
    "them; or by torch.compile, default or max-autotune (minutes, once). steps: for a CPU, forwards as they come, and "
    "signals and head as one compiled call.",
    "attention": "What computes it: sdpa, flash (the package flash-attn), varlen (of torch itself), or auto: the first "
    "of flash and varlen that is there and serves the model, else sdpa.",
}

Verb = TypeVar("Verb", bound=Callable[..., Any])


def explained(verb: Verb) -> Verb:
    """Puts these texts in a docstring, which is what the command line shows, where it has `{compile}` and so on."""
    for name, text in TEXTS.items():
        verb.__doc__ = (verb.__doc__ or "").replace(f"{{{name}}}", text)
    return verb
