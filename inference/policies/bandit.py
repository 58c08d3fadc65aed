"""BanditSpec: draft lengths are the arms of a bandit, tokens per second its reward."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.spec import Tuning, integer, named
from accept_head.inference.policy import RowPolicy, Signal, VerifyOutcome


@named(
    "bandit",
    "[ARMS]",
    "BanditSpec: upper confidence bounds over K = 1 to ARMS on tokens/s",
    integer,
    # 8.4 % slower than the best arm after 1,000 rounds at the authors' constant, 0.5 % at 0.01 (simulated).
    tuning=Tuning(param="exploration", values=(0.01, 0.1, 1.0, 6.0), argument="6"),
)
class BanditPolicy(RowPolicy):
    """UCB over the draft lengths 1..arms, one arm a round for all rows (arXiv:2505.15141; docs/theory.md §8). Rounds
    t < passes·arms take the arms in turn, as in the release (7 rounds for 4 arms); then

        arm = argmax mean / top + √(exploration·ln t / n),  t = 1 + rounds so far,  n = rounds of that arm

    mean: tokens/s of the arm's rounds, redrawn and bonus tokens included. top: the most tokens/s of any round; dividing
    by it brings rewards to 0..1, the scale of the bonus. shared_bonus: n counts the rounds of all arms, as in the
    release. The bonus is then the same for every arm, so the best mean so far is played for ever.

    zero_arm: 0, the target alone, is an arm too. A round does not count if no row could draft as many tokens as the arm
    wants, as at the ends of responses. Global by design: the reward is the batch's. The counts outlive `start`.
    """

    needs = frozenset({Signal.SECONDS})
    capture = Capture(carried=("arm",), read=("counts", "sums", "top"))

    def __init__(
        self,
        arms: int = 4,
        *,
        passes: int = 2,
        exploration: float = 6.0,
        zero_arm: bool = False,
        shared_bonus: bool = False,
    ):
        if arms < 1:
            raise InputError(f"bandit arms is {arms}, expected a positive integer")
        if passes < 2:
            raise InputError(f"bandit passes is {passes}, expected 2 or more: each arm must have been played")
        if not 0 <= exploration < float("inf"):
            raise InputError(f"bandit exploration is {exploration}, expected a number, 0 or more")
        self.passes, self.exploration, self.shared_bonus = passes, exploration, shared_bonus
        self.shortest = 0 if zero_arm else 1
        self.max_draft_tokens = arms
        self.forget()

    def forget(self) -> None:
        # Per arm: number of rounds, and the sum of their tokens/s.
        self.counts, self.sums = torch.zeros(2, self.max_draft_tokens + 1 - self.shortest)
        self.top = torch.zeros(())

    def start(self, batch: int, device: torch.device) -> None:
        """Keeps what was learnt."""
        self.counts, self.sums, self.top = self.counts.to(device), self.sums.to(device), self.top.to(device)
        self.arm = torch.zeros((), dtype=torch.long, device=device)  # index of this round's arm

    def start_round(self, live: Tensor) -> Tensor:
        arms, played = len(self.counts), self.counts.sum()
        n = played if self.shared_bonus else self.counts
        bonus = (self.exploration * (played + 1).log() / n).sqrt()
        means = self.sums / self.counts.clamp(min=1) / self.top
        in_turn = (played % arms).long()
        self.arm = torch.where(played + 1 < self.passes * arms, in_turn, (means + bonus).argmax())
        return (self.arm + self.shortest).expand(live.shape)

    def observe(self, outcome: VerifyOutcome) -> None:
        assert outcome.seconds is not None
        tokens = ((outcome.accepted + 1) * outcome.live).sum()
        counted = (outcome.drafted * outcome.live).max() == self.arm + self.shortest
        reward = tokens / outcome.seconds * counted
        this = torch.arange(len(self.counts), device=reward.device) == self.arm
        self.counts, self.sums = self.counts + this * counted, self.sums + this * reward
        self.top = torch.maximum(self.top, reward)
