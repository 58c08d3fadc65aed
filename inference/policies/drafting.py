"""The bookkeeping of a round: asks the policy and keeps what follows from its answers.

The decode loop, replay, the exact enumeration and vLLM's runners each draft in their own way. All of them ask the
policy through `Drafting`. It tracks which rows still draft, how many tokens each has drafted, and wasted forwards:

    rests = drafting.prepare(live, drafted)         on the host
    progress = drafting.begin(live, room, rests=rests)
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
from accept_head.inference.costs.host import Host
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.policy import BOTH, DraftPolicy, DraftStep, RowPolicy, Signal, Verifier, VerifyOutcome


class DraftProgress(NamedTuple):
    """The progress of each row in a round, (batch,) each. budget: the most tokens the row may draft. active: bool,
    whether it still drafts. lengths: tokens drawn. extra_forwards: draft forwards of the row that drew no token."""

    budget: Tensor
    active: Tensor
    lengths: Tensor
    extra_forwards: Tensor


class Drafting:
    """Asks one policy. The constructor checks once which optional protocols the policy implements.

    constant: the budget is always max_draft_tokens. asks: the policy decides after each token; else a row drafts its
    whole budget. peeks: it also decides before each token. trims: it drops tokens at the end of the round. looks_ahead:
    it judges a token by the draft's state at that token, so the token is fed before the policy is asked. predicts: it
    says how probable acceptance is. learns: it uses the outcome.

    host: what the decode loop spends time on, for a policy that weighs costs; None = as the policy has it. Where a
    policy's costs are LearntCosts, they are learnt here, and bound some rounds to try other lengths. device: the
    device of the policy's tensors, for a host that keeps a round's numbers on the CPU; None = the host's own. agree:
    gives all tensor-parallel ranks the same answer; None with one rank.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        *,
        host: Host | None = None,
        device: torch.device | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ):
        self.policy, self.device, self.agree, kind = policy, device, agree, type(policy)
        costs = getattr(policy, "costs", None)
        self.learnt = costs if isinstance(costs, LearntCosts) else None
        for each in (policy, self.learnt):
            if host is not None and each is not None and hasattr(each, "host"):
                each.host = host
        self.max_draft_tokens, self.needs = policy.max_draft_tokens, policy.needs
        if self.learnt:
            self.needs = self.needs | {Signal.SECONDS}
        self.constant = getattr(policy.start_round, "constant", False)
        self.asks = getattr(kind, "keep_drafting", None) is not RowPolicy.keep_drafting
        self.learns = bool(self.learnt) or getattr(kind, "observe", None) is not RowPolicy.observe
        self.peeks, self.trims = hasattr(policy, "draw_next"), hasattr(policy, "trim")
        self.predicts: bool = getattr(policy, "predicts", False)
        self.plans = hasattr(policy, "plan")
        self.looks_ahead = Signal.DRAWN_HIDDEN in policy.needs
        self.by_tenant: bool = getattr(policy, "by_tenant", False)
        self.lossless: frozenset[Verifier] = getattr(policy, "lossless", BOTH)
        self.may_rest: bool = getattr(policy, "may_rest", False)
        self.idle = 0  # rounds without drafts until now

    @property
    def stops_early(self) -> bool:
        """Whether a row may draft less than its budget."""
        return self.asks or self.peeks

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """A batch of this many rows begins; nothing is known of any."""
        if self.learnt:
            self.learnt.start(device)
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
        """Name the tenants of these rows, (n,) int. Ignored unless the policy is `by_tenant`."""
        if self.by_tenant:
            self.policy.set_tenants(rows, keys)  # type: ignore[attr-defined]

    @property
    def predicted(self) -> list[Tensor]:
        """P̂ of this round's tokens judged so far, (batch,) each; empty for a policy that predicts nothing."""
        return getattr(self.policy, "predicted", [])

    @property
    def predicted_next(self) -> list[Tensor]:
        """β̂ of the token after each; empty for a policy that does not look ahead."""
        return getattr(self.policy, "predicted_next", [])

    # --- a round -----------------------------------------------------------------------------------------------------

    def prepare(self, live: Sequence[bool], drafted: bool) -> bool:
        """Begin a round on the host, outside of captured steps → whether the policy rests: nothing is drafted, and it
        is not told the outcome. The more rounds have had no drafts, the fewer it is asked in, at least every fourth.
        live: rows that take part. drafted: whether any row could draft in the last round."""
        self.idle = 0 if drafted else self.idle + 1
        rests = self.may_rest and self.idle % min(1 + self.idle // 8, 4) > 0
        if self.plans and not rests:
            self.policy.plan(live)  # type: ignore[attr-defined]
        return rests

    def begin(self, live: Tensor, room: Tensor | int, *, rests: bool = False) -> DraftProgress:
        """Start a round. live: (batch,) bool. room: the most tokens the host lets each row draft, (batch,) or one int
        for all. rests: as `prepare` says."""
        if rests:
            none = torch.zeros_like(live, dtype=torch.long)
            return DraftProgress(none, none > 0, none, none)
        answer = self.policy.start_round(self.on_device(live))
        limit = room if isinstance(room, Tensor) else torch.full_like(live, room, dtype=torch.long)
        if self.learnt:
            limit = torch.minimum(limit, self.learnt.limit.to(limit.device))
        if self.constant:
            budget = limit.clamp(0, self.max_draft_tokens) * live
        else:
            budget = torch.minimum(self._checked("start_round", answer, len(live)), limit).clamp(min=0) * live
        return DraftProgress(budget, budget > 0, torch.zeros_like(budget), torch.zeros_like(budget))

    def peek(self, step: DraftStep, progress: DraftProgress) -> DraftProgress:
        """Ask before a token is drawn. A row that stops here has wasted its draft forward."""
        wanted = self._checked("draw_next", self.policy.draw_next(step), len(progress.active))  # type: ignore[attr-defined]
        declined = progress.active & ~wanted
        return progress._replace(active=progress.active & ~declined, extra_forwards=progress.extra_forwards + declined)

    @staticmethod
    def drew(progress: DraftProgress) -> DraftProgress:
        """Count one more token for each active row."""
        lengths = progress.lengths + progress.active
        return progress._replace(active=progress.active & (lengths < progress.budget), lengths=lengths)

    def judge(self, step: DraftStep, progress: DraftProgress) -> DraftProgress:
        """Ask after a token is drawn. If the policy needed that token fed, a row that stops here has wasted one more
        draft forward."""
        wanted = self._checked("keep_drafting", self.policy.keep_drafting(step), len(progress.active))
        active = progress.active & wanted
        extra_forwards = (
            progress.extra_forwards
            if step.drawn_hidden is None
            else progress.extra_forwards + (progress.active & ~active)
        )
        return progress._replace(active=active, extra_forwards=extra_forwards)

    def trim(self, drafted: Tensor) -> Tensor:
        """(batch,) how many tokens of each row to verify. drafted: (batch,) counts."""
        answer = self.policy.trim(self.on_device(drafted))  # type: ignore[attr-defined]
        kept = self._checked("trim", answer, len(drafted))
        return torch.minimum(kept, drafted).clamp(min=0)

    def observe(self, outcome: VerifyOutcome) -> None:
        """The round is verified."""
        self.learn_costs(outcome)
        self.policy.observe(outcome)

    def learn_costs(self, outcome: VerifyOutcome) -> None:
        """The part of `observe` that is the host's."""
        if self.learnt:
            self.learnt.observe(outcome)

    def on_device(self, tensor: Tensor) -> Tensor:
        """The host's tensor on the policy's device."""
        return tensor if self.device is None else tensor.to(self.device)

    def _checked(self, method: str, answer: object, batch: int) -> Tensor:
        """The answer that all ranks agree on, on the host's device. Raises InputError naming policy and method when the
        answer has the wrong type, shape or dtype."""
        dtype, kind = (torch.long, "int64") if method in ("start_round", "trim") else (torch.bool, "bool")
        if isinstance(answer, Tensor) and answer.shape == (batch,) and answer.dtype == dtype:
            agreed = answer if self.agree is None else self.agree(self.on_device(answer))
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
