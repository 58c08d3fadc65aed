"""A model's forward on a cache: its inputs, its last hidden state, and the compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.pair import base_model

MOST_COMPILED = 1024  # in one process


class ModelCall:
    """A model's forward on a cache. It is separate from `CachedModel` to avoid a reference cycle, which would delay
    freeing the cache."""

    states: Tensor | None = None  # of a DrafterCall
    last: Tensor | None = None

    def __init__(self, model: PreTrainedModel, cache: Cache, max_length: int, hidden: LastHidden | LayerStates | None):
        self.model, self.cache, self.max_length, self.hidden = model, cache, max_length, hidden
        # From 5.24 on transformers' models call it `cache`, and warn of the older name.
        self.cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"

    def __call__(self, input_ids: Tensor, positions: Tensor, masks: Any) -> tuple[Tensor, ...]:
        inputs = self.inputs(input_ids, positions, masks)
        if self.hidden is None:
            logits = self.model(**inputs).logits
            return logits, logits[..., :0]
        self.hidden.wanted = True
        logits = self.model(**inputs).logits
        self.hidden.wanted = False
        last = self.hidden.last
        del self.hidden.last
        return logits, last

    def inputs(self, input_ids: Tensor, positions: Tensor, masks: Any) -> dict[str, Any]:
        return {
            "input_ids": input_ids,
            "position_ids": positions.clamp(max=self.max_length - 1),
            "attention_mask": masks,
            self.cache_name: self.cache,
            "use_cache": True,
        }


def make_call(model: PreTrainedModel, cache: Cache, max_length: int, with_hidden: bool | tuple[int, ...]) -> ModelCall:
    """with_hidden: as in `CachedModel`."""
    if isinstance(model, Eagle3Drafter):
        return DrafterCall(model, cache, max_length, None)
    hidden: LastHidden | LayerStates | None = None
    if with_hidden:
        hidden = hidden_of(model) if isinstance(with_hidden, bool) else states_of(model, with_hidden)
    return ModelCall(model, cache, max_length, hidden)


class DrafterCall(ModelCall):
    """The forward of a drafter that takes a state with each token: `states`, (batch, new, hidden). last: as in the
    drafter's `forward`. Both are set beforehand."""

    def __call__(self, input_ids: Tensor, positions: Tensor, masks: Any) -> tuple[Tensor, ...]:
        drafted: tuple[Tensor, ...] = self.model(**self.inputs(input_ids, positions, masks))
        return drafted

    def inputs(self, input_ids: Tensor, positions: Tensor, masks: Any) -> dict[str, Any]:
        return super().inputs(input_ids, positions, masks) | {"states": self.states, "last": self.last}


class LayerStates:
    """A model's residual stream before some of its layers, (batch, new, layers × hidden), kept while `wanted`."""

    def __init__(self, model: PreTrainedModel, numbers: Sequence[int]):
        """numbers: of the layers. Raises InputError naming a model that does not list its layers."""
        self.wanted = False
        self.kept: dict[int, Tensor] = {}
        layers = getattr(base_model(model), "layers", None)
        if layers is None:
            raise InputError(f"{type(model).__name__} has no list of layers to read states from")
        for number in numbers:
            layers[number].register_forward_pre_hook(partial(self._keep, number), with_kwargs=True)

    def _keep(self, number: int, _module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.wanted:
            self.kept[number] = inputs[0] if inputs else named["hidden_states"]

    @property
    def last(self) -> Tensor:
        return torch.cat([self.kept[number] for number in sorted(self.kept)], dim=-1)

    @last.deleter
    def last(self) -> None:
        self.kept = {}


class LastHidden:
    """A model's last hidden state after the final norm, kept from its base model's output while `wanted`."""

    wanted = False
    last: Tensor


_hooked: WeakKeyDictionary[PreTrainedModel, LastHidden] = WeakKeyDictionary()
_read: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], LayerStates]] = WeakKeyDictionary()


def states_of(model: PreTrainedModel, numbers: tuple[int, ...]) -> LayerStates:
    """The model's LayerStates for these layers, with permanent hooks that are idle unless wanted."""
    read = _read.setdefault(model, {})
    if numbers not in read:
        read[numbers] = LayerStates(model, numbers)
    return read[numbers]


def hidden_of(model: PreTrainedModel) -> LastHidden:
    """The model's LastHidden, with one permanent hook that is idle unless wanted. A new hook would recompile it."""
    if model not in _hooked:
        hidden = _hooked[model] = LastHidden()

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            if hidden.wanted:
                hidden.last = output[0]

        base_model(model).register_forward_hook(keep)
    return _hooked[model]


def compiled_call(call: Any, device: torch.device, *, tuned: bool) -> Any:
    """`call`, compiled by torch.compile. tuned: also tune kernels, which takes longer."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    # All decoders compile the same function, once for each model, batch, capacity and width.
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_COMPILED)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, MOST_COMPILED)
    if not tuned or device.type != "cpu":
        return torch.compile(call, dynamic=False, fullgraph=True, mode="max-autotune" if tuned else None)
    compiled = torch.compile(call, dynamic=False, fullgraph=True)
    # Freezing packs copies of the weights for small matrix products on a CPU: 2.5 x as fast on the embedded target. It
    # is no option of torch.compile, because the tracer has to know of it too.
    settings = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}

    def run(*arguments: Any) -> Any:
        with inductor.patch(settings):
            return compiled(*arguments)

    return run
