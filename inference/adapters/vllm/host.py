"""A policy in a draft loop that is not ours: it is told of each forward and says when to end the round.

    begin → (advance → [the engine draws] → drawn) for each draft forward → end;   the next `begin` brings the verdict

What is decided is what our own loop (decode.py) decides from the same numbers: a drawn token is kept, and the round
ends after it. Rows are requests; they come, go and change places between rounds, and the policy's state follows them.

Losslessness: a row stops after a token that it keeps, or before one is drawn, by what its distribution says (`peeks`,
where the token may have been drawn by the engine already: the decision does not look at it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.stopwatch import Stopwatch
from accept_head.inference.policy import OF_Q, DraftPolicy, DraftStep, Signal, VerifyOutcome, check_lossless, checked
from accept_head.signals import draft_entropy, draft_logprob, draft_max_prob

# What a host that does not show its target's logits can give.
KNOWN = OF_Q | {Signal.FED_HIDDEN, Signal.DRAWN_HIDDEN, Signal.SECONDS}


class EndOfRound(Exception):
    """Raised in the host's draft loop to leave it; never leaves the adapter."""


class Verdict(NamedTuple):
    """What the target said of the last round, in the order of the rows *now*. submitted, accepted: (batch,) int."""

    submitted: Tensor
    accepted: Tensor


class PolicyHost:
    """policy: what decides. rows: most requests at once. limit: most tokens a round. greedy: drafts are argmax, which
    makes every rule lossless. agree: makes all tensor-parallel ranks have the same (batch,) bool; None with one rank.
    metrics: where rounds are counted; None = nowhere.

    Raises InputError when the policy needs what a host like this does not know, or would bias sampled output.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        *,
        rows: int,
        limit: int,
        device: torch.device,
        greedy: bool,
        agree: Callable[[Tensor], Tensor] | None = None,
        metrics: DraftMetrics | None = None,
    ):
        if unknown := policy.needs - KNOWN:
            names = ", ".join(sorted(signal.name for signal in unknown))
            raise InputError(f"policy {type(policy).__name__} needs {names}, which vLLM does not give")
        check_lossless(policy, "ratio", greedy=greedy)
        self.policy, self.limit, self.agree, self.metrics = policy, limit, agree, metrics
        self.reads_q = bool(policy.needs & OF_Q)
        self.judges_late = Signal.DRAWN_HIDDEN in policy.needs  # by the state at the drawn token itself
        self.stopwatch = Stopwatch(device)
        self.requests: list[str] = []  # of the last round, in its order
        self.budget = self.lengths = self.submitted = self.context = torch.zeros(0, dtype=torch.long, device=device)
        self.live = self.active = torch.zeros(0, dtype=torch.bool, device=device)
        self.most = self.depth = self.forwards = 0
        self.pending: DraftStep | None = None
        self.began = time.perf_counter()
        policy.start(rows, device)

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(
        self, requests: Sequence[str], live: Tensor, lengths: Tensor, limit: int, verdict: Verdict | None = None
    ) -> int:
        """→ most tokens that any row will draft, at most `limit`; 0 = none, and then `advance` ends the round.

        requests: who the rows are. live: (batch,) bool; what the others draft is thrown away. lengths: (batch,) tokens
        of each row now. verdict: on the last round's drafts; None if none was verified.
        """
        with self.stopwatch.timing():
            self._observe(requests, lengths, verdict)
            self._follow(requests, lengths)
            policy = self.policy
            budget = checked(policy, "start_round", policy.start_round(live), len(live))
        self.context = lengths  # of the rows as this round finds them
        self.live, self.budget = live, budget.clamp(min=0, max=min(limit, self.limit)) * live
        self.active = self._agreed(self.budget > 0)
        self.lengths = self.submitted = torch.zeros_like(self.budget)
        self.depth = self.forwards = 0
        self.pending = None
        # One of the two places where the host waits for the device: it launches the forwards.
        self.most = int(self._agreed(self.budget).max())
        return self.most

    def advance(self, hidden: Tensor) -> bool:
        """A forward is done; is another token to be drawn from it? hidden: (batch, hidden) at the token fed last."""
        self.forwards += 1
        if self.pending is not None:
            step, self.pending = replace(self.pending, drawn_hidden=hidden), None
            self._ask(step)
        self.hidden = hidden
        return self.depth < self.most and self._any_active()

    def drawn(self, token_ids: Tensor, q: Tensor | None) -> bool:
        """A token was drawn for each row; is there to be another forward? token_ids: (batch,). q: (batch, vocab), what
        they were drawn from, or the plain softmax where the draft is greedy; only if `reads_q`.

        A row's token belongs to its draft if it was active; `lengths` tells.
        """
        self.depth += 1
        step = self._step(token_ids, q)
        if self.policy.peeks:
            with self.stopwatch.timing():
                wanted = self.policy.draw_next(replace(step, token_ids=None, logprob=None))
            self.active = self._agreed(self.active & checked(self.policy, "draw_next", wanted, len(self.active)))
        self.lengths = self.lengths + self.active
        self.active = self.active & (self.lengths < self.budget)
        if self.judges_late:
            self.pending = replace(step, active=self.active)
        elif self.policy.stops_early:
            self._ask(replace(step, active=self.active))
        return self.depth < self.most and self._any_active()

    def end(self) -> Tensor:
        """(batch,) int, the drafted tokens of each row that are to be verified."""
        self.forwards = max(self.forwards, 1)  # even without a draft, what was accepted is fed
        self.submitted = self.lengths
        if self.policy.trims:
            with self.stopwatch.timing():
                wanted = checked(self.policy, "trim", self.policy.trim(self.lengths), len(self.lengths))
            self.submitted = torch.minimum(self._agreed(wanted), self.lengths)
        return self.submitted

    # --- inside it ---------------------------------------------------------------------------------------------------

    def _step(self, token_ids: Tensor, q: Tensor | None) -> DraftStep:
        needs = self.policy.needs
        q = q if q is not None else torch.empty(0)
        return DraftStep(
            depth=self.depth,
            token_ids=token_ids,
            active=self.active,
            fed_hidden=self.hidden if Signal.FED_HIDDEN in needs else None,
            logprob=draft_logprob(q, token_ids.long()) if Signal.LOGPROB in needs else None,
            entropy=draft_entropy(q) if Signal.ENTROPY in needs else None,
            max_prob=draft_max_prob(q) if Signal.MAX_PROB in needs else None,
        )

    def _ask(self, step: DraftStep) -> None:
        with self.stopwatch.timing():
            wanted = checked(self.policy, "keep_drafting", self.policy.keep_drafting(step), len(self.active))
        self.active = self._agreed(self.active & wanted)

    def _any_active(self) -> bool:
        """The other place where the host waits for the device, once a token, and only if the policy can stop early:
        whether any row goes on decides whether there is another forward."""
        return not self.policy.stops_early or bool(self.active.any())

    def _agreed(self, answer: Tensor) -> Tensor:
        return answer if self.agree is None else self.agree(answer)

    # --- between rounds ----------------------------------------------------------------------------------------------

    def _observe(self, requests: Sequence[str], lengths: Tensor, verdict: Verdict | None) -> None:
        """Tell the policy of the last round, in that round's order of rows."""
        began, self.began = self.began, time.perf_counter()
        if not self.requests:
            return
        if verdict is None:
            verdict = Verdict(torch.zeros_like(lengths), torch.zeros_like(lengths))
        (submitted, accepted), live = verdict, self.live
        if requests != self.requests:
            index = _positions(self.requests, requests, lengths.device)
            live, index = live & (index >= 0), index.clamp(min=0)
            submitted, accepted, lengths = submitted[index], accepted[index], lengths[index]
        # When one request is too near the end of the context to draft, vLLM verifies zeros instead for all. What is
        # said of those is not said of our drafts, whose own verdict never comes.
        live = live & (lengths == self.context + accepted + 1)
        submitted = torch.minimum(submitted.long(), self.submitted)
        outcome = VerifyOutcome(
            drafted=self.lengths,
            accepted=torch.minimum(accepted.long(), submitted),
            live=live,
            lengths=lengths,
            seconds=self.began - began,
            submitted=submitted,
        )
        if self.metrics is not None:
            stopped = self.live & (self.lengths < self.budget)
            seconds = self.stopwatch.take()
            self.metrics.record(outcome, list(self.policy.predicted), self.forwards, stopped, seconds)
        self.policy.observe(outcome)

    def _follow(self, requests: Sequence[str], lengths: Tensor) -> None:
        """Bring the policy's rows into the order of the requests; what it knew of those that are gone is forgotten."""
        if requests == self.requests:
            return
        index = _positions(requests, self.requests, lengths.device)
        new = (index < 0).nonzero()[:, 0]
        self.policy.select(index.clamp(min=0))
        self.policy.admit(new, lengths[new])
        self.requests = list(requests)  # the engine changes its own


def _positions(names: Sequence[str], among: Sequence[str], device: torch.device) -> Tensor:
    """(names,) int, where each is; −1 if it is not there."""
    where = {name: position for position, name in enumerate(among)}
    return torch.tensor([where.get(name, -1) for name in names], dtype=torch.long, device=device)
