"""A head's scores for the few rows of a decoding step, in depth + 1 kernels.

At these sizes each of torch's operations, 17 for the default head, takes longer to start than to run. The kernels only
read the weights once, in bfloat16 when the model's own weights are in half precision. As in `make_scorer`, the torch
reference, some steps are folded into the weights: the normalisation of signals, the deviation of embeddings, and, if it
is small enough, the projection of every token's embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accept_head.base import BASE_FUNCTIONS
from accept_head.head.network import AcceptanceHead
from accept_head.head.scorer import TABLE_BYTES, Score, make_scorer, on_raw_signals
from accept_head.head_config import Predicts
from accept_head.inference.kernels.launch import counters, dense, early_options, power_of_two, triton_kernels
from accept_head.inference.kernels.signals import CHECK as SIGNALS_CHECK
from accept_head.inference.kernels.usable import Check, passes, usable
from accept_head.signals import SIGNALS

# For more rows than this, matrix products are faster.
MOST_ROWS = 64
ROWS_AT_ONCE, PRODUCTS_AT_ONCE = 8, 8192  # per program
DOT_ROWS, DOT_BLOCK, DOT_STAGES = 16, 256, 4  # the same with tensor cores
DOT_LEAST = 64  # numbers at once, of which each of four warps multiplies no fewer than 16
FEW_CHANNELS = 512
HALF = (torch.bfloat16, torch.float16)
TABLE_ROWS = 1 << 14  # rows of the embedding table that are computed at once


def scorer_of(
    head: AcceptanceHead, prediction: Predicts = "token", beside: Callable[[Tensor], Tensor] | None = None
) -> Score:
    """`make_scorer(head, prediction, beside)`, by kernels for up to MOST_ROWS states on a GPU.

    torch always computes `beside`, from the last state that the kernels return.
    """
    in_torch = make_scorer(head, prediction, beside)  # raises if the head does not make the prediction
    embeddings = head.embeddings if head.config.reads_embedding else None
    on_one_device = embeddings is None or embeddings.device == head.device
    if usable(next(head.parameters()), SIGNALS_CHECK) and head.dtype is torch.float32 and on_one_device:
        return KernelScorer(head, prediction, in_torch, beside)
    return in_torch


@dataclass(frozen=True)
class PackedHead:
    """A head's weights in one dtype.

    state, embedding: (channels, hidden_size) or None. scale: (3, channels), for raw signals, or (9, channels), for a
    base's functions of them, or None. shift: (channels,) or None. table: (vocab, channels), or (vocab, hidden_size) if
    there is an `embedding` to multiply by. weights: (channels, channels) per block. biases: (channels,) per block.
    output: (predictions, channels); 0 channels for a base alone. base: (9, predictions), for its raw functions, or
    None. bias: (predictions,), including the base's.
    """

    state: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    table: Tensor | None
    embedding: Tensor | None
    weights: list[Tensor]
    biases: list[Tensor]
    output: Tensor
    base: Tensor | None
    bias: Tensor


class KernelScorer:
    """The scorer of `scorer_of`. in_torch: scores the states that the kernels do not take."""

    def __init__(
        self,
        head: AcceptanceHead,
        prediction: Predicts,
        in_torch: Score,
        beside: Callable[[Tensor], Tensor] | None = None,
    ):
        self.head, self.in_torch, self.beside, self.config = head, in_torch, beside, head.config
        self.places = [0, 1] if prediction == "both" else [head.index_of(prediction)]
        self.packed: dict[torch.dtype, PackedHead] = {}
        self.passed: dict[tuple[torch.dtype, bool], bool] = {}

    def __call__(self, hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        """Scores, (...), or (..., 2) for `both`; with m numbers of `beside`, (..., 1 + m) or (..., 2 + m).

        hidden: (..., hidden_size), not read by a base alone. signals: (..., 3). token_ids: (...).
        """
        read = hidden if self.config.residual else signals
        given = (signals is not None or not self.config.signals) and (
            token_ids is not None or not self.config.reads_embedding
        )
        if read is None or not given or not self._takes(read):
            return self.in_torch(hidden, signals, token_ids)
        return self._scored(read, signals, token_ids)

    def _takes(self, read: Tensor) -> bool:
        rows = read.numel() // read.shape[-1]
        if not 0 < rows <= MOST_ROWS or not usable(read, SIGNALS_CHECK) or read.dtype is torch.float64:
            return False
        return self._passed(packed_dtype(read.dtype), rows > 1)

    def _passed(self, dtype: torch.dtype, several: bool) -> bool:
        """Whether the kernels agree with torch. Tried once for each dtype and for one or several rows."""
        if (dtype, several) not in self.passed:
            check = Check("the head", lambda _: self._compare(dtype, several))
            self.passed[dtype, several] = passes(check, self.head.device)
        return self.passed[dtype, several]

    def _compare(self, dtype: torch.dtype, several: bool) -> None:
        """Raises AssertionError when the kernels and torch differ."""
        device, rows = self.head.device, 1 + several
        hidden = torch.linspace(-3, 3, rows * self.config.hidden_size, device=device).sin().view(rows, -1).to(dtype)
        signals = torch.full((rows, len(SIGNALS)), 0.5, device=device)
        ids = torch.zeros(rows, dtype=torch.long, device=device)
        expected, read = self.in_torch(hidden, signals, ids), hidden if self.config.residual else signals
        torch.testing.assert_close(self._scored(read, signals, ids), expected, rtol=1e-2, atol=1e-2)

    def _scored(self, read: Tensor, signals: Tensor | None, token_ids: Tensor | None) -> Tensor:
        """Scores by the kernels. read: states, or signals for a base alone."""
        dtype = packed_dtype(read.dtype)
        if dtype not in self.packed:
            self.packed[dtype] = pack(self.head, self.places, dtype)
        inputs = self.packed[dtype], read.reshape(-1, read.shape[-1]), signals, token_ids
        if self.beside is not None:
            scores, state = _run(*inputs, with_state=True)
            scores = torch.cat([scores, self.beside(state.to(self.head.dtype))], dim=-1)
            return scores.view(*read.shape[:-1], -1)
        scores, _ = _run(*inputs)
        return scores.view((*read.shape[:-1], *([2] if len(self.places) > 1 else [])))


def packed_dtype(of_states: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if of_states in HALF else torch.float32


def table_bytes(head: AcceptanceHead, dtype: torch.dtype) -> int:
    """Bytes of the projected embeddings of all tokens."""
    return len(head.attached_embeddings()) * head.config.channels * dtype.itemsize


def bytes_to_pack(score: object, of_states: torch.dtype) -> int:
    """Bytes that a scorer allocates at its first call with states of this dtype.

    0 after this call, or if the scorer is no `KernelScorer`.
    """
    dtype = packed_dtype(of_states)
    if not isinstance(score, KernelScorer) or dtype in score.packed:
        return 0
    head, config = score.head, score.config
    numbers = len(BASE_FUNCTIONS) if config.base else len(SIGNALS)  # inputs made from a token's signals
    base = numbers * len(score.places) * torch.float32.itemsize if config.base else 0
    if not config.residual:
        return base
    inputs = [config.width is not None]
    table = 0
    if config.reads_embedding:
        table = table_bytes(head, dtype)
        inputs += [table > TABLE_BYTES]
        table = table if table <= TABLE_BYTES else 0
    weights = config.channels * (config.depth * config.channels + sum(inputs) * config.hidden_size + len(score.places))
    signals = (numbers + 1) * config.channels * torch.float32.itemsize if config.signals else 0
    return table + weights * dtype.itemsize + signals + base


@torch.no_grad()
def pack(head: AcceptanceHead, places: list[int], dtype: torch.dtype) -> PackedHead:
    """The head's present weights, on the head's device."""
    config = head.config
    base, bias = None, torch.zeros(len(places), device=head.device)
    if config.base:
        base, bias = on_raw_signals(head, head.base.weight[places])
        bias = bias + head.base.bias[places]
    if not config.residual:
        nothing = torch.empty(len(places), 0, device=head.device)
        return PackedHead(None, None, None, None, None, [], [], nothing, base, bias)
    state = head.state_input.weight.to(dtype).contiguous() if config.width is not None else None
    scale = table = embedding = None
    shift = head.state_input.bias.detach() if config.standardised else None
    if config.signals:
        scale, offset = on_raw_signals(head, head.signal_input.weight)
        shift = offset if shift is None else shift + offset
    if config.reads_embedding:
        embeddings = head.attached_embeddings()
        folded = head.embedding_input.weight / (config.embedding_std or 1.0)
        if table_bytes(head, dtype) <= TABLE_BYTES:
            table = torch.empty(len(embeddings), len(folded), dtype=dtype, device=folded.device)
            for rows, part in zip(table.split(TABLE_ROWS), embeddings.split(TABLE_ROWS), strict=True):
                rows.copy_(part.to(folded.dtype) @ folded.t())
        else:
            table, embedding = embeddings, folded.to(dtype).contiguous()
    return PackedHead(
        state,
        scale,
        shift,
        table,
        embedding,
        [block.linear.weight.to(dtype).contiguous() for block in head.residual_blocks()],
        [block.linear.bias.detach() for block in head.residual_blocks()],
        head.output.weight[places].to(dtype).contiguous(),
        base,
        head.output.bias[places] + bias,
    )


def _run(
    packed: PackedHead, read: Tensor, signals: Tensor | None, token_ids: Tensor | None, *, with_state: bool = False
) -> tuple[Tensor, Tensor]:
    """Launch the kernels. Returns scores, (rows, predictions) float32, and the input of the last layer.

    read: (rows, hidden_size). signals: (..., 3). token_ids: (...). with_state: the input of the last layer, (rows,
    channels) float32, is only valid with this option, which takes one more kernel.
    """
    kernels = triton_kernels("head")
    read = dense(read)
    (rows, size), (outputs, channels) = read.shape, packed.output.shape
    signals = signals.reshape(rows, -1).contiguous() if signals is not None else None
    x, y = torch.empty(2, rows, channels, dtype=torch.float32, device=read.device)
    scores = torch.empty(rows, outputs, dtype=torch.float32, device=read.device)
    shape, how = _shape(rows, channels, packed.output.dtype), early_options(read.device)
    grid = (-(-channels // shape["CHANNELS"]), -(-rows // shape["ROWS"]))

    def pointer(tensor: Tensor | None, wanted: object = True) -> Tensor:
        return read if tensor is None or wanted is None else tensor  # a kernel needs a pointer in any case

    base = pointer(signals, packed.base), pointer(packed.base)
    with torch.cuda.device_of(read):
        if channels:
            kernels.head_input[grid](
                read,
                pointer(packed.state),
                pointer(signals, packed.scale),
                pointer(packed.scale),
                pointer(packed.shift),
                pointer(token_ids.reshape(-1).contiguous() if token_ids is not None else None, packed.table),
                pointer(packed.table),
                pointer(packed.embedding),
                x,
                rows,
                size,
                channels,
                read.stride(0),
                packed.table.stride(0) if packed.table is not None else 0,
                STATE=packed.state is not None,
                SHIFT=packed.shift is not None,
                SIGNALS=len(packed.scale) if packed.scale is not None else 0,
                TABLE=packed.table is not None and packed.embedding is None,
                EMBEDDING=packed.embedding is not None,
                **shape,
                **how,
            )
        shape["BLOCK"] = min(shape["BLOCK"], max(power_of_two(channels), DOT_LEAST if shape["DOT"] else 1))
        blocks = list(zip(packed.weights, packed.biases, strict=True))
        last = blocks.pop() if blocks and not with_state else None
        for weight, bias in blocks:
            kernels.head_block[grid](x, weight, bias, y, rows, channels, **shape, **how)
            x, y = y, x
        end: dict[str, Any] = {"OUTPUTS": outputs, "BASE": packed.base is not None}
        if last is None:
            kernels.head_output[(rows,)](
                x, packed.output, packed.bias, *base, scores, rows, channels,
                **end, BLOCK=power_of_two(channels), **how,
            )  # fmt: skip
        else:
            parts = torch.empty(outputs, rows, grid[0], dtype=torch.float32, device=read.device)
            kernels.head_last[grid](
                x, *last, packed.output, packed.bias, *base, parts, counters(read.device, grid[1]), scores, rows,
                channels, **end, TILES=power_of_two(grid[0]), **shape, **how,
            )  # fmt: skip
    return scores, x


def _shape(rows: int, channels: int, dtype: torch.dtype) -> dict[str, Any]:
    """The part that one program computes: small enough for its registers, and for enough programs to fill a GPU."""
    if rows > 1 and dtype in HALF:
        return {"ROWS": DOT_ROWS, "CHANNELS": 8, "BLOCK": DOT_BLOCK, "DOT": True, "num_stages": DOT_STAGES}
    at_once, columns = min(power_of_two(rows), ROWS_AT_ONCE), 4 if channels <= FEW_CHANNELS else 8
    products = PRODUCTS_AT_ONCE if dtype in HALF else PRODUCTS_AT_ONCE // 2
    return {"ROWS": at_once, "CHANNELS": columns, "BLOCK": products // (at_once * columns), "DOT": False}
