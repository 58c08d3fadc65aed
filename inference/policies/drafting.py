"""How a policy is asked: a round's bookkeeping, in one place.

The decode loop, replay, the exact enumeration and vLLM's runners each draft in their own way. Each of them asks its
policy through `Drafting`, which knows who drafts on, how much every row has drafted and what was drafted in vain:

    progress = drafting.begin(live, room)
    for each token:
        progress = drafting.peek(step, progress)       if drafting.peeks, before the token is drawn
        progress = drafting.drew(progress)             the token is drawn
        progress = drafting.judge(step, progress)      if drafting.asks
    submitted = drafting.trim(progress.lengths)     if drafting.trims
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policy import BOTH, DraftPolicy, DraftStep, RowPolicy, Signal, Verifier


class DraftProgress(NamedTuple):
    """How far the rows of a round are, (batch,) each. budget: most tokens that a row may draft. active: bool, whether
    it drafts on. lengths: tokens that it drew. extra_forwards: draft forwards that it took part in without drawing."""

    budget: Tensor
    active: Tensor
    lengths: Tensor
    extra_forwards: Tensor


class Drafting:
    """Asks one policy. What the policy has besides the interface is looked for here, once.

    constant: the budget is always max_draft_tokens. asks: the policy is asked after each token; else a row drafts its
    budget. peeks: it is asked before each token, too. trims: it drops tokens in the end. looks_ahead: it judges a token
    by the draft's state at it, so the token is fed before the policy is asked. learns: it wants to hear the outcome.

    device: where the policy's tensors are, for a host that keeps a round's numbers on the CPU; None = with the host's.
    agree: makes all tensor-parallel ranks have the same answer; None with one rank.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        *,
        device: torch.device | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ):
        self.policy, self.device, self.agree, kind = policy, device, agree, type(policy)
        self.max_draft_tokens, self.needs = policy.max_draft_tokens, policy.needs
        self.constant = getattr(policy.start_round, "constant", False)
        self.asks = getattr(kind, "keep_drafting", None) is not RowPolicy.keep_drafting
        self.learns = getattr(kind, "observe", None) is not RowPolicy.observe
        self.peeks, self.trims = hasattr(policy, "draw_next"), hasattr(policy, "trim")
        self.looks_ahead = Signal.DRAWN_HIDDEN in policy.needs
        self.by_tenant: bool = getattr(policy, "by_tenant", False)
        self.in_chunks: bool = getattr(policy, "in_chunks", False)
        self.lossless: frozenset[Verifier] = getattr(policy, "lossless", BOTH)

    @property
    def stops_early(self) -> bool:
        """Whether a row may draft less than its budget."""
        return self.asks or self.peeks

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """A batch of this many rows begins; nothing is known of any."""
        if hasattr(self.policy, "start"):
            self.policy.start(batch, device)

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        """These rows, (n,) int, hold new prompts of (n,) tokens."""
        if hasattr(self.policy, "admit"):
            self.policy.admit(rows, lengths)

    def select(self, rows: Tensor) -> None:
        """From now on row i is what row rows[i] was."""
        if hasattr(self.policy, "select"):
            self.policy.select(rows)

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        """Whose these rows, (n,) int, are; for a policy that goes by it."""
        if self.by_tenant:
            self.policy.set_tenants(rows, keys)  # type: ignore[attr-defined]

    @property
    def predicted(self) -> list[Tensor]:
        """P̂ of this round's tokens judged so far, (batch,) each; none of a policy that predicts nothing."""
        return getattr(self.policy, "predicted", [])

    @property
    def predicted_next(self) -> list[Tensor]:
        """β̂ of the token after each, if the policy looks so far."""
        return getattr(self.policy, "predicted_next", [])

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(self, live: Tensor, room: Tensor | int) -> DraftProgress:
        """live: (batch,) bool. room: most tokens that the host lets each row draft, (batch,) or one for all."""
        answer = self.policy.start_round(self.there(live))
        limit = room if isinstance(room, Tensor) else torch.full_like(live, room, dtype=torch.long)
        if self.constant:
            budget = limit.clamp(0, self.max_draft_tokens) * live
        else:
            budget = torch.minimum(self._checked("start_round", answer, len(live)), limit).clamp(min=0) * live
        return DraftProgress(budget, budget > 0, torch.zeros_like(budget), torch.zeros_like(budget))

    def peek(self, step: DraftStep, progress: DraftProgress) -> DraftProgress:
        """Before a token is drawn. A row that declines has had its draft forward for nothing."""
        wanted = self._checked("draw_next", self.policy.draw_next(step), len(progress.active))  # type: ignore[attr-defined]
        declined = progress.active & ~wanted
        return progress._replace(active=progress.active & ~declined, extra_forwards=progress.extra_forwards + declined)

    @staticmethod
    def drew(progress: DraftProgress) -> DraftProgress:
        """Each active row has drawn one more token."""
        lengths = progress.lengths + progress.active
        return progress._replace(active=progress.active & (lengths < progress.budget), lengths=lengths)

    def judge(self, step: DraftStep, progress: DraftProgress) -> DraftProgress:
        """After a token is drawn. Where it was fed for the policy to judge it, a row that stops has had one more draft
        forward for nothing."""
        wanted = self._checked("keep_drafting", self.policy.keep_drafting(step), len(progress.active))
        active = progress.active & wanted
        extra_forwards = (
            progress.extra_forwards
            if step.drawn_hidden is None
            else progress.extra_forwards + (progress.active & ~active)
        )
        return progress._replace(active=active, extra_forwards=extra_forwards)

    def trim(self, drafted: Tensor) -> Tensor:
        """(batch,) how many of the (batch,) drafted tokens to verify."""
        answer = self.policy.trim(self.there(drafted))  # type: ignore[attr-defined]
        kept = self._checked("trim", answer, len(drafted))
        return torch.minimum(kept, drafted).clamp(min=0)

    def there(self, tensor: Tensor) -> Tensor:
        """A tensor of the host's, where the policy's are."""
        return tensor if self.device is None else tensor.to(self.device)

    def _checked(self, method: str, answer: object, batch: int) -> Tensor:
        """What all ranks answer, where the host keeps its numbers. Raises InputError naming policy and method for an
        answer that is not as the interface asks for."""
        dtype, kind = (torch.long, "int64") if method in ("start_round", "trim") else (torch.bool, "bool")
        if isinstance(answer, Tensor) and answer.shape == (batch,) and answer.dtype == dtype:
            agreed = answer if self.agree is None else self.agree(self.there(answer))
            return agreed if self.device is None else agreed.cpu()
        got = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        name = type(self.policy).__name__
        raise InputError(f"policy {name}: {method} returned {got}, expected a {kind} tensor ({batch},)")


def check_lossless(policy: DraftPolicy, verifier: Verifier, *, greedy: bool, allow_lossy: bool = False) -> None:
    """Raises InputError when the verifier is unknown, or when output sampled with it would not be the target's."""
    if verifier not in BOTH:
        raise InputError(f"verifier is {verifier!r}, expected one of {sorted(BOTH)}")
    lossless: frozenset[Verifier] = getattr(policy, "lossless", BOTH)
    if not (greedy or allow_lossy or verifier in lossless):
        others = " or ".join(f"verifier={name!r}" for name in sorted(lossless)) or "greedy decoding"
        raise InputError(
            f"policy {type(policy).__name__} drops drawn tokens by what was drawn: sampled output would not be the "
            f"target's under the {verifier} test; use {others}, or allow_lossy if that is wanted"
        )
