"""An attention kernel that reads the ragged cache directly: no mask, no copies, no repeated heads.

The kernel takes each row's number of keys, and aligns causality to the bottom right: of `new` queries in a row of
`length` keys, query i sees the first length − new + i + 1. New tokens are written at a row's own end, so this is the
rule of the ragged cache.

The kernel is registered with transformers under its own name, and a model uses it while a `CachedModel` runs the model.
The model's attention mask is then a *plan*: the row lengths, as an int32 tensor of four dimensions. transformers passes
it on to the attention like any 4-D mask. The plan is an ordinary input on the device: the host reads nothing, and
shapes depend on batch and width alone, so that a captured graph can use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel | None] = {}  # by name; None if it could not be loaded


@dataclass(frozen=True)
class Backend:
    """A kernel and its use on the ragged cache.

    plan: (positions (rows, new), cache rows (rows,) or None for all, slots a row, key heads) → the plan. attend: calls
    the kernel with query (rows, heads, new, channels), keys and values (batch, key heads, slots, channels), plan,
    scale, window and cap → (rows, new, heads, channels). page: a row's slots are a multiple of it.
    """

    name: Literal["flash", "varlen"]
    registered: str  # name in transformers, which reserves names with "flash"
    load: Callable[[], Kernel]  # raises ImportError, or OSError
    plan: Callable[[Tensor, Tensor | None, int, int], Tensor]
    attend: Callable[..., Tensor]
    needs: str  # the required package
    page: int = 1
    caps: bool = False  # whether it can cap the scores
    traced: bool = False  # whether torch.compile can trace through it

    @property
    def kernel(self) -> Kernel | None:
        if self.name not in KERNELS:
            try:
                KERNELS[self.name] = self.load()
            except (ImportError, OSError):  # not installed, or built for another torch
                KERNELS[self.name] = None
        return KERNELS[self.name]

    def slots(self, wanted: int) -> int:
        """The smallest allowed number of slots a row that is at least `wanted`."""
        return -(-wanted // self.page) * self.page


class Attended:
    """A model that uses a backend's attention inside `around`, and its own attention otherwise."""

    def __init__(self, model: PreTrainedModel, backend: Backend):
        self.model, self.backend = model, backend
        capped = caps_scores(model)
        self.name = f"{backend.registered}_capped" if capped else backend.registered
        AttentionInterface.register(self.name, _attention(backend, capped))
        text: Any = model.config.get_text_config(decoder=True)
        self.heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads

    def plan(self, positions: Tensor, rows: Tensor | None, slots: int) -> Tensor:
        """The plan that replaces the mask; see `Backend`."""
        return self.backend.plan(positions, rows, slots, self.heads)

    def around(self, run: Callable[..., Any], wanted: Callable[[], bool]) -> Callable[..., Any]:
        """`run` with the backend's attention whenever `wanted()` is True."""
        return with_attention(self.model, self.name, run, wanted)


def with_attention(
    model: PreTrainedModel, name: str, run: Callable[..., Any], wanted: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """`run`, in which the model has the attention of this name in transformers whenever `wanted()` is True."""
    # Each layer reads its own config; a model may have several configs.
    found: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    configs = list(found.values())

    @wraps(run)
    def attended(*arguments: Any, **options: Any) -> Any:
        if not wanted():
            return run(*arguments, **options)
        names = [config._attn_implementation_internal for config in configs]
        try:
            for config in configs:
                config._attn_implementation_internal = name
            return run(*arguments, **options)
        finally:
            for config, before in zip(configs, names, strict=True):
                config._attn_implementation_internal = before

    return attended


def _attention(backend: Backend, capped: bool) -> Callable[..., tuple[Tensor, None]]:
    """The backend as an attention function of transformers."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,  # a plan
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        cap = softcap if capped and softcap is not None else 0.0
        return backend.attend(query, key, value, attention_mask, scale, window, cap), None

    return attention


def caps_scores(model: PreTrainedModel) -> bool:
    """Whether the loaded model caps its scores. With `sdpa` transformers ignores the cap in the config."""
    text = model.config.get_text_config(decoder=True)
    return bool(getattr(text, "attn_logit_softcapping", None)) and model.config._attn_implementation == "eager"
