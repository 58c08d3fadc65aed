"""How traces become draft inputs: the paper's token mixing, exact packing, and the plain prefix (docs/theory.md §4).

For a head that reads the state at Y_i, the right input for its label is (x, X₁..X_{i−1}, Y_i). Exact packing gives
this input for every i in one forward of 2N tokens. Token mixing is the paper's approximation in N tokens. A head that
reads the state before Y_i needs only (x, X₁..X_{i−1}). Prefix packing gives this exactly in N tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from accept_head.signals import SIGNALS
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.training.learn.batches import LABELS, Packed

Packing = Literal["mixing", "exact", "prefix"]


def mix_tokens(response_ids: Tensor, draft_ids: Tensor, uniform: Tensor, r: float) -> Tensor:
    """Z_i = X_i with probability r, else Y_i. All (seq,); uniform in [0, 1)."""
    return torch.where(uniform < r, response_ids, draft_ids)


def pack_mixed(trace: dict[str, Any], uniform: Tensor, r: float) -> Packed:
    """[x, Z₁..Z_N]: the token label counts where Z_i = Y_i, the next label where Z_i = X_i."""
    prompt, response, draft = trace["prompt_ids"], trace["response_ids"], trace["draft_ids"]
    mixed = mix_tokens(response, draft, uniform, r)
    packed = _packed(trace, torch.cat([prompt, mixed]), len(prompt))
    packed.weights[len(prompt) :] *= torch.stack([mixed == draft, mixed == response, mixed == draft], dim=-1)
    return packed


def pack_exact(trace: dict[str, Any]) -> Packed:
    """[x, X₁..X_N, Y₁..Y_N]: Y_i has the position of X_i and attends to x, X_<i and itself only."""
    prompt, response, draft = trace["prompt_ids"], trace["response_ids"], trace["draft_ids"]
    start, count = len(prompt), len(response)
    trunk = start + count
    packed = _packed(trace, torch.cat([prompt, response, draft]), trunk)
    packed.position_ids[trunk:] = torch.arange(start, trunk)
    packed.allowed[trunk:, :trunk] = torch.arange(trunk) < torch.arange(start, trunk).unsqueeze(-1)
    packed.allowed[trunk:, trunk:] = torch.eye(count, dtype=torch.bool)
    return packed


def pack_prefix(trace: dict[str, Any], alternatives: int = 0) -> Packed:
    """[x, X₁..X_N]: the label and the signals of Y_i are at the place of X_{i−1}, and those of Y₁ at the prompt's end.

    alternatives: how many alternatives to Y_i, drawn from the same state, to add at that place.
    """
    prompt = trace["prompt_ids"]
    return _packed(trace, torch.cat([prompt, trace["response_ids"]]), len(prompt) - 1, alternatives)


def pack_fixed(trace: dict[str, Any], packing: Packing, alternatives: int = 0) -> Packed:
    """Pack by `exact` or `prefix`, which feed the draft the same tokens in every epoch. alternatives: for `prefix`."""
    return pack_exact(trace) if packing == "exact" else pack_prefix(trace, alternatives)


def _packed(trace: dict[str, Any], ids: Tensor, start: int, alternatives: int = 0) -> Packed:
    """These ids, (seq,), as a plain sequence: a(Y_i) and β_{i+1} after Y_i at place start + i, β_{i+1} at that of X_i.

    β₁ is at the prompt's end. alternatives: number at the places of Y_i.

    In a coupled trace Y_i = X_i exactly where Y_i is accepted: a rejected Y_i is drawn from [q − p]₊, which is 0 at
    X_i. Text that was only scored under these settings may hold a token that the target never generates under them.
    There `accepted` only means Y_i = X_i, and a(Y_i) = 0.
    """
    length, prompt, count = len(ids), len(trace["prompt_ids"]), len(trace["response_ids"])
    drawn, said = slice(start, start + count), slice(prompt - 1, prompt - 1 + count)
    followed = slice(start, start + count - 1)  # the last position has no next one
    packed = Packed(
        labels=torch.zeros(length, len(LABELS)),
        weights=torch.zeros(length, len(LABELS)),
        signals=torch.zeros(length, len(SIGNALS)),
        drawn_ids=torch.zeros(length, dtype=torch.long),
        alternative_ids=torch.zeros(length, alternatives, dtype=torch.long),
        alternatives=torch.zeros(length, alternatives, 2),
        input_ids=ids,
        position_ids=torch.arange(length),
        allowed=torch.ones(length, length, dtype=torch.bool).tril(),
        index=int(trace["index"]),
    )
    packed.labels[drawn, 0], packed.weights[drawn, 0] = trace["acceptance"], 1
    packed.labels[said, 1], packed.weights[said, 1] = trace["overlap"], 1
    packed.labels[followed, 2] = trace["overlap"][1:]
    packed.weights[followed, 2] = (trace["accepted"] & (trace["acceptance"] > 0)).float()[:-1]
    packed.signals[drawn] = torch.stack([trace[name] for name in SIGNALS], dim=-1)
    packed.drawn_ids[drawn] = trace["draft_ids"]
    if alternatives:
        found, logprob, acceptance = (trace[name].view(count, -1)[:, :alternatives] for name in ALTERNATIVE_COLUMNS)
        packed.alternative_ids[drawn] = found
        packed.alternatives[drawn] = torch.stack([logprob, acceptance], -1)
    return packed
