"""A policy in a draft loop that is not ours: it is told of each forward and says when to end the round.

    begin → (advance → [the engine draws] → drawn) for each draft forward → end;   the next `begin` brings the verdict

What is decided is what our own loop (decode/loop.py) decides from the same numbers: a drawn token is kept, and the
round ends after it. Rows are requests. They come, go and change places between rounds, and the policy's state follows.

A round's numbers are kept on the CPU: the engine takes lists, and the host waits for the device once a token anyway.

Losslessness: a row stops after a token that it keeps, or before one is drawn, by what its distribution says (a policy
that peeks: the engine may have drawn the token already, but the decision does not look at it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.adapters.vllm.counts import VerifiedRound
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.reader import Distribution, SignalReader
from accept_head.inference.adapters.vllm.stopwatch import Stopwatch
from accept_head.inference.policies.drafting import Drafting, check_lossless
from accept_head.inference.policy import OF_Q, DraftPolicy, DraftStep, Signal, VerifyOutcome

# What a host that does not show its target's logits can give.
KNOWN = OF_Q | {Signal.FED_HIDDEN, Signal.DRAWN_HIDDEN, Signal.SECONDS}
OPTIONAL = {Signal.ACCEPTANCE, Signal.ALTERNATIVES}  # policies do without: vLLM's test says its outcome, no more
NOTHING = Distribution()


class EndOfRound(Exception):
    """Raised in the host's draft loop to leave it; never leaves the adapter."""


class Verdict(NamedTuple):
    """What the target said of the last round, in the order of the rows *now*: tokens of each row."""

    submitted: Sequence[int]
    accepted: Sequence[int]


class PolicyHost:
    """policy: what decides. rows: most requests at once. limit: most tokens a round. greedy: drafts are argmax, which
    makes every rule lossless. agree: makes all tensor-parallel ranks have the same (batch,) numbers or bools; None with
    one rank. metrics: where rounds are counted; None = nowhere. tenant_of: whose a request is, "" = nobody has said;
    None where that is not to be known.

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
        tenant_of: Callable[[str], str] | None = None,
    ):
        if unknown := policy.needs - KNOWN - OPTIONAL:
            names = ", ".join(sorted(signal.name for signal in unknown))
            raise InputError(f"policy {type(policy).__name__} needs {names}, which vLLM does not give")
        self.drafting = Drafting(policy, device=device, agree=agree)
        if self.drafting.by_tenant and tenant_of is None:
            raise InputError(
                "the policy goes by tenants (per_tenant, tenant_share), but vLLM's V2 model runner does not show whose "
                "a request is; expected its V1 model runner, VLLM_USE_V2_MODEL_RUNNER=0"
            )
        check_lossless(policy, "ratio", greedy=greedy)
        self.tenant_of = tenant_of if self.drafting.by_tenant else None
        self.policy, self.limit, self.metrics, self.device = policy, limit, metrics, device
        self.reader = SignalReader(policy.needs)
        self.reads_q, self.reads_fed = bool(policy.needs & OF_Q), Signal.FED_HIDDEN in policy.needs
        self.stopwatch = Stopwatch(device, on=metrics is not None)
        self.requests: list[str] = []  # of the last round, in its order
        # Of each row. context: its tokens as the round found it. kept: tokens of its draft. submitted: those of them
        # that are to be verified.
        self.context: Sequence[int] = []
        self.kept, self.submitted, self.live = list[int](), list[int](), list[bool]()
        self.most = self.depth = self.forwards = 0
        self.more = False  # is another token to be drafted?
        self.pending: DraftStep | None = None
        self.began = time.perf_counter()
        self.drafting.start(rows, device)

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(
        self,
        requests: Sequence[str],
        live: Sequence[bool],
        lengths: Sequence[int],
        limit: int,
        verdict: Verdict | None = None,
    ) -> int:
        """→ most tokens that any row will draft, at most `limit`; 0 = none, and then `advance` ends the round.

        requests: who the rows are. live: what the other rows draft is thrown away. lengths: tokens of each row now.
        verdict: on the last round's drafts; None if none was verified.
        """
        with self.stopwatch.timing():
            self._observe(requests, lengths, verdict)
            self._follow(requests, lengths)
            self.progress = self.drafting.begin(torch.tensor(live, dtype=torch.bool), min(limit, self.limit))
        self.context, self.live = lengths, list(live)  # of the rows as this round finds them
        self.depth = self.forwards = 0
        self.pending = None
        self.most = int(self.progress.budget.max()) if live else 0
        self.more = self.most > 0
        return self.most

    def advance(self, hidden: Tensor) -> bool:
        """A forward is done; is another token to be drawn from it? hidden: (batch, hidden) at the token fed last."""
        self.forwards += 1
        if self.pending is not None:
            step, self.pending = replace(self.pending, drawn_hidden=hidden), None
            self._judge(step)
        self.hidden = hidden
        return self.more

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
        drafting = self.drafting
        signals = self._signals(token_ids, q, logits, temperature)
        hidden = self.hidden if self.reads_fed else None
        if drafting.peeks:
            seen = DraftStep(self.depth, None, self._active(), hidden, None, None, signals.entropy, signals.max_prob)
            with self.stopwatch.timing():
                self.progress = drafting.peek(seen, self.progress)
        self.progress = drafting.drew(self.progress)
        self.more = self.depth < self.most
        if drafting.asks:
            step = DraftStep(self.depth, token_ids, self._active(), hidden, None, *signals)
            if drafting.looks_ahead:
                self.pending = step
            else:
                self._judge(step)
        if drafting.stops_early:
            self.more = self.more and bool(self.progress.active.any())
        return self.more

    def end(self) -> list[int]:
        """The drafted tokens of each row that are to be verified."""
        self.forwards = max(self.forwards, 1)  # even without a draft, what was accepted is fed
        drafted = submitted = self.progress.lengths
        if self.drafting.trims and self.depth:  # else there is nothing to drop, and it was shown nothing
            with self.stopwatch.timing():
                submitted = self.drafting.trim(drafted)
        self.kept, self.submitted = drafted.tolist(), submitted.tolist()
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

    def _judge(self, step: DraftStep) -> None:
        with self.stopwatch.timing():
            self.progress = self.drafting.judge(step, self.progress)
        self.more = self.depth < self.most and bool(self.progress.active.any())

    def _active(self) -> Tensor:
        return self.drafting.there(self.progress.active)

    # --- between rounds ----------------------------------------------------------------------------------------------

    def _observe(self, requests: Sequence[str], lengths: Sequence[int], verdict: Verdict | None) -> None:
        """Tell the policy of the last round, in that round's order of rows."""
        began, self.began = self.began, time.perf_counter()
        if not self.requests or (self.metrics is None and not self.drafting.learns):
            return
        if verdict is None:
            verdict = Verdict([0] * len(lengths), [0] * len(lengths))
        rows: Sequence[int] = range(len(requests))
        if requests != self.requests:
            rows = _positions(self.requests, requests)
        live, submitted, accepted, now = list[bool](), list[int](), list[int](), list[int]()
        for before, row in enumerate(rows):
            there = row >= 0
            taken = verdict.accepted[row] if there else 0
            now.append(lengths[row] if there else self.context[before])
            # When one request is too near the end of the context to draft, vLLM verifies zeros instead for all. What
            # is said of those is not said of our drafts, whose own verdict never comes.
            live.append(there and self.live[before] and lengths[row] == self.context[before] + taken + 1)
            submitted.append(min(verdict.submitted[row] if there else 0, self.submitted[before]))
            accepted.append(min(taken, submitted[-1]))
        if self.metrics is not None:
            self._count(VerifiedRound(live, self.kept, submitted, accepted, self._stopped(), self._predicted()))
        if self.drafting.learns:
            numbers = torch.tensor([self.kept, accepted, submitted, now, live], device=self.device)
            drafted, accepted_, submitted_, texts, took_part = numbers.unbind(0)
            seconds = self.began - began
            self.policy.observe(
                VerifyOutcome(
                    drafted=drafted,
                    submitted=submitted_,
                    accepted=accepted_,
                    live=took_part.bool(),
                    lengths=texts,
                    seconds=seconds,
                )
            )

    def _count(self, verified: VerifiedRound) -> None:
        assert self.metrics is not None
        self.metrics.record(verified, self.forwards, self.stopwatch.take())

    def _stopped(self) -> list[bool]:
        """Rows whose draft the policy ended."""
        ends = zip(self.live, self.kept, self.progress.budget.tolist(), strict=True)
        return [live and kept < budget for live, kept, budget in ends]

    def _predicted(self) -> list[list[float]]:
        """P̂ by depth, the rows' each. The host waits for the device, which has nothing to do here."""
        return [values.tolist() for values in self.drafting.predicted]

    def _follow(self, requests: Sequence[str], lengths: Sequence[int]) -> None:
        """Bring the policy's rows into the order of the requests; what it knew of those that are gone is forgotten."""
        if requests == self.requests:
            return
        rows = _positions(requests, self.requests)
        new = [row for row, before in enumerate(rows) if before < 0]
        places, arrived = ([max(row, 0) for row in rows], [lengths[row] for row in new])
        self.drafting.select(self._numbers(places))
        self.drafting.admit(self._numbers(new), self._numbers(arrived))
        if self.tenant_of is not None:
            named = {row: tenant for row in new if (tenant := self.tenant_of(requests[row]))}
            if named:
                self.drafting.set_tenants(self._numbers(list(named)), list(named.values()))
        self.requests = list(requests)  # the engine changes its own

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _positions(names: Sequence[str], among: Sequence[str]) -> list[int]:
    """Where each name is; −1 if it is not there."""
    where = {name: position for position, name in enumerate(among)}
    return [where.get(name, -1) for name in names]
