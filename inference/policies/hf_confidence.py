"""transformers' confidence threshold, tuned while decoding with the ROC curve of the tokens verified so far."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.bounds import check_bounds
from accept_head.inference.policies.spec import Tuning, named
from accept_head.inference.policy import DraftStep, RowPolicy, Signal, VerifyOutcome, constant_budget


@named(
    "hf-confidence",
    "[THRESHOLD]",
    "transformers: confidence, its threshold tuned by ROC",
    tuning=Tuning(param="threshold", values=(0.2, 0.4, 0.6)),
)
class HfConfidencePolicy(RowPolicy):
    """Stop after Y_k ⇔ q(Y_k) < θ; Y_k is kept.

    θ starts at `threshold` and is tuned after each round as in transformers 5.19 (generation/candidate_generator.py).
    The samples are (q(Y), accepted) of all judged tokens so far. There must be more than 5, both accepted and rejected:

        fpr, tpr, thresholds = roc_curve(accepted, q);  θ = thresholds[argmin(fpr + 3·(1 − tpr))]

    k_max is `num_assistant_tokens` with the schedule "constant". θ and its samples are global by design: one threshold
    from all rows, kept across requests and calls. transformers documents this, but loses θ at the end of a call.
    window: how many of the newest samples count; transformers keeps all, but only of one request.
    """

    needs = frozenset({Signal.LOGPROB})
    FEWEST = 5  # more samples than this are needed
    MISSED = 3  # cost of not drafting a token that would be accepted, relative to drafting one that is rejected

    def __init__(self, threshold: float = 0.4, *, k_min: int = 1, k_max: int = 20, window: int = 10_000):
        if not 0 < threshold <= 1:
            raise InputError(f"hf-confidence threshold is {threshold}, expected a probability above 0, at most 1")
        if window <= self.FEWEST:
            raise InputError(f"hf-confidence window is {window}, expected more than {self.FEWEST} tokens")
        check_bounds("hf-confidence", k_min, k_max)
        self.threshold, self.k_min, self.max_draft_tokens, self.window = threshold, k_min, k_max, window
        self.probabilities, self.matches = np.empty(0), np.empty(0)  # of judged tokens, the newest last
        self.drawn: list[Tensor] = []  # q(Y_1), q(Y_2), … of this round, (batch,) each

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        self.drawn = []
        return super().start_round(live)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        assert step.logprob is not None
        self.drawn.append(step.logprob.exp())
        return step.active if step.depth < self.k_min else step.active & (self.drawn[-1] >= self.threshold)

    def observe(self, outcome: VerifyOutcome) -> None:
        if not self.drawn:
            return
        q = torch.stack(self.drawn, dim=-1)  # (batch, most drafted)
        slots = torch.arange(q.shape[1], device=q.device)
        judged = (slots < outcome.judged[:, None]) & outcome.live[:, None]  # unknown after a rejection
        accepted = slots < outcome.accepted[:, None]
        # scikit-learn computes the curve on the host: one small transfer a round, after the round's own sync.
        host = torch.stack([q.double(), accepted.double(), judged.double()]).cpu().numpy()
        new = host[2] > 0
        self.probabilities = np.concatenate([self.probabilities, host[0][new]])[-self.window :]
        self.matches = np.concatenate([self.matches, host[1][new]])[-self.window :]
        if new.any() and len(self.matches) > self.FEWEST and 0 < self.matches.sum() < len(self.matches):
            self.threshold = self._best()

    def _best(self) -> float:
        from sklearn.metrics import roc_curve  # slow to import, and only this policy needs it

        false_positives, true_positives, thresholds = roc_curve(self.matches, self.probabilities)
        costs = false_positives + self.MISSED * (1 - true_positives)
        return float(thresholds[np.argmin(costs)])
