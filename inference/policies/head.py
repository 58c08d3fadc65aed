"""SpecDec++: stop when the predicted probability that some drafted token is rejected passes a threshold.

A head that looks ahead can use the probability that the next token, not yet drawn, is rejected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head.origin import HeadOrigin
from accept_head.head.scorer import Score
from accept_head.head_config import HeadConfig
from accept_head.inference.engine.capture import Capture
from accept_head.inference.kernels.head import scorer_of
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import OF_Q, DraftStep, Signal, constant_budget

Rule = Literal["product", "gain"]


def checked_rule(rule: str | None, config: HeadConfig) -> Rule:
    """The rule; None = the head's default. Raises InputError when it is unknown, or `gain` for a head without β̂."""
    if rule is None:
        return "gain" if config.looks_ahead else "product"
    if rule not in ("product", "gain"):
        raise InputError(f"head rule is {rule!r}, expected product or gain")
    if rule == "gain" and not config.looks_ahead:
        raise InputError(
            "head rule is gain, which takes a head that predicts both; and, if it reads the state before a token, one "
            "that is told which token was drawn"
        )
    return "gain" if rule == "gain" else "product"


class HeadPolicy(ThresholdPolicy):
    """Stop after Y_k ⇔ 1 − Π_i P̂(Y_i accepted) > threshold (SpecDec++ §4.2-4.3), never before k_min, always at k_max.

    rule: `product`, as above, or `gain`. Let C_k be that product and β̂_{k+1} the head's prediction for the next token.
    `gain` stops ⇔ 1 − C_k·β̂_{k+1} > threshold: the probability that one more token is rejected (docs/theory.md §5).
    The default is `gain` for heads that look ahead and `product` for all others, which have no β̂.

    A head that reads the state *at* a drawn token can be used in two ways:

    lag=0, the paper's algorithm: Y_k is fed before it is judged, and the product runs to Y_k. Each stop of the head
    wastes a draft forward, from which no token is drawn.
    lag=1, the authors' code: the forward that gives the state at Y_k also gives Y_{k+1}. So Y_{k+1} is already drawn
    when the head says stop, at no cost, and is submitted too. The product runs to the last token but one, and a round
    drafts at least two.

    The default is 1: by eq. 3.1 it is 1.08 to 1.16 x as fast (benchmarks/results/head_lag.json). A head that reads the
    state *before* a drawn token judges the token at once and at no cost, so it has no lag. A base alone reads no state
    and has no lag either.
    """

    predicts = True
    capture: Capture | None = Capture(carried=("running", "survival", "predicted", "predicted_next", "earlier"))
    origin: HeadOrigin | None = None  # what the head was trained for, when it came from a folder

    def __init__(
        self,
        head: AcceptanceHead,
        threshold: float,
        *,
        k_min: int = 1,
        k_max: int = 20,
        lag: int | None = None,
        rule: Rule | None = None,
    ):
        if not 0 <= threshold <= 1:
            raise InputError(f"head threshold is {threshold}, expected a probability from 0 to 1")
        super().__init__("head", threshold, k_min, k_max)
        self.statistic = checked_rule(rule, head.config)
        self.probability = self._scorer(head)  # raises InputError for a head that does not predict it
        before = head.config.reads == "before"
        if lag not in ((None, 0) if before else (None, 0, 1)):
            raise InputError(
                f"head lag is {lag}, expected {'0: it reads the state before a token' if before else '0 or 1'}"
            )
        self.head = head
        self.lag = lag if lag is not None else 0 if before else 1
        self.reads = self.needs = OF_Q if head.config.signals else frozenset()
        if head.config.residual:
            self.reads |= {Signal.FED_HIDDEN if before else Signal.DRAWN_HIDDEN}
            # With a lag, the state at the token before is the one that this token was drawn from.
            self.needs |= {Signal.DRAWN_HIDDEN if self.lag == 0 and not before else Signal.FED_HIDDEN}
        self.earlier: DraftStep | None = None

    def _scorer(self, head: AcceptanceHead) -> Score:
        return scorer_of(head, "both" if self.predicts_next else "token")

    def start(self, batch: int, device: torch.device) -> None:
        """Raises InputError when the head is on another device. It cannot be moved: its weights are already folded."""
        there = self.head.device
        if (there.type, there.index or 0) != (device.type, device.index or 0):
            raise InputError(
                f"the head is on {there}, but the models are on {device}; give load_head(device=...), or call its "
                "to(...) before the policy is made"
            )

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        self.earlier = None
        return super().start_round(live)

    @staticmethod
    def level_of(threshold: float) -> float:
        return 1 - threshold

    def score(self, step: DraftStep) -> Tensor:
        """P̂(Y accepted), (...); P̂ and β̂ with the rule `gain`, (..., 2)."""
        if step.scored is not None:
            return step.scored
        hidden = step.fed_hidden if self.head.config.reads == "before" else step.drawn_hidden
        return self.probability(hidden, self._signals_of(step), step.token_ids)

    def judged(self, step: DraftStep) -> DraftStep | None:
        if self.lag == 0:
            # Nothing depends on the judgement of the last possible token, so the host does not compute its state.
            return None if Signal.DRAWN_HIDDEN in self.needs and step.drawn_hidden is None else step
        earlier, self.earlier = self.earlier, step
        # At depth 1 the state at hand belongs to a verified token, not to a drafted one.
        return None if step.depth == 1 or earlier is None else replace(earlier, drawn_hidden=step.fed_hidden)

    def _signals_of(self, step: DraftStep) -> Tensor | None:
        """(..., 3) in the order of signals.SIGNALS; None if the head reads none."""
        if not self.head.config.signals:
            return None
        if step.signals is not None:
            return step.signals
        assert step.logprob is not None and step.entropy is not None and step.max_prob is not None
        return torch.stack([step.logprob, step.entropy, step.max_prob], dim=-1)
