"""From scores to probabilities, and a draw from them: top-k, softmax and draws in five kernels.

In torch, top-k alone takes a dozen kernels. A softmax or sum of one row is one program, while the rest of the GPU
waits. Together this takes nearly a tenth of a 1B draft's forward, for each token. The kernels split every row.

Kept tokens and draws equal those of `accept_head.sampling` up to rounding. As there, probabilities are float32, and
draws use their sums in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head import sampling as in_torch
from accept_head.inference.kernels.launch import counters, dense, power_of_two, triton_kernels
from accept_head.inference.kernels.signals import logits_signals_by_kernel
from accept_head.inference.kernels.usable import Check, usable
from accept_head.sampling import Sampling

GROUP, PART, LARGE_PART = 256, 1024, 4096  # tokens of a group, which gives one maximum, and of a program
MOST_KEPT = 64  # largest top-k for the kernels; fewer groups than this have a logit above the bound
MOST_CANDIDATES = MOST_KEPT * GROUP
FEW_ROWS = 16


def probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """`sampling.probabilities(scores)`. scores: (..., vocab) → float32, the same shape."""
    served = not sampling.greedy and sampling.top_p == 1 and not sampling.min_p and sampling.top_k <= MOST_KEPT
    if served and scores.numel() and usable(scores, CHECK):
        return probabilities_by_kernels(scores, sampling)
    return sampling.probabilities(scores)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """`accept_head.sampling.draw`. weights: (..., vocab); uniform: (...) → ids (...)."""
    if weights.numel() and weights.dtype is not torch.float64 and usable(weights, CHECK):
        return draw_by_kernel(weights, uniform)
    return in_torch.draw(weights, uniform)


def probabilities_by_kernels(scores: Tensor, sampling: Sampling) -> Tensor:
    kernels = triton_kernels("sampling")
    logits = dense(scores.reshape(-1, scores.shape[-1]))
    (rows, vocab), device = logits.shape, logits.device
    q = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    cold, k = 1 / sampling.temperature, min(sampling.top_k, vocab)
    kth = top = inverse = largest = signals = q  # kernels need a pointer even if they do not read it
    splits, groups = -(-vocab // PART), PART // GROUP
    with torch.cuda.device_of(logits):
        if k:
            bound, top, kth, inverse = torch.empty(4, rows, dtype=torch.float32, device=device)
            maxima = torch.empty(rows, splits, groups, dtype=torch.float32, device=device)
            candidates = torch.empty(rows, MOST_CANDIDATES, dtype=torch.float32, device=device)
            counts, done = counters(device, 3 * rows)[: 2 * rows], counters(device, 3 * rows)[2 * rows :]
            kernels.lower_bound[(rows, splits)](
                logits, maxima, bound, top, done, vocab, logits.stride(0), k,
                GROUPS=groups, BLOCK=PART, ALL=power_of_two(splits * groups),
            )  # fmt: skip
            kernels.kth_largest[(rows, splits)](
                logits, bound, top, candidates, counts, done, kth, inverse, vocab, logits.stride(0), cold, k,
                BLOCK=PART, MOST=MOST_CANDIDATES,
            )  # fmt: skip
        else:
            temperature = torch.full((rows,), sampling.temperature, device=device)
            signals, _, largest = logits_signals_by_kernel(logits, None, temperature)
        kernels.write_softmax[(rows, splits)](
            logits, kth, top, inverse, largest, signals, q, vocab, logits.stride(0), cold,
            FILTERED=bool(k), BLOCK=PART,
        )  # fmt: skip
    return q.view(scores.shape)


def draw_by_kernel(weights: Tensor, uniform: Tensor) -> Tensor:
    rows = dense(weights.reshape(-1, weights.shape[-1]))
    numbers = uniform.double().reshape(-1)
    (count, vocab), device = rows.shape, rows.device
    part = PART if count <= FEW_ROWS else LARGE_PART
    splits = -(-vocab // part)
    sums = torch.empty(count, splits, dtype=torch.float64, device=device)
    ids = torch.empty(count, dtype=torch.int64, device=device)
    with torch.cuda.device_of(rows):
        triton_kernels("sampling").draw_tokens[(count, splits)](
            rows, numbers, sums, counters(device, count), ids, vocab, rows.stride(0), numbers.stride(0),
            BLOCK=part, SPLITS=power_of_two(splits),
        )  # fmt: skip
    return ids.view(uniform.shape)


def compare(device: torch.device, vocab: int = 3 * PART + 7, rows: int = 3) -> None:
    """Raises AssertionError when the kernels and torch differ.

    Inputs: many equal numbers, negative numbers, and more or fewer than k numbers above the bound.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(rows, generator=generator, dtype=torch.float64).to(device)
    normal = torch.randn(rows, vocab, generator=generator) * 3
    for scores in (normal.to(device), normal.sub(40).to(device), normal.round().to(device, torch.bfloat16)):
        for top_k in (0, 5, 20):
            sampling = Sampling(temperature=0.7, top_k=top_k)
            found, expected = probabilities_by_kernels(scores, sampling), sampling.probabilities(scores)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(found > 0, expected > 0, rtol=0, atol=0)
            drawn = draw_by_kernel(expected, numbers)
            torch.testing.assert_close(drawn, in_torch.draw(expected, numbers), rtol=0, atol=0)


CHECK = Check("sampling", compare)
