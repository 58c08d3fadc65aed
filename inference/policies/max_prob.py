"""Stop when the draft's largest probability is low."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.spec import named
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, RowPolicy, Signal


@named("max-prob", "[THRESHOLD]", "Kangaroo, p-min: stop after a token where max q was less")
class MaxProbPolicy(ThresholdPolicy):
    """Stop after Y_k ⇔ max q_k < threshold, row by row; Y_k is kept.

    Kangaroo has threshold 0.6 and at most 6 tokens. llama.cpp's p-min has 0.75, over the ten best tokens; it drops Y_k,
    which greedy drafts allow.
    """

    needs = reads = frozenset({Signal.MAX_PROB})

    def __init__(self, threshold: float = 0.6, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"max-prob threshold is {threshold}, expected a probability from 0 to 1")
        super().__init__("max-prob", threshold, k_min, k_max)

    def score(self, step: DraftStep) -> Tensor:
        assert step.max_prob is not None
        return step.max_prob


@named("max-prob-mean", "[THRESHOLD]", "vLLM's RFC: stop all rows when their mean max q is less")
class MeanMaxProbPolicy(RowPolicy):
    """Stop all rows ⇔ the mean of max q over the rows still drafting < threshold (vLLM's Dynamic Speculation Length
    RFC, which has 0.4 to 0.6). Global by design: a row's draft length depends on the other rows."""

    needs = frozenset({Signal.MAX_PROB})

    def __init__(self, threshold: float = 0.4, *, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"max-prob-mean threshold is {threshold}, expected a probability from 0 to 1")
        if k_max < 1:
            raise InputError(f"max-prob-mean k_max is {k_max}, expected a positive integer")
        self.threshold, self.max_draft_tokens = threshold, k_max

    def keep_drafting(self, step: DraftStep) -> Tensor:
        assert step.max_prob is not None
        total = torch.where(step.active, step.max_prob, 0.0).sum()
        return step.active & (total >= self.threshold * step.active.sum())
