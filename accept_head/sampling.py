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

    def generation_kwargs(self) -> dict[str, Any]:
        """The same settings as keyword arguments of transformers' `generate`."""
        if self.greedy:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p or None,
        }

    def probabilities(self, logits: Tensor) -> Tensor:
        """The processed distribution. logits: (..., vocab), any float dtype → float32 probabilities (..., vocab)."""
        if self.greedy:
            one_hot = torch.zeros_like(logits, dtype=torch.float32)
            return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
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
            scores = TopPLogitsWarper(self.top_p)(no_ids, scores)
        if self.min_p:
            scores = MinPLogitsWarper(self.min_p)(no_ids, scores)
        return scores.view(logits.shape)

    def signal_probabilities(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """The distribution that draft signals describe: the processed one, or the plain softmax when greedy."""
        return logits.float().softmax(-1) if self.greedy else probabilities


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw. probabilities: (..., vocab), need not be normalised; uniform: (...) in [0, 1) → ids (...).

    Sums are in float64. The result always has positive probability: rounding at the upper end cannot select a token
    that was filtered out.
    """
    return draw_several(probabilities, uniform.unsqueeze(-1)).squeeze(-1)


def draw_several(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Several draws from each distribution: uniforms (..., draws) → ids (..., draws)."""
    cumulative = probabilities.double().cumsum(-1)
    threshold = uniforms.to(cumulative.dtype) * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)
    last_positive = (cumulative < cumulative[..., -1:]).sum(-1, keepdim=True)
    return torch.minimum(index, last_positive)
