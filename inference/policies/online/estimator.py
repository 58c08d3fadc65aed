"""Estimates the acceptance probability of a drafted token from max q and its depth, fitted online to verification."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accept_head.inference.policies.online.newton_sums import arrowhead_slopes
from accept_head.inference.policy import DraftStep, VerifyOutcome

MOST_LOG_ODDS = 40.0  # they are infinite for a distribution with all mass on one token


class AcceptanceEstimator:
    """p_k = σ(ω·f + β_k) for the k-th token of a round, f = logit(max q) (vLLM's OnlineAcceptanceEstimator;
    docs/theory.md §8). f scores the distribution, not the token drawn from it: p_k is known before the draw.

    Every 100 rounds it takes one Newton step on the log-likelihood of the tokens judged since the last step. Accepted
    tokens have the label 1, the first rejected one 0. Tokens after it, or not verified, are censored. The ridge is
    1e-3. The slope's step is damped by n / (n + 50) with n the number of all labels; each intercept's step with the
    number of labels at its depth. A step that would make the slope negative is not taken. Then the sums restart.

    Global by design: one slope and k_max intercepts for all rows and requests, as long as the object lives. There is no
    sync here. Two differences to vLLM: max q is of the processed distribution (top-k and top-p too), in float32, so
    that logits from about 16 on become 40; sums are in float64 if the device has it.
    """

    SLOPE, INTERCEPT = 0.5, -0.2  # at the start: medians over the models that vLLM's authors fitted
    INTERVAL, DAMPING, RIDGE = 100, 50.0, 1e-3

    def __init__(self, k_max: int):
        self.k_max = k_max
        self.forget()

    def forget(self) -> None:
        """Reset to the initial state."""
        k_max = self.k_max
        self.slope = torch.tensor(self.SLOPE, dtype=torch.float64)
        self.intercepts = torch.full((k_max,), self.INTERCEPT, dtype=torch.float64)  # of depths 1..k_max
        # Sums since the last step, a row per depth: w·f², w·f, w, residual·f, residual, labels; w = p·(1 − p).
        self.sums = torch.zeros(k_max, 6, dtype=torch.float64)
        self.rounds = 0
        self.features: list[Tensor] = []  # of this round, (batch,) per depth
        # Rounds not yet in the sums: features (batch, depths); live, judged and accepted, (batch,) each.
        self.pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def start(self, device: torch.device) -> None:
        """Move to this device. Keeps what was learnt."""
        self._sum()
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.slope, self.intercepts, self.sums = (
            tensor.to(device, dtype) for tensor in (self.slope, self.intercepts, self.sums)
        )
        self.features = []

    def start_round(self) -> None:
        self.features = []

    def predict(self, step: DraftStep) -> Tensor:
        """(batch,) float32, P(Y_depth accepted | those before it are). Call once a depth, in order, with MAX_PROB."""
        assert step.max_prob is not None and step.depth == len(self.features) + 1
        feature = torch.logit(step.max_prob.float().clamp(0, 1)).clamp(-MOST_LOG_ODDS, MOST_LOG_ODDS)
        self.features.append(feature)
        return torch.sigmoid(self.slope * feature + self.intercepts[step.depth - 1]).float()

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from the round whose tokens were predicted last."""
        if self.features:
            # Copies: the host may overwrite its tensors in the next round.
            kept = outcome.live.clone(), outcome.judged, outcome.accepted.clone()
            self.pending.append((torch.stack(self.features, dim=1), *kept))
        self.features = []
        self.rounds += 1
        if self.rounds % self.INTERVAL == 0:
            self._sum()
            self._step()

    def _sum(self) -> None:
        """Add the pending rounds to the sums. Slope and intercepts did not change in them, so all are added at once.
        Adding each round alone would take thirty small operations a round."""
        if not self.pending:
            return
        features, *rows = zip(*self.pending, strict=True)
        self.pending = []
        deepest = max(feature.shape[1] for feature in features)
        padded = [nn.functional.pad(each, (0, deepest - each.shape[1]), value=torch.nan) for each in features]
        live, judged, accepted = (torch.cat(parts) for parts in rows)
        self._add(torch.cat(padded), live, judged, accepted)

    def _add(self, feature: Tensor, live: Tensor, judged: Tensor, accepted: Tensor) -> None:
        """Add rounds to the sums. feature: (rows, depths), NaN for no token. live, judged, accepted: (rows,), of
        VerifyOutcome."""
        depths = torch.arange(feature.shape[1], device=feature.device)
        # Idle rows may hold NaN.
        counts = live[:, None] & (depths < judged[:, None]) & ~feature.isnan()
        label = (depths < accepted[:, None]).to(self.sums.dtype)
        f = torch.where(counts, feature, 0.0).to(self.sums.dtype)
        p = torch.sigmoid(self.slope * f + self.intercepts[: f.shape[1]])
        w, residual = p * (1 - p), label - p
        parts = torch.stack([w * f * f, w * f, w, residual * f, residual, torch.ones_like(p)], dim=-1)
        more = (parts * counts[..., None]).sum(0)
        self.sums = self.sums + nn.functional.pad(more, (0, 0, 0, len(self.sums) - len(more)))

    def _step(self) -> None:
        """Solve (XᵀWX + ridge)·Δ = Xᵀ(label − p) for Δ = (Δω, Δβ_1, …)."""
        ff, f_one, one, residual_f, residual, labels = self.sums.unbind(-1)
        one = one + self.RIDGE
        gram = (ff.sum() + self.RIDGE).view(1, 1)
        slope = arrowhead_slopes(gram, f_one[:, None], one, residual_f.sum()[None], residual)[0]
        slope = slope * labels.sum() / (labels.sum() + self.DAMPING)
        slope = torch.where(self.slope + slope >= 0, slope, 0.0)  # not taken either if NaN
        intercepts = (residual - f_one * slope) / one * labels / (labels + self.DAMPING)
        self.slope = self.slope + slope
        self.intercepts = self.intercepts + torch.nan_to_num(intercepts)
        self.sums = torch.zeros_like(self.sums)
