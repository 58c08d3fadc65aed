"""A policy in another engine's draft loop: the engine reports each forward, and the host decides when a round ends.

    begin → (advance → [the engine draws] → drawn) for each draft forward → end;   the next `begin` brings the verdict

The decisions are those of our own loop (decode/loop.py) for the same numbers: a drawn token is kept, and the round ends
after it. Rows are requests. They come, go and change places between rounds, and the policy's state follows.

A round's numbers are kept on the CPU: the engine takes lists, and the host waits for the device once a token anyway.

Losslessness: a row stops after a token that it keeps, or before a draw, by the token's distribution (a policy that
peeks). In the second case the engine may have drawn the token already, but the decision does not depend on it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.adapters.vllm.counts import VerifiedRound
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.stopwatch import Stopwatch
from accept_head.inference.costs.host import VLLM_V1, Host
from accept_head.inference.policies.drafting import Drafting, check_lossless
from accept_head.inference.policies.reader import Distribution, SignalReader
from accept_head.inference.policy import OF_Q, DraftPolicy, DraftStep, Signal, VerifyOutcome

# Signals that vLLM gives without the target's logits.
KNOWN = OF_Q | {Signal.FED_HIDDEN, Signal.DRAWN_HIDDEN, Signal.SECONDS}
OPTIONAL = {Signal.ACCEPTANCE, Signal.ALTERNATIVES}  # None: vLLM's test only knows accepted or rejected
NOTHING = Distribution()


class EndOfRound(Exception):
    """Raised inside vLLM's draft loop to leave it; the adapter catches it."""


class Verdict(NamedTuple):
    """The result of the last round: verified and accepted tokens of each row, in the order of the rows *now*."""

    submitted: Sequence[int]
    accepted: Sequence[int]


class Ending(NamedTuple):
    """What ends a request's text: its length in tokens, prompt included, and the tokens after which it stops. k_max:
    the most tokens that the request wants drafted in a round."""

    length: int
    token_ids: Collection[int]
    k_max: int = sys.maxsize


class PolicyHost:
    """Asks a policy for vLLM's draft loop. host: what that loop takes time for. rows: the most requests at once. limit:
    the most tokens a round. greedy: drafts are argmax, which makes every rule lossless. agree: gives all ranks of a
    tensor-parallel group the same (batch,) numbers or bools; None with one. metrics: counts rounds; None = no counts.
    tenant_of: a request's tenant, "" = unnamed; None if tenants are unknown.

    Raises InputError when the policy needs signals that vLLM does not give, or would bias sampled output.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        *,
        host: Host = VLLM_V1,
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
        self.drafting = Drafting(policy, host=host, device=device, agree=agree)
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
        # Per row: tokens at the start of the round (context), drafted tokens (kept), tokens to verify (submitted).
        self.context: Sequence[int] = []
        self.kept, self.submitted, self.live = list[int](), list[int](), list[bool]()
        self.most = self.depth = self.forwards = self.caught_up = 0
        self.end_ids: Tensor | None = None  # (batch, most), padded with −1
        self.rests = self.more = False  # whether the policy is left out; whether to draft another token
        self.pending: DraftStep | None = None
        self.began, self.draft_seconds = time.perf_counter(), 0.0
        self.drafting.start(rows, device)

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(
        self,
        requests: Sequence[str],
        live: Sequence[bool],
        lengths: Sequence[int],
        limit: int,
        verdict: Verdict | None = None,
        ends: Sequence[Ending] | None = None,
    ) -> int:
        """Begin a round → the most tokens that any row will draft, at most `limit`. With 0, `advance` ends the round.

        requests: the name of each row's request. live: rows whose drafts count; drafts of other rows are thrown away.
        lengths: tokens of each row now. verdict: on the last round's drafts; None if nothing was verified. ends: what
        ends each row's text, beyond which drafts are in vain; None if unknown.
        """
        with self.stopwatch.timing():
            self._observe(requests, lengths, verdict)
            self._follow(requests, lengths)
            limit = min(limit, self.limit)
            rooms = [limit for _ in lengths]
            if ends is not None:
                # A round emits one token more than it accepts.
                rooms = [min(limit, end.k_max, end.length - now - 1) for end, now in zip(ends, lengths, strict=True)]
            self.rests = self.drafting.prepare(live, self.most > 0)
            self.progress = self.drafting.begin(torch.tensor(live).bool(), torch.tensor(rooms), rests=self.rests)
        self.context, self.live = lengths, list(live)  # at the start of this round
        self.pending, self.depth, self.forwards, self.caught_up = None, 0, 0, 0
        self.most = int(self.progress.budget.max()) if live and not self.rests else 0
        self.more = self.most > 0
        ids = [torch.tensor([*end.token_ids, -1]) for end in ends or []] if self.more else []
        self.end_ids = torch.nn.utils.rnn.pad_sequence(ids, True, -1) if ids else None
        return self.most

    def advance(self, hidden: Tensor) -> bool:
        """Take the result of a forward → whether to draw another token from it. hidden: (batch, hidden) at the token
        that was fed last."""
        self.forwards += 1
        if self.pending is not None:
            step, self.pending = replace(self.pending, drawn_hidden=hidden), None
            self._judge(step)
            self._look()
        self.hidden = hidden
        return self.more

    def drawn(
        self,
        token_ids: Tensor,
        q: Tensor | None = None,
        *,
        logits: Tensor | None = None,
        temperature: Tensor | None = None,
        places: Tensor | None = None,
    ) -> bool:
        """Take the token drawn for each row → whether to run another forward. token_ids: (batch,). q: (batch, vocab),
        the distribution they were drawn from. If the draft is greedy, give `logits`, (batch, vocab), instead, and the
        requests' temperatures, (batch,), or None if all are greedy. places: (batch,), where the tokens are in `q` or
        `logits`; None: at their ids. All of these are read only if `reads_q`. A row's token belongs to its draft only
        if the row was active; `end` returns how many do.
        """
        self.depth, drafting = self.depth + 1, self.drafting
        signals = self._signals(token_ids.long(), places, q, logits, temperature)
        hidden = self.hidden if self.reads_fed else None
        if drafting.peeks:
            seen = DraftStep(self.depth, None, self._active(), hidden, None, None, signals.entropy, signals.max_prob)
            with self.stopwatch.timing():
                self.progress = drafting.peek(seen, self.progress)
        self.progress = drafting.drew(self.progress)
        if self.end_ids is not None and drafting.stops_early:  # else the host need not wait for the device
            ended = (token_ids.cpu()[:, None] == self.end_ids).any(-1)
            self.progress = self.progress._replace(active=self.progress.active & ~ended)
        if drafting.asks:
            step = DraftStep(self.depth, token_ids, self._active(), hidden, None, *signals)
            if drafting.looks_ahead:
                self.pending = step
            else:
                self._judge(step)
        self._look()
        return self.more

    def leave_out(self, seconds: float) -> None:
        """Of a forward that fed the drafter what it had missed over many rounds: learnt costs are of drafting alone."""
        self.began, self.caught_up = self.began + seconds, 1

    def end(self, others: int = 0) -> list[int]:
        """End the round → each row's drafted tokens to verify. others: draft forwards that `advance` did not see."""
        self.forwards += others
        drafted = submitted = self.progress.lengths
        if self.drafting.trims and self.depth:  # at depth 0 there is nothing to drop
            with self.stopwatch.timing():
                submitted = self.drafting.trim(drafted)
        self.kept, self.submitted = drafted.tolist(), submitted.tolist()
        self.draft_seconds = time.perf_counter() - self.began
        return self.submitted

    # --- inside a round ----------------------------------------------------------------------------------------------

    def _signals(
        self, ids: Tensor, places: Tensor | None, q: Tensor | None, logits: Tensor | None, temperature: Tensor | None
    ) -> Distribution:
        if not self.reads_q:
            return NOTHING
        places = ids if places is None else places
        with self.stopwatch.timing():  # the signals can include a head's score
            if q is not None:
                return self.reader.of_q(q, places, ids, self.hidden)
            assert logits is not None
            return self.reader.of_logits(logits, temperature, places, ids, self.hidden)

    def _judge(self, step: DraftStep) -> None:
        with self.stopwatch.timing():
            self.progress = self.drafting.judge(step, self.progress)

    def _look(self) -> None:
        """Check whether any row drafts on, which decides whether there is another forward."""
        going = not self.drafting.stops_early or bool(self.progress.active.any())
        self.more = self.depth < self.most and going

    def _active(self) -> Tensor:
        return self.drafting.on_device(self.progress.active)

    # --- between rounds ----------------------------------------------------------------------------------------------

    def _observe(self, requests: Sequence[str], lengths: Sequence[int], verdict: Verdict | None) -> None:
        """Count the last round and let the policy learn from it, in that round's order of rows."""
        began, self.began = self.began, time.perf_counter()
        if not self.requests or (self.metrics is None and not self.drafting.learns):
            return
        if verdict is None:
            verdict = Verdict([0] * len(lengths), [0] * len(lengths))
        rows: Sequence[int] = range(len(requests)) if requests == self.requests else _positions(self.requests, requests)
        live, submitted, accepted, now = list[bool](), list[int](), list[int](), list[int]()
        for before, row in enumerate(rows):
            there = row >= 0
            taken = verdict.accepted[row] if there else 0
            now.append(lengths[row] if there else self.context[before])
            # When one request is too near the end of the context to draft, vLLM verifies zeros for all requests. That
            # verdict is not about our drafts, which are never verified. The lengths then do not match: not live.
            live.append(there and self.live[before] and lengths[row] == self.context[before] + taken + 1)
            submitted.append(min(verdict.submitted[row] if there else 0, self.submitted[before]))
            accepted.append(min(taken, submitted[-1]))
        if self.metrics is not None:
            counted = VerifiedRound(live, self.kept, submitted, accepted, self._stopped(), self._predicted())
            self.metrics.record(counted, self.forwards + self.caught_up, self.stopwatch.take())
        if self.drafting.learns and not self.rests:
            counts = np.array([live, now, self.kept, submitted, accepted], np.int64)
            self.drafting.observe(
                VerifyOutcome.of_host(
                    counts,
                    self.device,
                    seconds=self.began - began,
                    draft_seconds=self.draft_seconds,
                    draft_forwards=self.forwards,
                )
            )

    def _stopped(self) -> list[bool]:
        """Whether the policy ended the row's draft, for each row."""
        ends = zip(self.live, self.kept, self.progress.budget.tolist(), strict=True)
        return [live and kept < budget for live, kept, budget in ends]

    def _predicted(self) -> list[list[float]]:
        """P̂ of each depth, a list of rows each. The host waits for the device, which is idle here."""
        return [values.tolist() for values in self.drafting.predicted]

    def _follow(self, requests: Sequence[str], lengths: Sequence[int]) -> None:
        """Bring the policy's rows into the order of the requests, and forget requests that are gone."""
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
        self.requests = list(requests)  # a copy: the engine changes its list

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _positions(names: Sequence[str], among: Sequence[str]) -> list[int]:
    """The position of each name in `among`; −1 if it is missing."""
    where = {name: position for position, name in enumerate(among)}
    return [where.get(name, -1) for name in names]
