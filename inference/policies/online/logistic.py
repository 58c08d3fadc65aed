"""Stop when the probability that all tokens so far are accepted is small, by a fit to recent verification."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.bounds import check_bounds
from accept_head.inference.policies.online.estimator import AcceptanceEstimator
from accept_head.inference.policies.spec import Tuning, named
from accept_head.inference.policy import DraftStep, RowPolicy, Signal, VerifyOutcome, constant_budget


@named(
    "online-logistic",
    "[THRESHOLD]",
    "vLLM's online estimator of acceptance, stop as a head does",
    tuning=Tuning(param="threshold", values=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
)
class OnlineLogisticPolicy(RowPolicy):
    """Stop after Y_k ⇔ Π_{i≤k} p_i < threshold; never before k_min, always at k_max. p_i come from vLLM's online
    estimator. vLLM trims drafts by them; here they end the drafting.

    p_k is known before Y_k is drawn, yet Y_k is drawn and kept: its draft forward has already run, so dropping it would
    save only its place in the verification.

    Global by design: the estimator is fitted to all rows together and outlives `start`, as vLLM's lives as long as its
    engine. Rows have no state.
    """

    capture = Capture(
        carried=("survival", "predicted", "estimator.features"), read=("estimator.slope", "estimator.intercepts")
    )
    needs, predicts = frozenset({Signal.MAX_PROB}), True

    def __init__(self, threshold: float = 0.5, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"online-logistic threshold is {threshold}, expected a probability from 0 to 1")
        check_bounds("online-logistic", k_min, k_max)
        self.threshold, self.k_min, self.max_draft_tokens = threshold, k_min, k_max
        self.estimator = AcceptanceEstimator(k_max)
        self.survival = torch.empty(0)  # of this round, (batch,)
        self.predicted, self.predicted_next = list[Tensor](), list[Tensor]()

    def forget(self) -> None:
        self.estimator.forget()

    def start(self, batch: int, device: torch.device) -> None:
        self.estimator.start(device)

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        self.estimator.start_round()
        self.survival = torch.ones(live.shape, device=live.device)
        self.predicted = []
        return super().start_round(live)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        self.predicted.append(self.estimator.predict(step))
        self.survival = self.survival * self.predicted[-1]
        return step.active if step.depth < self.k_min else step.active & (self.survival >= self.threshold)

    def observe(self, outcome: VerifyOutcome) -> None:
        self.estimator.observe(outcome)
