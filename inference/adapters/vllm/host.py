"""A policy in a draft loop that is not ours: it is told of each forward and says when to end the round.

    begin → (advance → [the engine draws] → drawn) for each draft forward → end;   the next `begin` brings the verdict

What is decided is what our own loop (decode.py) decides from the same numbers: a drawn token is kept, and the round
ends after it. Rows are requests; they come, go and change places between rounds, and the policy's state follows them.

What is known of rows besides the policy's own tensors are a few numbers each, and the host waits for the device once a
round and once a token anyway. So they are kept on the host: as tensors they would take dozens of operations a round,
each dearer to start than to do.

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
from accept_head.inference.adapters.vllm.counts import VerifiedRound
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.reader import Distribution, SignalReader
from accept_head.inference.adapters.vllm.rule import HostRule, rule_of
from accept_head.inference.adapters.vllm.stopwatch import Stopwatch
from accept_head.inference.policy import (
    OF_Q,
    DraftPolicy,
    DraftStep,
    RowPolicy,
    Signal,
    VerifyOutcome,
    check_lossless,
    checked,
)

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
        if policy.by_tenant and tenant_of is None:
            raise InputError(
                "the policy goes by tenants (per_tenant, tenant_share), but vLLM's V2 model runner does not show whose "
                "a request is; expected its V1 model runner, VLLM_USE_V2_MODEL_RUNNER=0"
            )
        check_lossless(policy, "ratio", greedy=greedy)
        self.tenant_of = tenant_of if policy.by_tenant else None
        self.policy, self.limit, self.agree, self.metrics, self.device = policy, limit, agree, metrics, device
        self.reader = SignalReader(policy.needs)
        self.rule = rule_of(policy)
        self.reads_q, self.reads_fed = bool(policy.needs & OF_Q), Signal.FED_HIDDEN in policy.needs
        self.judges_late = Signal.DRAWN_HIDDEN in policy.needs  # by the state at the drawn token itself
        self.asks = policy.stops_early or policy.peeks  # else each row drafts its budget
        self.learns = getattr(type(policy), "observe", None) is not RowPolicy.observe
        self.stopwatch = Stopwatch(device, on=metrics is not None)
        self.requests: list[str] = []  # of the last round, in its order
        # Of each row. context: its tokens as the round found it; kept: tokens of its draft; submitted: those of them
        # that are to be verified.
        self.context: Sequence[int] = []
        self.budget, self.kept, self.submitted = list[int](), list[int](), list[int]()
        self.live: Sequence[bool] = []
        self.active: list[bool] = []
        self.told: tuple[list[bool], Tensor] | None = None  # `active` as the policy has it
        self.least = self.most = self.depth = self.forwards = 0
        self.going = False  # is there a row that drafts on?
        self.pending: DraftStep | None = None
        self.began = time.perf_counter()
        policy.start(rows, device)

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
            wanted = self._wanted(live)
        limit = min(limit, self.limit)
        self.context, self.live = lengths, live  # of the rows as this round finds them
        self.budget = [max(0, min(tokens, limit)) if alive else 0 for tokens, alive in zip(wanted, live, strict=True)]
        self.active = [tokens > 0 for tokens in self.budget]
        self.depth = self.forwards = 0
        self.kept, self.pending, self.told = [0] * len(live), None, None
        budgets = [tokens for tokens in self.budget if tokens > 0]
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
            self._peek(hidden, signals)
        self.kept = [self.depth if active else kept for active, kept in zip(self.active, self.kept, strict=True)]
        if self.depth >= self.least:  # a row that drafts on has as many tokens as there were forwards
            self.active = [a and tokens > self.depth for a, tokens in zip(self.active, self.budget, strict=True)]
        if self.rule is not None:
            self._judge(self.rule, token_ids, hidden, signals)
        elif self.judges_late or self.policy.stops_early:
            step = DraftStep(self.depth, token_ids, self._active(), hidden, None, *signals)
            if self.judges_late:
                self.pending = step
            else:
                self._ask(step)
        self._look()
        return self.going

    def end(self) -> list[int]:
        """The drafted tokens of each row that are to be verified."""
        self.forwards = max(self.forwards, 1)  # even without a draft, what was accepted is fed
        if not self.asks:
            self.kept = [min(tokens, self.depth) for tokens in self.budget]
        self.submitted = self.kept
        if self.policy.trims and self.depth:  # else there is nothing to drop, and it was shown nothing
            drafted = torch.tensor(self.kept, device=self.device)
            with self.stopwatch.timing():
                wanted = checked(self.policy, "trim", self.policy.trim(drafted), len(drafted))
            self.submitted = [min(pair) for pair in zip(self._agreed(wanted), self.kept, strict=True)]
        return self.submitted

    # --- inside it ---------------------------------------------------------------------------------------------------

    def _wanted(self, live: Sequence[bool]) -> Sequence[int]:
        """Most tokens that the policy lets each row draft."""
        policy, constant = self.policy, getattr(self.policy.start_round, "constant", False)
        if self.rule is not None:
            budget = self.rule.start(live)
            return budget if constant or self.agree is None else self._agreed(self._numbers(budget))
        answer = policy.start_round(torch.tensor(live, dtype=torch.bool, device=self.device))
        if constant:
            return [policy.max_draft_tokens] * len(live)
        return self._agreed(checked(policy, "start_round", answer, len(live)))

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

    def _peek(self, hidden: Tensor | None, signals: Distribution) -> None:
        step = DraftStep(self.depth, None, self._active(), hidden, None, None, signals.entropy, signals.max_prob)
        with self.stopwatch.timing():
            wanted = checked(self.policy, "draw_next", self.policy.draw_next(step), len(self.active))
        self._narrow(self._agreed(wanted), wanted)

    def _ask(self, step: DraftStep) -> None:
        with self.stopwatch.timing():
            wanted = checked(self.policy, "keep_drafting", self.policy.keep_drafting(step), len(self.active))
        self._narrow(self._agreed(wanted), wanted)

    def _judge(self, rule: HostRule, token_ids: Tensor, hidden: Tensor | None, signals: Distribution) -> None:
        """As `_ask`, of a policy whose rule is worked out here."""
        with self.stopwatch.timing():
            score = signals.scored
            if score is None:
                # Its scores do not look at who is active.
                score = rule.policy.score(DraftStep(self.depth, token_ids, token_ids, hidden, None, *signals))
        wanted = rule.keep(self.depth, score, self.active)
        if self.agree is not None:
            wanted = self._agreed(torch.tensor(wanted, device=self.device))
        self._narrow(wanted)

    def _narrow(self, wanted: Sequence[bool], as_tensor: Tensor | None = None) -> None:
        """Those rows go on that did and are wanted to."""
        self.active = [active and bool(want) for active, want in zip(self.active, wanted, strict=True)]
        if as_tensor is not None and self.agree is None and self.active == wanted:
            self.told = self.active, as_tensor

    def _active(self) -> Tensor:
        """(batch,) bool; the tensor that the policy gave, where that says the same."""
        if self.told is None or self.told[0] != self.active:
            self.told = self.active, torch.tensor(self.active, device=self.device)
        return self.told[1]

    def _look(self) -> None:
        """Whether any row goes on decides whether there is another forward."""
        self.going = self.depth < self.most and True in self.active

    def _agreed(self, answer: Tensor) -> list:
        """What all ranks decide, on the host: here it waits for the device."""
        values: list = (answer if self.agree is None else self.agree(answer)).tolist()
        return values

    # --- between rounds ----------------------------------------------------------------------------------------------

    def _observe(self, requests: Sequence[str], lengths: Sequence[int], verdict: Verdict | None) -> None:
        """Tell the policy of the last round, in that round's order of rows."""
        began, self.began = self.began, time.perf_counter()
        if not self.requests or (self.metrics is None and not self.learns):
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
        if self.learns:
            numbers = torch.tensor([self.kept, accepted, submitted, now, live], device=self.device)
            drafted, accepted_, submitted_, texts, took_part = numbers.unbind(0)
            seconds = self.began - began
            outcome = VerifyOutcome(drafted, accepted_, took_part.bool(), texts, seconds=seconds, submitted=submitted_)
            self.policy.observe(outcome)

    def _count(self, verified: VerifiedRound) -> None:
        assert self.metrics is not None
        self.metrics.record(verified, self.forwards, self.stopwatch.take())

    def _stopped(self) -> list[bool]:
        """Rows whose draft the policy ended."""
        ends = zip(self.live, self.kept, self.budget, strict=True)
        return [live and kept < budget for live, kept, budget in ends]

    def _predicted(self) -> list[list[float]]:
        """P̂ by depth, the rows' each. The host waits for the device, which has nothing to do here."""
        if self.rule is not None:
            return self.rule.predicted
        return [values.tolist() for values in self.policy.predicted]

    def _follow(self, requests: Sequence[str], lengths: Sequence[int]) -> None:
        """Bring the policy's rows into the order of the requests; what it knew of those that are gone is forgotten."""
        if requests == self.requests:
            return
        rows = _positions(requests, self.requests)
        new = [row for row, before in enumerate(rows) if before < 0]
        places, arrived = ([max(row, 0) for row in rows], [lengths[row] for row in new])
        self.policy.select(self._numbers(places))
        self.policy.admit(self._numbers(new), self._numbers(arrived))
        if self.tenant_of is not None:
            named = {row: tenant for row in new if (tenant := self.tenant_of(requests[row]))}
            if named:
                self.policy.set_tenants(self._numbers(list(named)), list(named.values()))
        self.requests = list(requests)  # the engine changes its own

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _positions(names: Sequence[str], among: Sequence[str]) -> list[int]:
    """Where each name is; −1 if it is not there."""
    where = {name: position for position, name in enumerate(among)}
    return [where.get(name, -1) for name in names]
