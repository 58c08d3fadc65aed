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
from accept_head.inference.adapters.vllm.reader import Distribution, SignalReader
from accept_head.inference.adapters.vllm.stopwatch import Stopwatch
from accept_head.inference.policy import OF_Q, DraftPolicy, DraftStep, Signal, VerifyOutcome, check_lossless, checked

# What a host that does not show its target's logits can give.
KNOWN = OF_Q | {Signal.FED_HIDDEN, Signal.DRAWN_HIDDEN, Signal.SECONDS}
NOTHING = Distribution()


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
        self.reader = SignalReader(policy.needs)
        self.reads_q, self.reads_fed = bool(policy.needs & OF_Q), Signal.FED_HIDDEN in policy.needs
        self.judges_late = Signal.DRAWN_HIDDEN in policy.needs  # by the state at the drawn token itself
        self.asks = policy.stops_early or policy.peeks  # else each row drafts its budget
        self.stopwatch = Stopwatch(device)
        self.requests: list[str] = []  # of the last round, in its order
        self.budget = self.lengths = self.submitted = self.context = torch.zeros(0, dtype=torch.long, device=device)
        self.live = self.active = torch.zeros(0, dtype=torch.bool, device=device)
        self.least = self.most = self.depth = self.forwards = 0
        self.drew: list[Tensor] = []  # of this round, (batch,) bool a depth, rows that kept the token drawn there
        self.going = False  # is there a row that drafts on?
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
        self.live, self.budget = live, self._agreed(budget.clamp(min=0, max=min(limit, self.limit)) * live)
        self.active = self.budget > 0
        self.depth = self.forwards = 0
        self.drew, self.pending = [], None
        # One of the two places where the host waits for the device: it launches the forwards.
        budgets = [tokens for tokens in self.budget.tolist() if tokens > 0]
        self.least, self.most = min(budgets, default=0), max(budgets, default=0)
        self.going = self.most > 0
        return self.most

    def advance(self, hidden: Tensor) -> bool:
        """A forward is done; is another token to be drawn from it? hidden: (batch, hidden) at the token fed last."""
        self.forwards += 1
        if self.pending is not None:
            step, self.pending = replace(self.pending, drawn_hidden=hidden), None
            self._ask(step)
            self._look()
        self.hidden = hidden
        return self.going

    def drawn(
        self,
        token_ids: Tensor,
        q: Tensor | None = None,
        *,
        logits: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> bool:
        """A token was drawn for each row; is there to be another forward? token_ids: (batch,). q: (batch, vocab), what
        they were drawn from; where the draft is greedy, give `logits`, (batch, vocab), instead and the requests'
        temperatures, (batch,), or None if all are greedy. Either is looked at only if `reads_q`.

        A row's token belongs to its draft if it was active; `end` tells.
        """
        self.depth += 1
        if not self.asks:
            self.going = self.depth < self.most
            return self.going
        signals = self._signals(token_ids, q, logits, temperature)
        hidden = self.hidden if self.reads_fed else None
        if self.policy.peeks:
            before = DraftStep(self.depth, None, self.active, hidden, None, None, signals.entropy, signals.max_prob)
            with self.stopwatch.timing():
                wanted = self.policy.draw_next(before)
            self.active = self._agreed(self.active & checked(self.policy, "draw_next", wanted, len(self.active)))
        self.drew.append(self.active)
        if self.depth >= self.least:  # a row that drafts on has as many tokens as there were forwards
            self.active = self.active & (self.budget > self.depth)
        step = DraftStep(self.depth, token_ids, self.active, hidden, None, *signals)
        if self.judges_late:
            self.pending = step
        elif self.policy.stops_early:
            self._ask(step)
        self._look()
        return self.going

    def end(self) -> Tensor:
        """(batch,) int, the drafted tokens of each row that are to be verified."""
        self.forwards = max(self.forwards, 1)  # even without a draft, what was accepted is fed
        self.submitted = self.lengths = self._drafted()
        if self.policy.trims:
            with self.stopwatch.timing():
                wanted = checked(self.policy, "trim", self.policy.trim(self.lengths), len(self.lengths))
            self.submitted = torch.minimum(self._agreed(wanted), self.lengths)
        return self.submitted

    # --- inside it ---------------------------------------------------------------------------------------------------

    def _signals(
        self, token_ids: Tensor, q: Tensor | None, logits: Tensor | None, temperature: Tensor | None
    ) -> Distribution:
        if not self.reads_q:
            return NOTHING
        with self.stopwatch.timing():  # a head's score can be among them
            if q is not None:
                return self.reader.of_q(q, token_ids, self.hidden)
            assert logits is not None
            return self.reader.of_logits(logits, temperature, token_ids, self.hidden)

    def _ask(self, step: DraftStep) -> None:
        with self.stopwatch.timing():
            wanted = checked(self.policy, "keep_drafting", self.policy.keep_drafting(step), len(self.active))
        self.active = self._agreed(self.active & wanted)

    def _look(self) -> None:
        """The other place where the host waits for the device, once a token, and only if the policy can stop early:
        whether any row goes on decides whether there is another forward."""
        self.going = self.depth < self.most and True in self.active.tolist()

    def _drafted(self) -> Tensor:
        """(batch,) int, the tokens of each row that it kept."""
        if self.asks and self.drew:
            return torch.stack(self.drew).sum(0)
        return self.budget if self.depth >= self.most else self.budget.clamp(max=self.depth)

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
