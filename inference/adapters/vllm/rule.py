"""A ThresholdPolicy's decisions, worked out on the host; alone, or within a BatchStopPolicy, which works there anyway.

Its scores are a number or two a row, and the host waits once a token anyway to hear who goes on. To read the scores
instead of the answer, and to compare a few numbers here, saves the five operations a token that the policy's own
tensors take, each dearer to start than to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import Struct

import torch
from torch import Tensor

from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftPolicy, Signal

# What the rule below is a copy of: a policy that does any of it in another way decides by itself.
SAME = ("keep_drafting", "draw_next", "begin", "follow", "_add", "select", "admit", "observe", "trim")
FLOAT32 = Struct("f")


class HostRule:
    """What the policy's `keep_drafting` says, from the same numbers by the same operations in the same order, and
    rounded alike: the decisions are the same, bit by bit."""

    def __init__(self, policy: ThresholdPolicy):
        self.policy, self.level = policy, float(torch.tensor(policy.level, dtype=torch.float32))
        self.predicted: list[list[float]] = []  # of this round, the rows' P̂ a depth, where the policy predicts
        self.running: list[float] = []  # statistic of this round, a row
        self.survival: list[float] = []
        self.following: list[float] | None = None  # β̂ of the next token, where the policy looks ahead

    @classmethod
    def of(cls, policy: DraftPolicy) -> HostRule | None:
        """None if the policy's decisions are not those of a plain ThresholdPolicy that judges each token at once."""
        kind = type(policy)
        if not isinstance(policy, ThresholdPolicy) or policy.peeks or policy.trims or policy.lag:
            return None
        if Signal.DRAWN_HIDDEN in policy.needs or any(
            getattr(kind, n) is not getattr(ThresholdPolicy, n) for n in SAME
        ):
            return None
        plain = kind.start_round in (ThresholdPolicy.start_round, HeadPolicy.start_round)
        return cls(policy) if plain else None

    def start(self, live: Sequence[bool]) -> list[int]:
        """A round begins: most tokens of each row."""
        rows = len(live)
        self.predicted, self.survival, self.following = [], [1.0] * rows, None
        self.running = [1.0 if self.policy.statistic == "product" else math.inf] * rows
        return [self.policy.max_draft_tokens] * rows

    def keep(self, depth: int, score: Tensor, active: Sequence[bool]) -> list[bool]:
        """Which of the active rows go on after Y_depth. score: (rows,), or (rows, 2) of a policy that looks ahead; the
        host waits for it."""
        scores = score.tolist()
        if self.policy.predicts_next:
            token, self.following = ([pair[place] for pair in scores] for place in (0, 1))
            self.survival = [_product(s, p) for s, p in zip(self.survival, token, strict=True)]
            scores = [_product(s, p) for s, p in zip(self.survival, self.following, strict=True)]
        else:
            token = scores
        if self.policy.predicts:
            self.predicted.append(token)
        follow = _product if self.policy.statistic == "product" else _least
        self.running = [follow(before, now) for before, now in zip(self.running, scores, strict=True)]
        early = depth < self.policy.k_min
        return [a and (early or value >= self.level) for a, value in zip(active, self.running, strict=True)]


class HostBatchRule(HostRule):
    """The same within a BatchStopPolicy."""

    def __init__(self, batch: BatchStopPolicy, policy: ThresholdPolicy):
        super().__init__(policy)
        self.batch = batch

    def start(self, live: Sequence[bool]) -> list[int]:
        budget = super().start(live)
        longest = self.batch.longest(live, budget)
        return [min(tokens, longest) for tokens in budget]

    def keep(self, depth: int, score: Tensor, active: Sequence[bool]) -> list[bool]:
        wanting = super().keep(depth, score, active)
        judged = self.predicted[-1:] if self.policy.predicts else []
        return self.batch.narrow(depth, wanting, judged, self.following)


def rule_of(policy: DraftPolicy) -> HostRule | None:
    """None for a policy that decides by itself."""
    if type(policy) is BatchStopPolicy:
        inner = HostRule.of(policy.policy)
        return None if inner is None else HostBatchRule(policy, inner.policy)
    return HostRule.of(policy)


def _product(one: float, other: float) -> float:
    """Of two float32, probabilities: exact as a double, hence rounded once, as a float32's own."""
    product: float = FLOAT32.unpack(FLOAT32.pack(one * other))[0]
    return product


def _least(one: float, other: float) -> float:
    """No number if either is none."""
    return other if other < one or other != other else one
