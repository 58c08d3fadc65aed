"""SpecDec++: stop when the predicted chance that some drafted token is already rejected passes a threshold."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.head import AcceptanceHead
from accept_head.inference.policies.bounds import check_bounds
from accept_head.inference.policy import OF_Q, DraftStep, RowPolicy, Signal


class HeadPolicy(RowPolicy):
    """Stop after Y_k ⇔ 1 − Π_i P̂(Y_i accepted) > threshold (SpecDec++ §4.2-4.3), never before k_min, always at k_max.

    A head that reads the state *at* a drawn token can be read in two ways:

    lag=0, the paper's algorithm: Y_k is fed before it is judged, and the product runs to Y_k. Each stop that the head
    decides costs a draft forward whose proposal is not drawn.
    lag=1, the authors' code: the forward that yields Y_{k+1} is the one that yields the state at Y_k, so Y_{k+1} is
    drawn already, at no cost, when "stop" is known, and is submitted too. The product runs to the last token but one,
    and a round drafts at least two.

    The default is 1: by eq. 3.1 it is 1.08 to 1.16 x as fast (benchmarks/results/head_lag.json). A head that reads the
    state *before* a drawn token judges it at once and at no cost; it has no lag.
    """

    scores: Literal["prefix", "proposal"] = "proposal"

    def __init__(
        self, head: AcceptanceHead, threshold: float, *, k_min: int = 1, k_max: int = 20, lag: int | None = None
    ):
        if not 0 <= threshold <= 1:
            raise InputError(f"head threshold is {threshold}, expected a probability from 0 to 1")
        check_bounds("head", k_min, k_max)
        head.index_of("token")  # refuses a head that does not predict it
        before = head.config.reads == "before"
        if lag not in ((None, 0) if before else (None, 0, 1)):
            raise InputError(
                f"head lag is {lag}, expected {'0: it reads the state before a token' if before else '0 or 1'}"
            )
        self.head, self.threshold, self.k_min, self.max_draft_tokens = head, threshold, k_min, k_max
        self.lag = lag if lag is not None else 0 if before else 1
        self.reads_drawn = self.lag == 0 and not before
        self.needs = frozenset({Signal.DRAWN_HIDDEN if self.reads_drawn else Signal.FED_HIDDEN})
        if head.config.signals:
            self.needs |= OF_Q
        # Of this round: the predicted chance that all judged tokens are accepted, and the last token's signals.
        self.survival = torch.empty(0)
        self.signals: Tensor | None = None

    def start_round(self, live: Tensor) -> Tensor:
        self.survival = torch.ones(live.shape, device=live.device)
        return super().start_round(live)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        hidden = step.drawn_hidden if self.reads_drawn else step.fed_hidden
        earlier, self.signals = self.signals, self._signals_of(step)
        signals = self.signals if self.lag == 0 else earlier
        if hidden is None or (self.lag == 1 and step.depth == 1):
            return (
                step.active
            )  # the round's end; or the state at hand belongs to a verified token, not to a drafted one
        self.survival = self.survival * self.head.probability(hidden, signals=signals)
        stop = (1 - self.survival > self.threshold) & (step.depth >= self.k_min)
        return step.active & ~stop

    def _signals_of(self, step: DraftStep) -> Tensor | None:
        """(batch, 3) in the order of signals.SIGNALS, if the head reads any."""
        if not self.head.config.signals:
            return None
        assert step.logprob is not None and step.entropy is not None and step.max_prob is not None
        return torch.stack([step.logprob, step.entropy, step.max_prob], dim=-1)
