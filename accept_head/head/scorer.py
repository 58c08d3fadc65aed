"""A head prepared for serving: `AcceptanceHead.probability` with a third of the host's work per call.

Two things are folded into the weights beforehand: the normalisation of the signals, and the projection of every token's
embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn

from accept_head.base import BASE_FUNCTIONS
from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead, given
from accept_head.head_config import Prediction, Predicts
from accept_head.signals import SIGNALS

Score = Callable[..., Tensor]
Product = Callable[..., Tensor]  # (x, matrix, offset) → x·matrix + offset

SMALL_MATRIX = 1 << 16  # elements
TABLE_BYTES = 1 << 28  # largest table of projected embeddings that serving keeps


@torch.no_grad()
def make_scorer(
    head: AcceptanceHead,
    prediction: Predicts = "token",
    beside: Callable[[Tensor], Tensor] | None = None,
    *,
    fusible: bool = False,
    table: bool = True,
) -> Score:
    """Make a function (hidden, signals, token_ids) → P̂, with the head's present weights.

    prediction: `both` gives P̂ and β̂ in one pass: (..., 2).
    beside: a function of the state that the last layer reads, (n, channels) → (n, m). Its values are appended to the
        predictions: (..., 1 + m), or (..., 2 + m) with `both`.
    fusible: write products with small matrices as sums, which a compiler fuses with the code around. For few rows.
    table: whether to project every token's embedding beforehand. Not for weights that are about to change.

    Raises InputError as `probability` does, and when the head needs embeddings but has none attached.
    """
    config = head.config
    product = _as_sums if fusible else _as_product
    base = _base_logits(head, prediction, product) if config.base else None
    if not config.residual:
        assert base is not None
        if beside is not None:
            raise InputError("a head without a residual has no state of its own")
        return _score_of_base(head, base)
    blocks = [(block.linear.weight.detach().t(), block.linear.bias.detach()) for block in head.residual_blocks()]
    last = _last_logits(head, prediction, product)
    dtype = head.dtype
    state = head.state_input.weight.detach().t() if config.width is not None else None
    offset = head.state_input.bias.detach() if config.standardised else None
    if config.signals:
        scale, shift = on_raw_signals(head, head.signal_input.weight.detach())
    projected = _embedding_table(head) if config.reads_embedding and table else None

    def score(hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        x = hidden.to(dtype).reshape(-1, config.hidden_size)
        if state is not None:
            x = product(x, state, offset)
        if config.signals:
            every = head.every_signal_input(given(signals, "the draft signals", config.signals)).reshape(-1, len(scale))
            x = product(every, scale, x + shift)
        if config.reads_embedding:
            ids = given(token_ids, "the embedding of", "the drawn token").reshape(-1)
            x = x + (head.embedding_input(head.embedded(ids)) if projected is None else projected[ids])
        for weight, bias in blocks:
            x = x + nn.functional.silu(product(x, weight, bias))
        logits = last(x)
        if base is not None:
            logits = logits + base(every).view(logits.shape)
        predicted = logits.sigmoid()
        if beside is not None:
            predicted = torch.cat([predicted.view(len(x), -1), beside(x)], dim=-1)
        return predicted.view((*hidden.shape[:-1], *predicted.shape[1:]))

    return score


def on_raw_signals(head: AcceptanceHead, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rewrite a layer that reads normalised signals into one that reads all raw signals.

    weight: (outputs, inputs). Returns (3 or 9, outputs) to multiply with, and (outputs,) to add.
    """
    scaled = weight / head.signal_std
    count = len(BASE_FUNCTIONS) if head.config.base else len(SIGNALS)
    scale = torch.zeros(count, len(weight), dtype=weight.dtype, device=weight.device)
    scale[head.signal_places] = scaled.t()
    return scale, -(scaled @ head.signal_mean)


def _base_logits(head: AcceptanceHead, prediction: Predicts, product: Product) -> Callable[[Tensor], Tensor]:
    """Make a function from all functions of the signals, (n, 9), to the base's logits, (n, 1), or (n, 2) for `both`."""
    weight, offset = on_raw_signals(head, head.base.weight.detach())
    offset = offset + head.base.bias.detach()
    if prediction != "both":
        place = head.index_of(prediction)
        weight, offset = weight[:, place : place + 1].clone(), offset[place : place + 1].clone()
    return lambda every: product(every, weight, offset)


def _score_of_base(head: AcceptanceHead, base: Callable[[Tensor], Tensor]) -> Score:
    """The scorer of a head that is a base alone."""

    def score(hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        every = head.every_signal_input(given(signals, "the draft signals", head.config.signals))
        predicted = base(every.view(-1, len(BASE_FUNCTIONS))).sigmoid()
        return predicted.view((*every.shape[:-1], *([2] if predicted.shape[1] == 2 else [])))

    return score


def _last_logits(head: AcceptanceHead, prediction: Predicts, product: Product) -> Callable[[Tensor], Tensor]:
    """Make the last layer: (n, channels) → logits (n,), or (n, 2) for `both`."""
    if prediction == "both":
        for each in get_args(Prediction):
            head.index_of(each)
        both, offsets = head.output.weight.detach().t().clone(), head.output.bias.detach().clone()
        return lambda x: product(x, both, offsets)
    place = head.index_of(prediction)
    output, bias = head.output.weight[place].clone(), head.output.bias[place].clone()
    if product is _as_sums:
        return lambda x: (x * output).sum(-1) + bias
    return lambda x: torch.addmv(bias.expand(len(x)), x, output)


def _embedding_table(head: AcceptanceHead) -> Tensor | None:
    """(vocab, channels): the projection of each token's embedding.

    None when the table would take too much memory, or when the embeddings are on another device.
    """
    embeddings, weight = head.attached_embeddings(), head.embedding_input.weight.detach()
    if len(embeddings) * len(weight) * weight.element_size() > TABLE_BYTES or embeddings.device != weight.device:
        return None
    return (embeddings.to(weight.dtype) / (head.config.embedding_std or 1.0)) @ weight.t()


def _as_product(x: Tensor, matrix: Tensor, offset: Tensor | None = None) -> Tensor:
    """x·matrix + offset. x: (n, inputs); matrix: (inputs, outputs); offset: (outputs,) or (n, outputs)."""
    return x @ matrix if offset is None else torch.addmm(offset, x, matrix)


def _as_sums(x: Tensor, matrix: Tensor, offset: Tensor | None = None) -> Tensor:
    """`_as_product` without a call of a library for a small matrix, where the call takes longer than the product."""
    if matrix.numel() > SMALL_MATRIX:
        return _as_product(x, matrix, offset)
    products = (x[:, None, :] * matrix.t()).sum(-1)
    return products if offset is None else products + offset
