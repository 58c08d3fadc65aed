"""Tokens that the drafter has not been fed yet, because nothing was drafted.

vLLM feeds the drafter in every round, which keeps its cache complete. While a batch drafts nothing, these forwards are
in vain. So they are put off: before the next draft, one forward feeds what is missing. A request that ends first never
costs any. (Its blocks stay incomplete for the drafter in vLLM's prefix cache. That can cost acceptance, never text.)
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accept_head.inference.engine.memory import WAITING_STATES


class Span(NamedTuple):
    """The tokens of a request that the target was fed in this round: positions begin to end − 1."""

    request: str
    begin: int
    end: int


@dataclass
class Missing:
    """Positions begin to end − 1 of a request. states: the target's, (tokens, hidden) each, of a drafter that reads
    them."""

    begin: int
    end: int
    states: list[Tensor] = field(default_factory=list)


class Unfed:
    """What the drafter has missed. limit: the most tokens that one forward takes. reads_states: whether the drafter is
    fed the target's states; tokens alone need not be kept, as vLLM knows them."""

    def __init__(self, limit: int, *, reads_states: bool):
        self.limit, self.reads_states = limit, reads_states
        self.missing: dict[str, Missing] = {}

    def put_off(self, spans: Sequence[Span], states: Tensor, known: Container[str]) -> bool:
        """Do not feed these tokens now → False if they are too many. states: (tokens, hidden), of all spans in order.
        known: vLLM's requests; others have ended."""
        self.missing = {name: each for name, each in self.missing.items() if name in known}
        there = sum(each.end - each.begin for each in self.missing.values())
        size = states[:1].nbytes if self.reads_states else 0
        if there + len(states) > self.limit or (there + len(states)) * size > WAITING_STATES:
            return False
        # On the host, a request at a time, as vLLM itself prepares its inputs.
        for span, own in zip(spans, states.split([end - begin for _, begin, end in spans]), strict=True):
            each = self.missing.get(span.request)
            if each is None or each.end != span.begin:  # vLLM has gone back, say after a preemption
                each = self.missing[span.request] = Missing(span.begin, span.begin)
            each.end = span.end
            if self.reads_states:
                each.states.append(own.clone())  # vLLM's buffer
        return True

    def take(self, spans: Sequence[Span]) -> list[tuple[int, Missing]]:
        """What these requests, now to be fed, have missed → each with its row."""
        taken = [(row, self.missing.pop(span.request, None)) for row, span in enumerate(spans)]
        return [(row, each) for row, each in taken if each is not None and each.end == spans[row].begin]


def catching_up(
    missed: Sequence[tuple[int, Missing]], token_ids: np.ndarray, inputs: dict[str, Any], block_size: int
) -> dict[str, Any]:
    """Inputs of vLLM's `propose` that feed what was missed. token_ids: (rows, context), on the host. inputs: of this
    round."""
    now = inputs["common_attn_metadata"]
    device = now.slot_mapping.device
    rows = torch.tensor([row for row, _ in missed])
    counts = torch.tensor([each.end - each.begin for _, each in missed])
    positions = torch.cat([torch.arange(each.begin, each.end) for _, each in missed])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    lengths = torch.tensor([each.end for _, each in missed], dtype=torch.int32)
    table = now.block_table_tensor[rows.to(device)]
    row_of, at = torch.arange(len(missed)).repeat_interleave(counts).to(device), positions.to(device)
    states = [part for _, each in missed for part in each.states]
    metadata = type(now)(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(missed),
        num_actual_tokens=len(positions),
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=table[row_of, at // block_size].long() * block_size + at % block_size,
    )
    return {
        **inputs,
        "target_token_ids": _ids([token_ids[row, each.begin : each.end] for row, each in missed], device),
        "next_token_ids": _ids([token_ids[row, each.end : each.end + 1] for row, each in missed], device),
        "target_positions": at,
        "target_hidden_states": torch.cat(states) if states else inputs["target_hidden_states"],
        "token_indices_to_sample": None,
        "num_rejected_tokens_gpu": None,
        "common_attn_metadata": metadata,
    }


def _ids(parts: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).int().to(device)
