"""How a token is drawn: temperature, top-k, top-p, min-p. Both models always get the same processing.

Everywhere in this package `p` (target) and `q` (draft) are the distributions *after* this processing, because tokens
are sampled from these. The warpers are transformers' own, so generation, scoring and decoding stay equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from accept_head.errors import InputError

BLOCK = 512  # ids whose probabilities are summed up for a draw
LIKELIEST = (256, 4096)  # numbers of tokens that top-p looks at before it sorts all


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings.

    temperature: 0 means greedy: the distribution is one-hot on the argmax.
    top_k: keep this many most likely tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    min_p: drop tokens less likely than this share of the most likely one; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}, expected a number >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}, expected an integer >= 0 (0 keeps all tokens)")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}, expected a number in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}, expected a number in [0, 1] (0 keeps all tokens)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The processed distribution. logits: (..., vocab), any float dtype → float32 probabilities (..., vocab)."""
        if self.greedy:
            one_hot = torch.zeros_like(logits, dtype=torch.float32)
            return one_hot.scatter_(-1, likeliest(logits).unsqueeze(-1), 1.0)
        return self.filter(logits).softmax(-1)

    def filter(self, logits: Tensor) -> Tensor:
        """Processed float32 logits, −inf where a token is dropped. For temperatures above 0."""
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        scores: Any = logits.float().reshape(-1, logits.shape[-1])  # (rows, vocab), the shape that warpers expect
        no_ids: Any = torch.empty(0, dtype=torch.long, device=logits.device)
        if self.temperature != 1:
            scores = TemperatureLogitsWarper(self.temperature)(no_ids, scores)
        if self.top_k:
            scores = TopKLogitsWarper(self.top_k)(no_ids, scores)
        if self.top_p < 1:
            few = _top_p_of_few(scores, self.top_p) if scores.device.type == "cpu" else None
            scores = TopPLogitsWarper(self.top_p)(no_ids, scores) if few is None else few
        if self.min_p:
            scores = MinPLogitsWarper(self.min_p)(no_ids, scores)
        return scores.view(logits.shape)

    def signal_probabilities(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """The distribution that draft signals describe: the processed one, or the plain softmax when greedy."""
        return logits.float().softmax(-1) if self.greedy else probabilities


def likeliest(logits: Tensor) -> Tensor:
    """The first id with the largest logit. logits: (..., vocab) → (...). On a CPU torch's argmax takes five times as
    long for bfloat16."""
    return logits.max(-1).indices


def _top_p_of_few(scores: Tensor, top_p: float) -> Tensor | None:
    """Top-p without sorting the whole vocabulary, which takes 7 ms for 152k ids on a CPU. Looks at the likeliest tokens
    only. None when they do not reach the mass in every row. scores: (rows, vocab), float32."""
    probabilities = scores.softmax(-1)
    for count in LIKELIEST:
        if count >= scores.shape[-1]:
            return None
        mass, ids = probabilities.topk(count)
        before = mass.cumsum(-1) - mass  # of likelier tokens
        kept = before < top_p
        if not kept[:, -1].any():  # rows are on a CPU, so this waits for nothing
            dropped = torch.full_like(scores, -torch.inf)
            return dropped.scatter_(-1, ids, torch.where(kept, scores.gather(-1, ids), -torch.inf))
    return None


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw. probabilities: (..., vocab), need not be normalised; uniform: (...) in [0, 1) → ids (...).

    Sums are in float64. The result always has positive probability: rounding at the upper end cannot select a token
    that was filtered out.
    """
    return draw_several(probabilities, uniform.unsqueeze(-1)).squeeze(-1)


def draw_several(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Several draws from each distribution: uniforms (..., draws) → ids (..., draws).

    First a block of ids is drawn by the blocks' sums, then an id in it: cumulative sums of the whole vocabulary would
    take longer than all else that is done with a distribution.
    """
    vocab = probabilities.shape[-1]
    whole = vocab // BLOCK * BLOCK
    parts = probabilities[..., :whole].unflatten(-1, (-1, BLOCK)), probabilities[..., None, whole:]
    sums = torch.cat([part.sum(-1, dtype=torch.float64) for part in parts], dim=-1).cumsum(-1)
    point = uniforms.to(sums.dtype) * sums[..., -1:]
    block = _first_above(sums, point)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    ids = block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=block.device)  # (..., draws, BLOCK)
    inside = probabilities.unsqueeze(-2).expand(*block.shape, vocab).gather(-1, ids.clamp(max=vocab - 1))
    within = torch.where(ids < vocab, inside, 0.0).double().cumsum(-1)
    return block * BLOCK + _first_above(within, (point - before).unsqueeze(-1)).squeeze(-1)


def _first_above(cumulative: Tensor, points: Tensor) -> Tensor:
    """The first place whose cumulative sum is above the point, (..., points). At most the last that adds to the sum."""
    last = (cumulative < cumulative[..., -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, points, right=True), last)
