"""AdaEDL: stop before drawing when an entropy-based lower bound on acceptance falls below a moving threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.bounds import check_bounds
from accept_head.inference.policies.spec import Tuning, named
from accept_head.inference.policy import DraftStep, RowPolicy, Signal, VerifyOutcome


@named(
    "adaedl",
    "[LAMBDA]",
    "AdaEDL: do not draw where a bound by entropy is below a moving level",
    tuning=Tuning(param="threshold", values=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), by_row=True),
)
class AdaEdlPolicy(RowPolicy):
    """Do not draw Y_k ⇔ 1 − √(γ·H(q_k)) < λ, for k > k_min (arXiv:2410.18351; docs/theory.md §8). λ starts at
    `threshold` and follows the row's own acceptance after every round that drafted:

        AR ← β₁·AR + (1 − β₁)·accepted/drafted
        λ' = λ + ε if AR < α;  else λ if k_max tokens were accepted;  else λ − ε
        λ  ← β₂·λ + (1 − β₂)·λ'

    γ 0.2, β₁ 0.5, β₂ 0.9, ε 0.01, α 0.9, as in the implementations that cite the paper (there is no official one). They
    sweep λ₀ from 0.3 to 0.9. AR starts at α. A row's state restarts with each request.
    """

    needs = frozenset({Signal.ENTROPY})
    capture = Capture(read=("levels",), unread=("rates",))
    GAMMA, BETA_RATE, BETA_LEVEL, STEP, WANTED = 0.2, 0.5, 0.9, 0.01, 0.9

    def __init__(self, threshold: float = 0.6, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"adaedl threshold is {threshold}, expected a number from 0 to 1")
        check_bounds("adaedl", k_min, k_max)
        self.threshold, self.k_min, self.max_draft_tokens = threshold, k_min, k_max

    def start(self, batch: int, device: torch.device) -> None:
        self.levels = torch.full((batch,), self.threshold, device=device)
        self.rates = torch.full((batch,), self.WANTED, device=device)

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.levels[rows], self.rates[rows] = self.threshold, self.WANTED

    def select(self, rows: Tensor) -> None:
        self.levels, self.rates = self.levels[rows], self.rates[rows]

    def draw_next(self, step: DraftStep) -> Tensor:
        if step.depth <= self.k_min:
            return step.active
        assert step.entropy is not None
        bound = 1 - (self.GAMMA * step.entropy.clamp(min=0)).sqrt()
        return step.active & (bound >= self.levels)

    def observe(self, outcome: VerifyOutcome) -> None:
        drafted = outcome.live & (outcome.drafted > 0)
        rate = outcome.accepted / outcome.drafted.clamp(min=1)
        rates = self.BETA_RATE * self.rates + (1 - self.BETA_RATE) * rate
        full = outcome.accepted == self.max_draft_tokens
        change = torch.where(rates < self.WANTED, self.STEP, torch.where(full, 0.0, -self.STEP))
        levels = self.BETA_LEVEL * self.levels + (1 - self.BETA_LEVEL) * (self.levels + change)
        self.rates = torch.where(drafted, rates, self.rates)
        self.levels = torch.where(drafted, levels, self.levels)
