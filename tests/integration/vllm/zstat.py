"""A test statistic for whether sampled output follows the target. It is standard normal if, and only if, it does.

For a function f of (token, context), the sum over emitted tokens x_t of f(x_t) − E_p[f] is a martingale if each x_t is
drawn from the target's p given the tokens before it. Divided by the root of its summed conditional variances Var_p[f],
it is N(0, 1) (martingale central limit theorem). Mean and variance are exact: p comes from transformers, teacher-forced
on the output. They do not depend on how the output was drafted, nor on a length that depends on earlier tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accept_head.sampling import Sampling

FULL = Sampling(temperature=1.0, top_k=0)


def z_statistics(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    sampling: Sampling = FULL,
) -> dict[str, float]:
    """The statistic for four f: log p, log q, [x is p's most likely token], [x is q's].

    target, draft: transformers models, in float32. prompts, outputs: token ids, one list a request. sampling: what the
    output was sampled with. A token that p excludes makes its statistic infinite.
    """
    sums = torch.zeros(2, len(STATISTICS), dtype=torch.float64)  # deviations, variances
    for prompt, output in zip(prompts, outputs, strict=True):
        p = sampling.probabilities(next_token_logits(target, prompt, output)).double()
        q = FULL.probabilities(next_token_logits(draft, prompt, output)).double()
        tokens = torch.tensor(list(output), dtype=torch.long).unsqueeze(-1)
        for index, statistic in enumerate(STATISTICS.values()):
            deviation, variance = moments(statistic(p, q), p, tokens)
            sums[0, index] += deviation.sum()
            sums[1, index] += variance.sum()
    return dict(zip(STATISTICS, (sums[0] / sums[1].sqrt()).tolist(), strict=True))


def moments(values: Tensor, p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """f(x_t) − E_p[f] and Var_p[f], each (length,). values, p: (length, vocab); tokens: (length, 1)."""
    possible = torch.where(p > 0, values, 0.0)  # 0 · log 0 is 0
    mean = (p * possible).sum(-1)
    variance = (p * (possible - mean.unsqueeze(-1)) ** 2).sum(-1)
    return values.gather(-1, tokens).squeeze(-1) - mean, variance


def _is_argmax(probabilities: Tensor) -> Tensor:
    best = probabilities.argmax(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, best, 1.0)


STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log p": lambda p, q: p.log(),
    "log q": lambda p, q: q.log(),
    "p's best": lambda p, q: _is_argmax(p),
    "q's best": lambda p, q: _is_argmax(q),
}


@torch.inference_mode()
def next_token_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """(len(output), vocab): row t is computed from the prompt and the first t tokens of the output."""
    ids = torch.tensor([[*prompt, *output]])
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


def p_value(statistics: dict[str, float]) -> float:
    """Two-sided, of the largest of the statistics, times their number (Bonferroni): ≤ α happens by chance at most an α
    of the time, however they depend on each other."""
    return min(1.0, len(statistics) * math.erfc(max(map(abs, statistics.values())) / math.sqrt(2)))
