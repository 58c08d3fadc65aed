"""One head's loss and gradients, computed by hand in one go.

A sweep trains many small heads on the same states. Autograd would run all heads forward, then all heads backward, and
fetch every activation from main memory again. Here one head goes forward and backward while its activations are still
in the processor's cache. Each head is computed on its own by the same operations, so a head of a sweep is equal to the
bit to the head trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accept_head.head.network import AcceptanceHead
from accept_head.training.learn.positions import Positions, SharedRows


@dataclass
class HeadLoss:
    """The loss of one head and its gradients.

    value: scalar, numerator of the weighted loss. cross_entropy: (predictions,), unweighted, summed, nats.
    gradients: of `value`, for the trainable ones of `head.parameters()`, in that order.
    """

    value: Tensor
    cross_entropy: Tensor
    gradients: list[Tensor]


def head_loss(
    head: AcceptanceHead, positions: Positions, *, w_acc: float, w_rej: float, dtype: torch.dtype = torch.float32
) -> HeadLoss:
    """The numerator of the weighted cross-entropy (docs/theory.md §4) on these positions, and its gradients.

        −Σ_i [w_acc·a_i·log P̂_i + w_rej·(1 − a_i)·log(1 − P̂_i)]

    dtype: of the matrix products, as under autocast; sums and gradients are float32.
    """
    # Looked up and cast once: for small heads these lines of Python take a good part of the time.
    linears: list[Any] = [block.linear for block in head.blocks]
    blocks = [(linear.weight.to(dtype), linear.bias.to(dtype)) for linear in linears]
    inputs, output_weight = _inputs(head, positions, dtype), head.output.weight.to(dtype)
    states, before_silu = _forward_blocks(blocks, _first_state(head, positions, inputs), dtype)
    logits = F.linear(states[-1].to(dtype), output_weight, head.output.bias.to(dtype)).float()
    if head.config.base:
        logits = logits + head.base(positions.signals)

    # −A log σ(z) − R log σ(−z) = (A + R) softplus(z) − A z, and its derivative (A + R) σ(z) − A.
    softplus = F.softplus(logits)
    accept = w_acc * positions.accept
    both = accept + w_rej * positions.reject
    value = (both * softplus - accept * logits).sum()
    cross_entropy = ((positions.accept + positions.reject) * softplus - positions.accept * logits).sum(0)
    d_logits = (both * logits.sigmoid() - accept).to(dtype)

    output = [(d_logits.t() @ states[-1].to(dtype)).float(), d_logits.sum(0).float()]
    d_last = (d_logits @ output_weight).float()
    d_blocks, d_inputs = _backward_blocks(blocks, list(inputs.values()), states, before_silu, d_last, dtype)
    return HeadLoss(value, cross_entropy, [*d_blocks, *output, *d_inputs])


def _inputs(head: AcceptanceHead, positions: Positions, dtype: torch.dtype) -> dict[nn.Linear, SharedRows]:
    """The inputs of the head's trainable input layers, by layer, in the order of `head.parameters()`."""
    inputs = {}
    if positions.signals is not None:
        inputs[head.signal_input] = SharedRows(positions.signals)
    if positions.embedded is not None:
        inputs[head.embedding_input] = positions.embedded.to(dtype)
    if _learns_state_input(head):
        inputs[head.state_input] = positions.states.to(dtype)
    return inputs


def _learns_state_input(head: AcceptanceHead) -> bool:
    return head.config.width is not None and not head.config.standardised


def _first_state(head: AcceptanceHead, positions: Positions, inputs: dict[nn.Linear, SharedRows]) -> Tensor:
    """(n, channels) float32: the sum of the head's inputs, each after its input layer."""
    parts = [] if _learns_state_input(head) else [positions.states.spread(positions.states.values).float()]
    for linear, rows in inputs.items():
        parts.append(rows.spread((rows.values @ linear.weight.t().to(rows.values.dtype)).float()))
    return reduce(torch.add, parts)


def _forward_blocks(
    blocks: Sequence[tuple[Tensor, Tensor]], state: Tensor, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """(the state before each block and after the last one, the input of each block's SiLU); all (n, hidden_size)."""
    states, before_silu = [state], []
    for weight, bias in blocks:
        before = F.linear(state.to(dtype), weight, bias)
        state = state + F.silu(before)
        before_silu.append(before)
        states.append(state)
    return states, before_silu


def _backward_blocks(
    blocks: Sequence[tuple[Tensor, Tensor]],
    inputs: Sequence[SharedRows],
    states: Sequence[Tensor],
    before_silu: Sequence[Tensor],
    d_state: Tensor,
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """(weight and bias gradients of every block, first block first; weight gradient of the layer of each of `inputs`).

    inputs: from `_inputs`. d_state: gradient of the state after the last block, (n, channels).
    """
    gradients: list[Tensor] = []
    for level in reversed(range(len(blocks))):
        weight, _ = blocks[level]
        d_linear = torch.ops.aten.silu_backward(d_state.to(dtype), before_silu[level])
        gradients[:0] = [(d_linear.t() @ states[level].to(dtype)).float(), d_linear.sum(0).float()]
        if level > 0 or inputs:
            d_state = d_state.addmm_(d_linear, weight) if dtype == torch.float32 else d_state + d_linear @ weight
    return gradients, [(rows.summed(d_state).to(rows.values.dtype).t() @ rows.values).float() for rows in inputs]


class KnownGradients(torch.autograd.Function):
    """A loss whose gradients are already known. Lightning and DDP need a loss that autograd can differentiate."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return None, None, *torch._foreach_mul(ctx.gradients, scale)  # in one call: a sweep has hundreds
