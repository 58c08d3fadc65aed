"""Leviathan et al.: the draft length that is best if all tokens have the same acceptance probability."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.spec import Tuning, cost_ratio, named
from accept_head.inference.policy import RowPolicy, VerifyOutcome


@named(
    "leviathan",
    "C|COSTS",
    "the best K for independent tokens, acceptance measured online",
    cost_ratio,
    tuning=Tuning(param="cost_ratio", values=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5), by_row=True),
)
class LeviathanPolicy(RowPolicy):
    """Draft γ* tokens (arXiv:2211.17192, theorem 3.8; docs/theory.md §8; γ = 0 is no drafting):

        γ*(α, c) = argmax over γ = 0..k_max of (1 − α^(γ+1)) / ((1 − α)·(1 + γ·c))

    c, `cost_ratio`: seconds of a draft forward over those of a target forward. α: the probability that a token is
    accepted. The paper measures α beforehand; here each row measures its own, as accepted / judged tokens of its
    request. The counts start with `prior` tokens of which a share `rate` was accepted, so α starts at `rate`.

    A row with α ≤ c drafts nothing and so learns nothing. After `probe` such rounds it drafts one token, unless c ≥ 1:
    then no α makes drafting worth its time. A row's state restarts with each request.
    """

    capture = Capture(read=("accepted", "judged", "idle", "costs"))

    def __init__(self, cost_ratio: float, *, rate: float = 0.7, prior: float = 5.0, probe: int = 16, k_max: int = 20):
        if not 0 < cost_ratio < float("inf"):
            raise InputError(f"leviathan cost_ratio is {cost_ratio}, expected a positive number")
        if not 0 <= rate <= 1:
            raise InputError(f"leviathan rate is {rate}, expected a probability from 0 to 1")
        if not 0 < prior < float("inf"):
            raise InputError(f"leviathan prior is {prior}, expected a positive number of tokens")
        for name, value in (("probe", probe), ("k_max", k_max)):
            if value < 1:
                raise InputError(f"leviathan {name} is {value}, expected a positive integer")
        self.cost_ratio, self.rate, self.prior, self.probe = cost_ratio, rate, prior, probe
        self.max_draft_tokens = k_max

    def start(self, batch: int, device: torch.device) -> None:
        self.accepted = torch.full((batch,), self.rate * self.prior, device=device)
        self.judged = torch.full((batch,), self.prior, device=device)
        self.idle = torch.zeros(batch, dtype=torch.long, device=device)  # rounds since the row drafted
        self.costs = 1 + self.cost_ratio * torch.arange(self.max_draft_tokens + 1, device=device)  # of γ = 0..k_max

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.accepted[rows], self.judged[rows], self.idle[rows] = self.rate * self.prior, self.prior, 0

    def select(self, rows: Tensor) -> None:
        self.accepted, self.judged, self.idle = self.accepted[rows], self.judged[rows], self.idle[rows]

    def start_round(self, live: Tensor) -> Tensor:
        alpha = self.accepted / self.judged
        powers = alpha[:, None] ** torch.arange(len(self.costs), device=live.device)
        tokens = powers.cumsum(-1)  # Σ α^i, i = 0..γ: avoids the formula's division by 0 at α = 1
        best = (tokens / self.costs).argmax(-1)
        if self.cost_ratio >= 1:
            return best
        return torch.where((best == 0) & (self.idle >= self.probe), 1, best)

    def observe(self, outcome: VerifyOutcome) -> None:
        live = outcome.live
        self.accepted = self.accepted + outcome.accepted * live
        self.judged = self.judged + outcome.judged * live
        self.idle = torch.where(live & (outcome.drafted == 0), self.idle + 1, torch.where(live, 0, self.idle))
