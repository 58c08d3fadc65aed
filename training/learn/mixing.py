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
    ids = torch.cat([prompt, mixed])
    labels, mask = _next_labels(trace, extra=0)
    start = len(prompt)
    _label_drawn(trace, labels, mask, start)
    mask[start:, 0] &= mixed == draft
    mask[start:, 1] &= mixed == response
    mask[start:, 2] &= mixed == draft
    length = len(ids)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    drawn = *_drawn(trace, start, length), *_alternatives(trace, start, length, 0)
    return Packed(ids, torch.arange(length), allowed, labels, mask, *drawn)


def pack_exact(trace: dict[str, Any]) -> Packed:
    """[x, X₁..X_N, Y₁..Y_N]: Y_i has the position of X_i and attends to x, X_<i and itself only."""
    prompt, response, draft = trace["prompt_ids"], trace["response_ids"], trace["draft_ids"]
    start, count = len(prompt), len(response)
    trunk = start + count
    ids = torch.cat([prompt, response, draft])
    positions = torch.cat([torch.arange(trunk), torch.arange(start, trunk)])
    allowed = torch.zeros(trunk + count, trunk + count, dtype=torch.bool)
    allowed[:trunk, :trunk] = torch.ones(trunk, trunk, dtype=torch.bool).tril()
    allowed[trunk:, :trunk] = torch.arange(trunk) < torch.arange(start, trunk).unsqueeze(-1)
    allowed[trunk:, trunk:] = torch.eye(count, dtype=torch.bool)
    labels, mask = _next_labels(trace, extra=count)
    _label_drawn(trace, labels, mask, trunk)
    drawn = *_drawn(trace, trunk, trunk + count), *_alternatives(trace, trunk, trunk + count, 0)
    return Packed(ids, positions, allowed, labels, mask, *drawn)


def pack_prefix(trace: dict[str, Any], alternatives: int = 0) -> Packed:
    """[x, X₁..X_N]: the label and the signals of Y_i are at the place of X_{i−1}, and those of Y₁ at the prompt's end.

    alternatives: how many alternatives to Y_i, drawn from the same state, to add at that place.
    """
    prompt, response = trace["prompt_ids"], trace["response_ids"]
    ids = torch.cat([prompt, response])
    length, start = len(ids), len(prompt) - 1
    labels, mask = _next_labels(trace, extra=0)
    _label_drawn(trace, labels, mask, start)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    drawn = *_drawn(trace, start, length), *_alternatives(trace, start, length, alternatives)
    return Packed(ids, torch.arange(length), allowed, labels, mask, *drawn)


def pack_fixed(trace: dict[str, Any], packing: Packing, alternatives: int = 0) -> Packed:
    """Pack by `exact` or `prefix`, which feed the draft the same tokens in every epoch. alternatives: for `prefix`."""
    return pack_exact(trace) if packing == "exact" else pack_prefix(trace, alternatives)


def _drawn(trace: dict[str, Any], start: int, length: int) -> tuple[Tensor, Tensor]:
    """The trace's signals and drawn ids in a sequence of this length, from place `start` on: (length, 3), (length,)."""
    here = slice(start, start + len(trace["draft_ids"]))
    signals, ids = torch.zeros(length, len(SIGNALS)), torch.zeros(length, dtype=torch.long)
    signals[here] = torch.stack([trace[name] for name in SIGNALS], dim=-1)
    ids[here] = trace["draft_ids"].long()
    return signals, ids


def _alternatives(trace: dict[str, Any], start: int, length: int, most: int) -> tuple[Tensor, Tensor]:
    """The first `most` alternatives to each drawn token in a sequence of this length, from place `start` on.

    Returns ids, (length, most), and their log q and a, (length, most, 2).
    """
    ids, values = torch.zeros(length, most, dtype=torch.long), torch.zeros(length, most, 2)
    if most:
        here, count = slice(start, start + len(trace["draft_ids"])), len(trace["draft_ids"])
        found, logprob, acceptance = (trace[name].view(count, -1)[:, :most] for name in ALTERNATIVE_COLUMNS)
        ids[here], values[here] = found.long(), torch.stack([logprob, acceptance], -1)
    return ids, values


def _label_drawn(trace: dict[str, Any], labels: Tensor, mask: Tensor, start: int) -> None:
    """Fill in the labels of each Y_i at place start + i: a(Y_i), and β_{i+1} after it.

    In a coupled trace Y_i = X_i exactly where Y_i is accepted: a rejected Y_i is drawn from [q − p]₊, which is 0 at
    X_i. Text that was only scored under these settings may hold a token that the target never generates under them.
    There `accepted` only means Y_i = X_i, and a(Y_i) = 0."""
    here, acceptance = slice(start, start + len(trace["draft_ids"])), trace["acceptance"]
    labels[here, 0], mask[here, 0] = acceptance, True
    followed = slice(here.start, here.stop - 1)  # the last position has no next one
    labels[followed, 2] = trace["overlap"][1:]
    mask[followed, 2] = (trace["accepted"] & (acceptance > 0))[:-1]


def _next_labels(trace: dict[str, Any], extra: int) -> tuple[Tensor, Tensor]:
    """Labels and mask (prompt + response + extra, 3) with β_{i+1} at the place of X_i, and β₁ at the prompt's end."""
    start, count = len(trace["prompt_ids"]), len(trace["response_ids"])
    labels = torch.zeros(start + count + extra, len(LABELS))
    mask = torch.zeros(start + count + extra, len(LABELS), dtype=torch.bool)
    labels[start - 1 : start - 1 + count, 1] = trace["overlap"]
    mask[start - 1 : start - 1 + count, 1] = True
    return labels, mask
