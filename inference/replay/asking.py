"""Replay of any policy: asks the policy object the questions of the decode loop, in the same order, without a model.

It makes a call per drafted token, so it is slower than thresholds.py. But it works for every policy, also for one that
keeps state or looks at the batch: responses pass through a batch of rows as in decoding, and a finished one frees its
row. The traces are coupled for the ratio test, so the replay uses that test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accept_head.alternatives import Alternatives
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.errors import InputError
from accept_head.inference.costs.host import PACKED
from accept_head.inference.policies.drafting import Drafting, DraftProgress, check_lossless
from accept_head.inference.policy import DraftPolicy, DraftStep, Signal, VerifyOutcome
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.scores import HIDDEN, draft_step
from accept_head.inference.replay.walk import Replayed, Walked, check_k_max, replayed_of


@torch.no_grad()
def replay(
    traces: CoupledTraces,
    policy: DraftPolicy,
    name: str,
    params: dict[str, Any] | None = None,
    *,
    batch: int | None = None,
    costs: ForwardCosts | PairCosts | None = None,
    alternatives: Alternatives | None = None,
) -> Replayed:
    """Replay `policy`. batch: rows decoded together; all responses when left out. costs: give the seconds of a round,
    for policies that learn from them: the draft steps of the longest draft and one verification. PairCosts count the
    tokens that packed rounds give the models. alternatives: for policies that learn from them; None = no alternatives.

    Raises InputError when the policy drafts more than the rollouts hold, when it needs seconds and there are no costs,
    or when it is not lossless under the ratio test: its text would differ from the traces'.
    """
    check_k_max(name, policy.max_draft_tokens, traces)
    check_lossless(policy, "ratio", greedy=traces.config.sampling.greedy)
    if Signal.SECONDS in Drafting(policy).needs and costs is None:
        raise InputError(f"{name} learns from the seconds of a round: its replay needs the forward costs")
    rows = _Rows(traces, policy, min(batch or len(traces.lengths), len(traces.lengths)), costs, alternatives)
    while rows.live.any():
        rows.round()
    walked = Walked(rows.counts[:, None].double().numpy(), *rows.histograms[:, None].numpy())
    return replayed_of(walked, 0, name, params or {})


class _Rows:
    """The batch: rows that each replay one response after the other, on the CPU."""

    def __init__(
        self,
        traces: CoupledTraces,
        policy: DraftPolicy,
        batch: int,
        costs: ForwardCosts | PairCosts | None,
        alternatives: Alternatives | None,
    ):
        self.traces, self.costs = traces, costs
        self.policy, self.drafting = policy, Drafting(policy, host=PACKED)
        self.table = HiddenTable(traces, policy.needs)
        self.prompts = torch.tensor([len(prompt) for prompt in traces.traces["prompt_ids"]])
        self.divergence = self.known("divergence") if Signal.DIVERGENCE in policy.needs else None
        if self.divergence is not None and self.divergence.isnan().any():
            raise InputError(
                f"{type(policy).__name__} needs the divergence, which these traces do not have: it is infinite for a "
                "drafter that lacks tokens of the target"
            )
        soft = Signal.ACCEPTANCE in policy.needs and not traces.config.sampling.greedy
        self.acceptance = self.known("acceptance") if soft else None
        self.alternatives = alternatives if Signal.ALTERNATIVES in policy.needs else None
        self.counts = torch.zeros(len(traces.lengths), 4, dtype=torch.long)
        self.counts[:, 0] = traces.lengths
        self.histograms = torch.zeros(3, traces.k_max + 1, dtype=torch.long)
        self.waiting: Iterator[int] = iter(range(len(traces.lengths)))
        self.response, self.place, self.end = (torch.zeros(batch, dtype=torch.long) for _ in range(3))
        self.drafted = False  # whether any row could draft in the last round
        self.drafting.start(batch, torch.device("cpu"))
        self.admit()

    def known(self, column: str) -> Tensor:
        """(P·depths,) a column of the traces, for each token of the responses."""
        return torch.from_numpy(np.concatenate(self.traces.traces.with_format("numpy")[column][:]))

    @property
    def live(self) -> Tensor:
        return self.place < self.end

    def admit(self) -> None:
        """Give finished rows to waiting responses."""
        rows = []
        for row in torch.where(~self.live)[0].tolist():
            response = next(self.waiting, None)
            if response is not None:
                rows.append(row)
                self.response[row] = response
                self.place[row] = self.traces.starts[response]
                self.end[row] = self.traces.starts[response] + self.traces.lengths[response]
        if rows:
            self.drafting.admit(torch.tensor(rows), self.prompts[self.response[rows]])

    def round(self) -> None:
        traces, live = self.traces, self.live
        here = self.place.clamp(max=traces.positions - 1)
        rests = self.drafting.prepare(live.tolist(), self.drafted)
        begun = self.drafting.begin(live, traces.drafts[here], rests=rests)
        self.drafted, progress = bool(begun.budget.any()), self.draft(here, begun)
        drafted = submitted = progress.lengths
        if self.drafting.trims and progress.budget.any():
            submitted = self.drafting.trim(drafted)
        accepted = torch.minimum(submitted, traces.leading[here])
        forwards = drafted + progress.extra_forwards
        spent = torch.stack([drafted - accepted, torch.ones_like(drafted), forwards], dim=-1)
        self.counts[:, 1:].index_add_(0, self.response[live], spent[live])
        judged = torch.minimum(submitted, accepted + 1)
        for histogram, value in zip(self.histograms, (drafted, judged, accepted), strict=True):
            histogram += torch.bincount(value[live], minlength=traces.k_max + 1)
        self.place = torch.where(live, torch.minimum(self.place + accepted + 1, self.end), self.place)
        if not rests:
            self.observe(here, live, drafted, submitted, accepted, forwards)
        self.admit()

    def draft(self, here: Tensor, progress: DraftProgress) -> DraftProgress:
        """Draft one round in every row, as in the decode loop. here: (batch,) position of each row."""
        drafting, most = self.drafting, int(progress.budget.max())
        if not drafting.stops_early:
            return progress._replace(lengths=progress.budget)
        for depth in range(1, most + 1):
            tokens = self.traces.path[here, depth - 1].clamp(max=len(self.traces.ids) - 1)
            if drafting.peeks:
                progress = drafting.peek(self.step(depth, tokens, progress, peek=True), progress)
            progress = drafting.drew(progress)
            if drafting.asks:
                progress = drafting.judge(self.step(depth, tokens, progress, last=depth == most), progress)
            if not progress.active.any():
                break
        return progress

    def step(
        self, depth: int, tokens: Tensor, progress: DraftProgress, *, peek: bool = False, last: bool = False
    ) -> DraftStep:
        """The DraftStep that the decode loop would give: the signals in `needs`. Before a draw it has nothing of the
        token; at the last possible token of the round it has no drawn_hidden."""
        needs = self.policy.needs
        fed, drawn = self.table.states(tokens)
        full = draft_step(self.traces, tokens, torch.device("cpu"))
        return DraftStep(
            depth=depth,
            token_ids=None if peek or full.token_ids is None else full.token_ids.long(),
            active=progress.active,
            fed_hidden=fed,
            drawn_hidden=None if peek or last else drawn,
            logprob=full.logprob if Signal.LOGPROB in needs and not peek else None,
            entropy=full.entropy if Signal.ENTROPY in needs else None,
            max_prob=full.max_prob if Signal.MAX_PROB in needs else None,
        )

    def observe(
        self, here: Tensor, live: Tensor, drafted: Tensor, submitted: Tensor, accepted: Tensor, forwards: Tensor
    ) -> None:
        slots = self.traces.tokens_of(here[:, None], torch.arange(int(submitted.max())))
        slots = slots.clamp(max=self.traces.of_responses - 1)
        lengths = self.prompts[self.response] + self.place - self.traces.starts[self.response]
        drafting, rest = self.seconds(forwards, submitted, int((lengths * live).sum()), int(live.sum()))
        self.drafting.observe(
            VerifyOutcome(
                drafted=drafted,
                submitted=submitted,
                accepted=accepted,
                live=live,
                lengths=lengths,
                divergence=None if self.divergence is None else self.divergence[slots],
                acceptance=None if self.acceptance is None else self.acceptance[slots],
                alternatives=self.alternatives and self.alternatives.at(slots),
                seconds=None if self.costs is None else drafting + rest,
                draft_seconds=None if self.costs is None else drafting,
                draft_forwards=int(forwards.max()),
            )
        )

    def seconds(self, forwards: Tensor, submitted: Tensor, context_tokens: int, rows: int) -> tuple[float, float]:
        """Seconds of a round, of drafting and of the rest. forwards, submitted: of each row, 0 where it is not live."""
        steps, verified = int(forwards.max()), int(submitted.max())
        if isinstance(self.costs, PairCosts):
            fed, tokens = int(forwards.sum()), rows + int(submitted.sum())
            one, none = (self.costs.draft_seconds(n, context_tokens) for n in (1, 0))
            drafting = steps * none + fed * (one - none)
            return float(drafting), float(self.costs.verify_seconds(tokens, context_tokens))
        if self.costs is not None:
            return steps * self.costs.t_draft, self.costs.t_target if verified else self.costs.t_autoregressive
        return 0.0, 0.0


class HiddenTable:
    """Hidden states of all tokens, in memory, for policies that need them."""

    def __init__(self, traces: CoupledTraces, needs: frozenset[Signal]):
        self.needs = needs
        if not needs & HIDDEN:
            return
        parts = [(fed, hidden) for _, _, fed, hidden in traces.hidden()]
        fed, hidden = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        steps = traces.k_max - 1
        self.fed = torch.cat([fed, hidden.reshape(-1, fed.shape[-1])])
        # The state at a token is the `fed` state of the next token of its response or rollout. For a rejected token
        # that is the first token of its rollout.
        after = torch.ones(len(self.fed), dtype=torch.long)
        after[: traces.of_responses] = traces.following
        self.next = (torch.arange(len(self.fed)) + after).clamp(max=len(self.fed) - 1)
        self.next[traces.rejected] = traces.of_responses + torch.arange(len(traces.rejected)) * steps

    def states(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(fed, drawn) of (rows,) tokens, (rows, hidden) each; None if not in `needs`."""
        fed = self.fed[tokens] if Signal.FED_HIDDEN in self.needs else None
        return fed, self.fed[self.next[tokens]] if Signal.DRAWN_HIDDEN in self.needs else None
