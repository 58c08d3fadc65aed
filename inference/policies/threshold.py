"""Rules that stop when a running statistic of the tokens' scores falls below a level.

The head, the draft's confidence and its entropy share this form, so that `replay` prices all levels in one pass.
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
    If the statistic falls below the level before k_min, the round ends at k_min.

    statistic: `product`, of scores in [0, 1]; `minimum`; or `gain`. With `gain` a score is a pair (P̂, β̂). The
    statistic is then the least C_j·β̂_{j+1} of j ≤ k, where C_j = Π_{i≤j} P̂_i. C_j·β̂_{j+1} is the probability that the
    next token is accepted (docs/theory.md §5). No statistic rises with k.

    lag: 1 if Y_k is judged only after Y_{k+1} is drawn. reads: the signals that `score` reads of the judged token; with
    a lag, `needs` can differ.
    """

    capture: Capture | None = Capture(carried=("running", "survival", "predicted", "predicted_next"))
    statistic: Literal["product", "minimum", "gain"] = "minimum"
    grid: ClassVar[tuple[float, ...]] = tuple(round(0.05 * step, 2) for step in range(1, 20))  # for `tune`
    lag = 0
    predicts = False  # whether a score is P̂(Y accepted | those before it were)
    by_depth = False  # whether scores are corrected by depth, or by what was learnt; replay/asking.py prices those
    reads: frozenset[Signal]

    def __init__(self, name: str, threshold: float, k_min: int, k_max: int):
        check_bounds(name, k_min, k_max)
        self.threshold, self.k_min, self.max_draft_tokens = threshold, k_min, k_max
        self.level = self.level_of(threshold)
        self.running = torch.empty(0)  # of this round, (batch,)
        self.survival = torch.empty(0)  # C of this round, (batch,), where the policy predicts_next
        # P̂ of each token judged in this round, and β̂ of the token after it, (batch,) each.
        self.predicted, self.predicted_next = list[Tensor](), list[Tensor]()

    @property
    def predicts_next(self) -> bool:
        """Whether a score is two numbers: P̂, and β̂, the probability that the token drawn after Y is accepted."""
        return self.statistic == "gain"

    @staticmethod
    def level_of(threshold: float) -> float:
        """The level that the statistic must not fall below. By default it is the threshold itself."""
        return threshold

    @abstractmethod
    def score(self, step: DraftStep) -> Tensor:
        """Scores of drawn tokens, in the shape of the step's signals; (..., 2) if the policy `predicts_next`. A larger
        score is better. Elementwise: a token's score does not depend on other tokens. step: has the signals in `reads`;
        `depth` and `active` mean nothing here."""

    def judged(self, step: DraftStep) -> DraftStep | None:
        """The token that can be judged now, with the signals in `reads`; None if there is none."""
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
        if self.predicts:
            accepted, *following = score.unbind(-1) if self.predicts_next else [score]
            self.predicted.append(accepted)
            self.predicted_next += following
        self.survival, self.running = self.follow(self.survival, self.running, score)

    def begin(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(survival, statistic) before any token of a round is judged."""
        ones = torch.ones(shape, device=device)
        return ones, ones if self.statistic == "product" else torch.full(shape, float("inf"), device=device)

    def follow(self, survival: Tensor, running: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """(survival, statistic) after one more token, (...) each. survival, running: their values before the token."""
        if self.statistic == "product":
            return survival, running * score
        if self.statistic == "minimum":
            return survival, torch.minimum(running, score)
        accepted, following = score.unbind(-1)
        survival = survival * accepted
        return survival, torch.minimum(running, survival * following)
