"""SpecDec++: stop when the predicted chance that some drafted token is already rejected passes a threshold."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.head import AcceptanceHead
from accept_head.inference.policy import DraftStep, Signal, VerifyOutcome


class HeadPolicy:
    """Stop after Y_k ⇔ 1 − Π_i P̂(Y_i accepted) > threshold (SpecDec++ §4.2-4.3), never before k_min, always at k_max.

    A head that reads the state *at* a drawn token is read one token late, as in the authors' code: the forward that
    yields Y_{k+1} is the one that yields the hidden state at Y_k, so Y_{k+1} is drawn already, at no cost, when
    "stop" is known, and is submitted too. The product therefore runs to the last token but one, and a round drafts
    at least two. A head that reads the state *before* a drawn token judges it at once: the product runs to the last
    token.
    """

    scores: Literal["prefix", "proposal"] = "proposal"

    def __init__(self, head: AcceptanceHead, threshold: float, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"head threshold is {threshold}, expected a probability from 0 to 1")
        if not 1 <= k_min <= k_max:
            raise InputError(f"head bounds are k_min {k_min} and k_max {k_max}, expected 1 <= k_min <= k_max")
        head.index_of("token")  # refuses a head that does not predict it
        self.head, self.threshold, self.k_min, self.max_draft_tokens = head, threshold, k_min, k_max
        self.needs = frozenset({Signal.HIDDEN, *([Signal.DRAFT_SIGNALS] if head.config.signals else [])})
        self.survival = torch.empty(0)

    def start_round(self, live: Tensor) -> Tensor:
        self.survival = torch.ones(live.shape, device=live.device)
        return torch.full_like(live, self.max_draft_tokens, dtype=torch.long)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        assert step.fed_hidden is not None
        if self.head.config.reads == "before":
            self.survival = self.survival * self.head.probability(step.fed_hidden, signals=step.signals)
        elif step.depth > 1:  # at depth 1 the state at hand belongs to a verified token, not to a drafted one
            self.survival = self.survival * self.head.probability(step.fed_hidden, signals=step.fed_signals)
        else:
            return step.active
        stop = (1 - self.survival > self.threshold) & (step.depth >= self.k_min)
        return step.active & ~stop

    def observe(self, outcome: VerifyOutcome) -> None:
        pass
