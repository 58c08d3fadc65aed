"""Rules that stop when a running statistic of the tokens' scores falls below a level.

One form for the head, the draft's confidence and its entropy; with it, `replay` prices every level in one pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.bounds import check_bounds
from accept_head.inference.policy import DraftStep, RowPolicy, Signal, constant_budget


class ThresholdPolicy(RowPolicy):
    """Stop after Y_k ⇔ the statistic of the scores of Y_1..Y_k is below `level`; never before k_min, always at k_max.
    A token that k_min kept the rule from stopping at is not forgotten: the round then ends at k_min.

    statistic: `product` of scores in [0, 1]; `minimum`; or `gain`: scores are pairs (P̂, β̂), and it is the least
    C_j·β̂_{j+1} of j ≤ k, C_j = Π_{i≤j} P̂_i, the chance that the next token is accepted (docs/theory.md §5). None ever
    rises with k. lag: 1 if Y_k is judged only after Y_{k+1} is drawn. peeks: True if Y_k is judged before it is drawn,
    by what its distribution says; the round then ends before it. reads: what `score` looks at, of the token that is
    judged; `needs` can differ with a lag.
    """

    in_chunks = True
    capture: Capture | None = Capture(carried=("running", "survival", "predicted", "predicted_next"))
    statistic: Literal["product", "minimum", "gain"] = "minimum"
    grid: ClassVar[tuple[float, ...]] = tuple(round(0.05 * step, 2) for step in range(1, 20))  # thresholds to tune over
    lag = 0
    predicts = False  # whether a score is P̂(Y accepted | those before it were)
    by_depth = False  # whether its scores are corrected by depth, or by what it has seen; replay/asking.py prices those
    reads: frozenset[Signal]

    def __init__(self, name: str, threshold: float, k_min: int, k_max: int):
        check_bounds(name, k_min, k_max)
        self.threshold, self.k_min, self.max_draft_tokens = threshold, k_min, k_max
        self.level = self.level_of(threshold)
        self.running = torch.empty(0)  # of this round, (batch,)
        self.survival = torch.empty(0)  # C of this round, (batch,), where the policy predicts_next
        # Of each token judged in this round, (batch,) each: P̂, and β̂ of the token after it.
        self.predicted, self.predicted_next = list[Tensor](), list[Tensor]()

    @property
    def predicts_next(self) -> bool:
        """Whether a score is two numbers, P̂ and β̂, the chance that the token to be drawn after Y is accepted."""
        return self.statistic == "gain"

    @staticmethod
    def level_of(threshold: float) -> float:
        """The level that the statistic must not fall below: the threshold itself, where that is on the same scale."""
        return threshold

    @abstractmethod
    def score(self, step: DraftStep) -> Tensor:
        """Scores of drawn tokens, of the shape of the step's signals; large is good. Elementwise: a token's score does
        not depend on the others'. Two numbers each, (..., 2), where the policy `predicts_next`. step: all that `reads`
        names; `depth` and `active` mean nothing here."""

    def judged(self, step: DraftStep) -> DraftStep | None:
        """The token that can be judged now, with all that `score` reads; None if there is none."""
        return step

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        self.survival, self.running = self.begin(live.shape, live.device)
        if self.predicts:
            self.predicted, self.predicted_next = [], []
        return super().start_round(live)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        token = self.judged(step)
        if token is None:
            return step.active
        self._add(self.score(token))
        return step.active if step.depth < self.k_min else step.active & (self.running >= self.level)

    def _add(self, score: Tensor) -> None:
        if self.predicts_next:
            self.predicted_next.append(score[..., 1])
        if self.predicts:
            self.predicted.append(score[..., 0] if self.predicts_next else score)
        self.survival, self.running = self.follow(self.survival, self.running, score)

    def begin(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(survival, statistic) of rounds that have judged nothing."""
        ones = torch.ones(shape, device=device)
        return ones, ones if self.statistic == "product" else torch.full(shape, float("inf"), device=device)

    def follow(self, survival: Tensor, running: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """(survival, statistic) after one more token, from those before it and its score; (...) each."""
        if self.statistic == "product":
            return survival, running * score
        if self.statistic == "minimum":
            return survival, torch.minimum(running, score)
        survival = survival * score[..., 0]
        return survival, torch.minimum(running, survival * score[..., 1])
