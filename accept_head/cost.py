"""The cost of a policy: SpecDec++ eqs 3.1, 3.2 and 5.1, the oracle (theorem 4.1), speed-up and share of the gap closed.

The two rates do not depend on the hardware; the two forward times do not depend on the policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from accept_head.errors import InputError

Number = TypeVar("Number", float, np.ndarray)
Quantity = Any  # a number or a tensor of them


@dataclass(frozen=True, kw_only=True)
class ForwardCosts:
    """Seconds of one forward pass: the draft on one token, the target on one verification.

    t_autoregressive: the target on one token when it decodes alone. This can be a little less than a verification
    (paper, table 2: 0.108 s against 0.112 s). Speed-ups are relative to it. Equal to t_target when left out.
    """

    t_draft: float
    t_target: float
    t_autoregressive: float = 0.0

    def __post_init__(self) -> None:
        if not self.t_autoregressive:
            object.__setattr__(self, "t_autoregressive", self.t_target)
        for name in ("t_draft", "t_target", "t_autoregressive"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}, expected a positive number of seconds")

    @property
    def ratio(self) -> float:
        """c = t_draft / t_target."""
        return self.t_draft / self.t_target


@dataclass(frozen=True, kw_only=True)
class BatchForwardCost:
    """One model's forward: t = α·(context tokens) + β·(batch tokens) + γ (AdaSpec eq. 2), both summed over the rows.

    alpha, beta: seconds a token. gamma: seconds. r_squared: of the fit.
    """

    alpha: float
    beta: float
    gamma: float
    r_squared: float

    def seconds(self, *, context_tokens: Quantity, batch_tokens: Quantity) -> Quantity:
        return self.alpha * context_tokens + self.beta * batch_tokens + self.gamma


@dataclass(frozen=True, kw_only=True)
class PairCosts:
    """Predicted cost of both models' forwards for any number of rows. Arguments may be numbers or tensors."""

    draft: BatchForwardCost
    target: BatchForwardCost

    @classmethod
    def constant(cls, costs: ForwardCosts) -> PairCosts:
        """The costs of one row, for forwards of any size."""
        draft, target = (
            BatchForwardCost(alpha=0.0, beta=0.0, gamma=seconds, r_squared=1.0)
            for seconds in (costs.t_draft, costs.t_target)
        )
        return cls(draft=draft, target=target)

    @property
    def coefficients(self) -> list[list[float]]:
        """α, β and γ of a draft step, of the first one of a round, of the target, and of the target in a round without
        drafts; and the part of the target's β that goes by whole blocks of tokens."""
        draft, target = ([each.alpha, each.beta, each.gamma] for each in (self.draft, self.target))
        return [draft, draft, target, target, [0.0, 0.0, 0.0]]

    def draft_seconds(self, rows: Quantity, context_tokens: Quantity, steps: Quantity = 1) -> Quantity:
        """Seconds of so many draft steps in one round, one token per row each. context_tokens: sum over all rows."""
        return steps * self.draft.seconds(context_tokens=context_tokens, batch_tokens=rows)

    def verify_seconds(self, batch_tokens: Quantity, context_tokens: Quantity) -> Quantity:
        """Seconds of one target forward. batch_tokens, context_tokens: sums over all rows."""
        return self.target.seconds(context_tokens=context_tokens, batch_tokens=batch_tokens)

    def plain_seconds(self, rows: Quantity, context_tokens: Quantity) -> Quantity:
        """Seconds of one target forward in a round without drafts."""
        alpha, beta, gamma = self.coefficients[3]
        return alpha * context_tokens + beta * rows + gamma

    def forget(self) -> None:
        """Measured costs stay."""


@dataclass(frozen=True, kw_only=True)
class DecodeCounts:
    """Counts summed over one or many responses. Rates come from the sums, so counts of several responses can be added.

    generated: tokens emitted (N). discarded: drafted tokens that were not accepted (N_discarded).
    target_forwards: verifications (N_target). draft_forwards: draft steps (N_draft).
    """

    generated: float
    discarded: float
    target_forwards: float
    draft_forwards: float

    def __add__(self, other: DecodeCounts) -> DecodeCounts:
        return DecodeCounts(
            generated=self.generated + other.generated,
            discarded=self.discarded + other.discarded,
            target_forwards=self.target_forwards + other.target_forwards,
            draft_forwards=self.draft_forwards + other.draft_forwards,
        )

    @staticmethod
    def total(counts: Iterable[DecodeCounts]) -> DecodeCounts:
        zero = DecodeCounts(generated=0, discarded=0, target_forwards=0, draft_forwards=0)
        return sum(counts, start=zero)

    @property
    def discard_rate(self) -> float:
        """N_discarded / N."""
        return self.discarded / self.generated

    @property
    def verification_rate(self) -> float:
        """N_target / N."""
        return self.target_forwards / self.generated

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target forward, the bonus or redrawn token included."""
        return self.generated / self.target_forwards


def total_time(costs: ForwardCosts, *, draft_forwards: Number, target_forwards: Number) -> Number:
    """T = t_draft·N_draft + t_target·N_target, seconds (eq. 3.1)."""
    return costs.t_draft * draft_forwards + costs.t_target * target_forwards


def time_per_token(costs: ForwardCosts, *, discard_rate: Number, verification_rate: Number) -> Number:
    """T/N = t_draft + t_draft·(discard rate) + (t_target − t_draft)·(verification rate), seconds (eq. 5.1).

    It holds when each drafted token costs one draft forward: N_draft = N + N_discarded − N_target.
    """
    return costs.t_draft * (1 + discard_rate) + (costs.t_target - costs.t_draft) * verification_rate


def throughput(costs: ForwardCosts, *, discard_rate: float, verification_rate: float) -> float:
    """Tokens per second by eq. 5.1."""
    return 1 / time_per_token(costs, discard_rate=discard_rate, verification_rate=verification_rate)


def speedup(costs: ForwardCosts, *, discard_rate: float, verification_rate: float) -> float:
    """Throughput by eq. 5.1 relative to the target decoding alone."""
    return throughput(costs, discard_rate=discard_rate, verification_rate=verification_rate) * costs.t_autoregressive


def oracle_counts(*, generated: int, rejections: int) -> DecodeCounts:
    """Theorem 4.1: stopping just before each rejected proposal discards nothing and needs |S| + 1 target forwards.

    rejections: |S|, counted over all positions except the last. A response's last token comes with the last
    verification, whether or not its proposal would have been rejected.
    """
    target_forwards = min(rejections + 1, generated)
    return DecodeCounts(
        generated=generated,
        discarded=0,
        target_forwards=target_forwards,
        draft_forwards=max(0, generated - target_forwards),
    )


def oracle_gap_closed(policy: Number, best_fixed: Number, oracle: Number) -> Number:
    """(thr(policy) − thr(best fixed K)) / (thr(oracle) − thr(best fixed K)), for throughputs or arrays of them.

    0 where the oracle is not faster: there is no gap to close.
    """
    gap = np.asarray(oracle) - best_fixed
    share = np.where(gap == 0, 0.0, (policy - best_fixed) / np.where(gap == 0, 1.0, gap))
    return share if isinstance(policy, np.ndarray) else float(share)
