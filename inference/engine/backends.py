"""Attention kernels that read the ragged cache as it lies in memory: no mask, no copies, no repeated heads.

    sdpa     torch's scaled_dot_product_attention with an explicit mask: every model, every device; the baseline
    flash    flash_attn_with_kvcache, of the package flash-attn: bfloat16 or float16 on CUDA, Ampere or newer
    varlen   torch.nn.attention.varlen.varlen_attn, of torch itself (or, before 2.13, the operation that it calls): the
             same, but no capped scores

The last two take each row's number of keys, and align causality to the bottom right: of `new` queries in a row of
`length` keys, query i sees the first length − new + i + 1. With new tokens written at a row's own end, that is the rule
of the ragged cache. Keys and values are written before, by the cache layer, as for `sdpa`. flash_attn_with_kvcache
could write them itself, but at length, length + 1, …: past a row's slots where a ragged forward's padding ends there.

They are registered with transformers under names of their own, and a model has one of them while a `CachedModel` runs
it. What it is then given as its attention mask is a *plan*: the row lengths, as an int32 tensor of four dimensions,
which transformers builds no mask for, but hands on to the attention like any 4-D mask. It is an ordinary input on the
device: nothing is read by the host, and shapes depend on batch and width alone, so that a captured graph follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from accept_head.errors import InputError

Attention = Literal["auto", "sdpa", "flash", "varlen"]

# What the two kernels are built for; tests put a reference in their place on a CPU.
DEVICES: tuple[str, ...] = ("cuda",)
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
COMPUTE_CAPABILITY = (8, 0)
MOST_HEAD_CHANNELS = 256
PAGE = 256  # tokens of a page of varlen's paged cache are a multiple of it

Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel | None] = {}  # those that were looked for


@dataclass(frozen=True)
class Backend:
    """A kernel and how the ragged cache maps to it.

    plan: (positions (rows, new), cache rows (rows,) or None for all, slots a row, key heads) → the plan. attend: the
    kernel, query (rows, heads, new, channels), keys and values (batch, key heads, slots, channels), plan, scale, window
    and cap → (rows, new, heads, channels). page: slots of a row are a multiple of it.
    """

    name: Literal["flash", "varlen"]
    registered: str  # with transformers, which takes "flash" in a name for its own
    load: Callable[[], Kernel]  # raises ImportError, or OSError
    plan: Callable[[Tensor, Tensor | None, int, int], Tensor]
    attend: Callable[..., Tensor]
    needs: str  # what has to be there
    page: int = 1
    caps: bool = False  # can it cap the scores?
    traced: bool = False  # may torch.compile trace through it?

    @property
    def kernel(self) -> Kernel | None:
        if self.name not in KERNELS:
            try:
                KERNELS[self.name] = self.load()
            except (ImportError, OSError):  # not there, or built for another torch
                KERNELS[self.name] = None
        return KERNELS[self.name]

    def slots(self, wanted: int) -> int:
        """At least so many slots a row."""
        return -(-wanted // self.page) * self.page


def choose(model: PreTrainedModel, attention: Attention = "auto", *, traced: bool = False) -> Backend | None:
    """The backend for this model, None for its own attention with an explicit mask.

    `auto` takes the first of flash and varlen that computes what the model's `sdpa` does; a model loaded with `eager`
    keeps it. traced: torch.compile has to trace through it. Raises InputError, saying why, when the one asked for
    cannot serve the model.
    """
    if attention not in get_args(Attention):
        raise InputError(f"attention is {attention!r}, expected one of {get_args(Attention)}")
    if attention == "sdpa" or (attention == "auto" and model.config._attn_implementation != "sdpa"):
        return None
    for backend in BACKENDS if attention == "auto" else [_named(attention)]:
        reason = refusal(backend, model, traced=traced)
        if reason is None:
            return backend
        if attention != "auto":
            raise InputError(f"attention is {attention!r}, but {reason}; use auto or sdpa")
    return None


def refusal(backend: Backend, model: PreTrainedModel, *, traced: bool = False) -> str | None:
    """Why a backend cannot serve a model; None = it can, as far as can be told without running it."""
    if backend.name in declined.get(model, {}):
        return declined[model][backend.name]
    text = model.config.get_text_config(decoder=True)
    devices = {parameter.device.type for parameter in model.parameters()}
    if backend.kernel is None:
        return f"{backend.needs} is not there"
    if traced and not backend.traced:
        return "torch.compile cannot trace through it; compile=graphs or none can have it"
    if not devices <= set(DEVICES):
        return f"{_described(model)} is on {', '.join(sorted(devices))}, and it runs on {', '.join(DEVICES)}"
    if "cuda" in devices and torch.cuda.get_device_capability(model.device) < COMPUTE_CAPABILITY:
        return "it needs a GPU of compute capability 8.0 or newer"
    if model.dtype not in DTYPES:
        return f"{_described(model)} is {model.dtype}, and it takes {' or '.join(str(dtype) for dtype in DTYPES)}"
    return _refused_layers(backend, model, text)


def _refused_layers(backend: Backend, model: PreTrainedModel, text: Any) -> str | None:
    """As `refusal`, for what the attention layers compute."""
    name, own = _described(model), model.config._attn_implementation
    if own not in ("sdpa", "eager"):
        return f"{name} has attention implementation {own!r}, expected 'sdpa' or 'eager'"
    if not (model._supports_attention_backend and model._supports_flash_attn):
        return f"{name} does not let its attention be replaced"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return f"{name} has attention sinks"
    if getattr(text, "kv_lora_rank", None) is not None:
        return f"{name} has keys and values of different sizes"
    if getattr(text, "use_bidirectional_attention", None):
        return f"{name} has attention that is not causal"
    channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if channels > MOST_HEAD_CHANNELS or channels % 8:
        return f"{name} has heads of {channels} channels, expected a multiple of 8 up to {MOST_HEAD_CHANNELS}"
    if _capped(model) and not backend.caps:
        return f"{name} caps its attention scores"
    return None


def _capped(model: PreTrainedModel) -> bool:
    """Whether the model caps its scores as it is: under `sdpa` transformers leaves the cap of its config out."""
    text = model.config.get_text_config(decoder=True)
    return bool(getattr(text, "attn_logit_softcapping", None)) and model.config._attn_implementation == "eager"


# Models that a backend failed on when it was tried, and how.
declined: WeakKeyDictionary[PreTrainedModel, dict[str, str]] = WeakKeyDictionary()


def decline(backend: Backend, model: PreTrainedModel, reason: str) -> None:
    declined.setdefault(model, {})[backend.name] = reason


class Attended:
    """A model whose attention is a backend's while it is run through `around`, and its own otherwise."""

    def __init__(self, model: PreTrainedModel, backend: Backend):
        self.backend = backend
        # Layers ask their own config; a model may have several.
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        self.configs: list[Any] = list(configs.values())
        capped = _capped(model)
        self.name = f"{backend.registered}_capped" if capped else backend.registered
        AttentionInterface.register(self.name, _attention(backend, capped))
        text: Any = model.config.get_text_config(decoder=True)
        self.heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads

    def plan(self, positions: Tensor, rows: Tensor | None, slots: int) -> Tensor:
        """What stands for the mask; see `Backend`."""
        return self.backend.plan(positions, rows, slots, self.heads)

    def around(self, run: Callable[..., Any], wanted: Callable[[], bool]) -> Callable[..., Any]:
        """`run`, in which the model's attention is the backend's whenever it is wanted."""

        @wraps(run)
        def attended(*arguments: Any, **options: Any) -> Any:
            if not wanted():
                return run(*arguments, **options)
            own = [config._attn_implementation_internal for config in self.configs]
            try:
                for config in self.configs:
                    config._attn_implementation_internal = self.name
                return run(*arguments, **options)
            finally:
                for config, name in zip(self.configs, own, strict=True):
                    config._attn_implementation_internal = name

        return attended


def _attention(backend: Backend, capped: bool) -> Callable[..., tuple[Tensor, None]]:
    """The backend as transformers calls it."""

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


def _flash_kernel() -> Kernel:
    return import_module("flash_attn").flash_attn_with_kvcache


def _flash_plan(positions: Tensor, rows: Tensor | None, slots: int, heads: int) -> Tensor:
    """(1, rows, 1, 1): lengths; or (2, rows, 1, 1): lengths, and which rows of the cache they are."""
    lengths = (positions[:, -1] + 1).clamp(max=slots)  # an idle row may point beyond its slots; nobody reads it
    parts = lengths[None] if rows is None else torch.stack([lengths, rows])
    return parts.to(torch.int32)[:, :, None, None]


def _flash_attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Tensor, scale: float, window: tuple[int, int], cap: float
) -> Tensor:
    # The kernel takes any strides whose channels are contiguous: (batch, slots, heads, channels) is a view.
    return FLASH.kernel(  # type: ignore[misc]
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        cache_seqlens=plan[0, :, 0, 0],
        cache_batch_idx=plan[1, :, 0, 0] if len(plan) > 1 else None,
        softmax_scale=scale,
        causal=True,
        window_size=window if window[0] >= 0 else (-1, -1),
        softcap=cap,
    )


def _varlen_kernel() -> Kernel:
    kernel = import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" in signature(kernel).parameters:
        return kernel
    operation = torch.ops.aten._flash_attention_forward  # what varlen_attn calls; before 2.13 it hides the row lengths
    if "seqused_k" not in {argument.name for argument in operation.default._schema.arguments}:
        raise ImportError("this torch has no row lengths")
    return partial(packed_varlen, operation)


def packed_varlen(
    operation: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """`varlen_attn` with one page a row, by an operation that has no pages: keys in one sequence, of which each row's
    begin where `cu_seq_k` says. Seen so, row b of the cache begins at token b × heads × slots."""
    tokens = key.stride(0) // key.stride(1)  # from a row to the next: cu_seq_k counts in them
    packed = [
        pages.as_strided(((len(pages) - 1) * tokens + pages.shape[1], *pages.shape[2:]), pages.stride()[1:])
        for pages in (key, value)
    ]
    return operation(
        query,
        *packed,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        window_size == (-1, 0),
        return_debug_mask=False,
        scale=scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
        seqused_k=seqused_k,
    )[0]


def _varlen_plan(positions: Tensor, rows: Tensor | None, slots: int, heads: int) -> Tensor:
    """(4, rows + 1, 1, 1): lengths; which pages, here rows of the cache, they are; where each row's keys begin, for
    `packed_varlen`, as with pages the kernel asks for that and does not look at it; where each row's queries do."""
    count, new = positions.shape
    ends = torch.arange(count + 1, device=positions.device)
    lengths = (positions[:, -1] + 1).clamp(max=slots)
    pages = ends[:-1] if rows is None else rows
    padded = torch.nn.functional.pad(torch.stack([lengths, pages, pages * heads * slots]), (0, 1))
    return torch.cat([padded, (ends * new)[None]]).to(torch.int32)[:, :, None, None]


def _varlen_attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Tensor, scale: float, window: tuple[int, int], cap: float
) -> Tensor:
    # One page a row: with pages the kernel splits the keys among multiprocessors, which few rows need, and any strides
    # will do, as above. The other way, packed keys, splits nothing.
    count, heads, new, channels = query.shape
    if new == 1 and window[0] < 0:
        window = (-1, -1)  # the same for one query, and heads of a group then share the reading of their keys
    output = VARLEN.kernel(  # type: ignore[misc]
        query.transpose(1, 2).reshape(count * new, heads, channels),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        plan[3, :, 0, 0],
        plan[2, :, 0, 0] if _wants_key_offsets() else None,
        new,
        keys.shape[2],
        scale=scale,
        window_size=window,
        enable_gqa=heads != keys.shape[1],
        seqused_k=plan[0, :count, 0, 0],
        block_table=plan[1, :count, 0, 0][:, None],
    )
    return output.view(count, new, heads, channels)


def _wants_key_offsets() -> bool:
    """torch's own kernel, FlashAttention 2, does; those that can be put in its place do not."""
    current = getattr(import_module("torch.nn.attention"), "current_flash_attention_impl", lambda: None)
    return current() in (None, "FA2")


FLASH = Backend(
    "flash", "accept_head_kvcache", _flash_kernel, _flash_plan, _flash_attend, "the package flash-attn", caps=True
)
VARLEN = Backend(
    "varlen",
    "accept_head_varlen",
    _varlen_kernel,
    _varlen_plan,
    _varlen_attend,
    "torch.nn.attention.varlen, of torch 2.10,",
    page=PAGE,
    traced=True,
)
BACKENDS = (FLASH, VARLEN)  # in the order of preference


def _named(name: str) -> Backend:
    return next(backend for backend in BACKENDS if backend.name == name)


def _described(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
