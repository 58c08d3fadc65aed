"""Tests once for each model that the ragged cache works: compares ragged forwards after a rollback with a plain one.

`AttentionKinds` refuses models by what transformers declares. This test catches undeclared differences, for example
position biases built from a padding mask. It also measures the cache memory of a token.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError, one_line
from accept_head.inference.engine import packing
from accept_head.inference.engine.attention.choice import Attention, choose, decline
from accept_head.inference.engine.cache import CachedModel, Group
from accept_head.pair import hidden_size, output_size

# How far the logits of a token may differ, root mean square, as a share of their spread: in roundings of the dtype, and
# at least. In bfloat16, random Llamas of 16 and 32 layers are 4 roundings from float32, and wrong positions come to 26
# and more. The largest difference of 128,000 logits is no measure: it is 0.14 of the spread by rounding alone.
ROUNDINGS, LEAST_TOLERANCE = 12, 0.003


_served: WeakKeyDictionary[PreTrainedModel, dict[Attention, int]] = WeakKeyDictionary()


@torch.no_grad()
def check_served(model: PreTrainedModel, attention: Attention = "sdpa") -> int:
    """Test the model → bytes of keys and values a token, over all layers. Raises InputError naming it when its ragged
    forwards differ from a plain forward. With attention `auto`, a backend that fails is not chosen again for this
    model, and a warning is logged."""
    proofs = _served.setdefault(model, {})
    while (chosen := backend.name if (backend := choose(model, attention)) else "sdpa") not in proofs:
        try:
            proofs[chosen] = _prove(model, chosen)
        except InputError as error:
            if attention != "auto" or backend is None:
                raise
            decline(backend, model, str(error))
            logging.getLogger(__name__).warning("accept-head: not attention=%s: %s", backend.name, error)
    return proofs[chosen]


def _prove(model: PreTrainedModel, attention: Attention) -> int:
    rows, length = 2, 8
    ids = torch.arange(rows * length, device=model.device).view(rows, length) * 7919 % output_size(model)
    cached = CachedModel(model, rows, length, attention=attention)
    starts = torch.tensor([2, 5], device=model.device)
    name = f"{type(model).__name__} ({model.config.model_type})"
    try:
        index = starts[:, None] + torch.arange(3, device=starts.device)
        if isinstance(model, Eagle3Drafter):
            states = torch.arange(ids.numel() * hidden_size(model), device=model.device).sin().to(model.dtype)
            states = states.view(rows, length, -1)
            plain = model(ids, states, torch.arange(length, device=model.device)[None]).logits.float()
            group = Group(torch.tensor([[0, 0, 2], [1, 0, 5]], device=model.device), 5, 0)
            cached.fill_drafter(ids, group, states[:, :5])
            cached.forward(ids[:, :2].flip(0), starts, 5, states=states[:, :2])
            states = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
            given = ids.gather(1, index), starts, 5
            ragged = cached.forward(*given, states=states).logits.float()
        else:
            plain = model(ids).logits.float()
            cached.fill(ids, [0, 1], [0, 0], [2, 5])
            cached.forward(ids[:, :2].flip(0), starts, 5)  # a rejected draft, overwritten below
            given, states = (ids.gather(1, index), starts, 5), None
            ragged = cached.forward(*given).logits.float()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        reason = one_line(error)
        raise InputError(f"{name} cannot be run with a ragged cache ({type(error).__name__}: {reason})") from error
    expected = plain.gather(1, index[..., None].expand(-1, -1, plain.shape[-1]))
    if not (difference := _difference(ragged, expected)) <= (tolerance := _tolerance(model.dtype)):
        raise InputError(
            f"{name} gives other logits with a ragged cache than without, by {difference:.3g} of their spread where "
            f"rounding explains {tolerance:.3g}; it is not supported"
        )
    if cached.packs and not _packs(cached, given, states, expected):
        packing.declined.add(model)
        logging.getLogger(__name__).warning("accept-head: %s gives other logits without padding: it is padded", name)
    return cached.bytes // (rows * cached.slots)


def _packs(cached: CachedModel, given: tuple[Tensor, Tensor, int], states: Tensor | None, expected: Tensor) -> bool:
    """Whether a packed forward of some of the tokens gives their logits."""
    wanted = torch.tensor([[True, True, True], [True, False, False]], device=expected.device)
    try:
        packed = cached.forward_packed(packing.Packing.of(wanted), *given, states).logits.float()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False
    return _difference(packed[wanted], expected[wanted]) <= _tolerance(cached.model.dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    """How far these logits, (..., vocab), differ at the token where they differ most, as a share of their spread."""
    return float((found - expected).square().mean(-1).max().sqrt() / expected.std())


def _tolerance(dtype: torch.dtype) -> float:
    return max(LEAST_TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps)
