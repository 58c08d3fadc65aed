"""A head for vLLM's adaptive verification, which trims drafts before verification and schedules asynchronously.

vLLM models the acceptance of draft slot k as σ(ω·f + β_k), f = logit(max q). While it serves, it refits ω and β to the
accepted tokens by damped Newton steps. Here f is the head's logit, so the fit recalibrates the head at no extra cost.
It starts at ω = 1, β = 0, where the prediction is the head's own.

Trimming drops drawn tokens, so the score of a slot must not depend on the token drawn there. The head must read the
state before that token, and log q(Y) must not be among its signals (build.head_of).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

from accept_head.inference.policies.reader import draft_distribution
from accept_head.signals import draft_entropy, draft_max_prob

MOST_LOG_ODDS = 40.0  # as vLLM's


class HeadAcceptanceEstimator(OnlineAcceptanceEstimator):
    """vLLM's estimator with the head's logit as its feature. The fit is vLLM's own (`step`)."""

    def __init__(self, head: nn.Module, max_num_reqs: int, num_speculative_steps: int, device: torch.device):
        super().__init__(max_num_reqs, num_speculative_steps, device)
        self.head: Any = head
        self.slope.fill_(1.0)
        self.intercepts.zero_()

    def predict_by_head(
        self,
        hidden: Tensor,
        logits: Tensor,
        temperature: Tensor,
        idx_mapping: Tensor,
        draft_step: Tensor,
        confidence: Tensor,
    ) -> None:
        """Predict the acceptance of a slot. hidden: (batch, hidden) that `logits`, (batch, vocab), came from.
        temperature: by request slot. idx_mapping: (batch,) request slots. draft_step: () int. confidence:
        (requests, steps), written at [:batch, step]."""
        signals = None
        if self.head.config.signals:
            q = draft_distribution(logits, temperature[idx_mapping])
            # This head does not read log q(Y) (head_of), so its place may hold anything.
            entropy, max_prob = draft_entropy(q), draft_max_prob(q)
            signals = torch.stack([torch.zeros_like(entropy), entropy, max_prob], dim=-1)
        logit = self.head(hidden, signals)[..., self.head.index_of("token")].float()
        feature = logit.clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
        step = draft_step.view(1).long()  # a tensor, as a plain index would make the host wait for its value
        probability = torch.sigmoid(self.slope * feature + self.intercepts.index_select(0, step))
        places = idx_mapping.long(), step.expand(len(hidden))
        self.features.index_put_(places, feature)
        self.predictions.index_put_(places, probability)
        confidence[: len(hidden)].index_copy_(1, step, probability[:, None])
