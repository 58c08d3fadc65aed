"""Draft, then verify only as many tokens of the batch as maximise expected tokens per second."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.engine.capture import Capture
from accept_head.inference.policies.online.estimator import AcceptanceEstimator
from accept_head.inference.policies.spec import Tuning, costs, named
from accept_head.inference.policy import BOTH, DraftStep, RowPolicy, Signal, Verifier, VerifyOutcome

STRIDE = 8  # captured graphs have 1, 2, 4, 8, 16, 24, … tokens


class Ranked(NamedTuple):
    """Drafted tokens of all rows, the most likely to survive first, (slots,) each. survivals: 0 for an empty slot.
    rows, depths: the token's row, and its depth from 1. real: bool, whether the slot has a token."""

    survivals: Tensor
    rows: Tensor
    depths: Tensor
    real: Tensor

    @classmethod
    def of(cls, survivals: Tensor, real: Tensor) -> Ranked:
        """survivals, real: (batch, depths). Survivals must not rise along a row. Ties put the shallower token first, so
        that the best n tokens of a row are its first n."""
        values = torch.where(real, survivals, -1.0).T.flatten()  # depth by depth
        values, order = torch.sort(values, descending=True, stable=True)
        depth = torch.div(order, len(real), rounding_mode="floor")
        return cls(values.clamp(min=0), order % len(real), depth + 1, values >= 0)

    @property
    def gains(self) -> Tensor:
        """(slots + 1,) tokens expected to be accepted when the best 0, 1, … are verified."""
        return torch.nn.functional.pad(self.survivals.cumsum(0), (1, 0))

    @property
    def reach(self) -> Tensor:
        """(slots + 1,) depth of the deepest token among the best 0, 1, …"""
        return torch.nn.functional.pad((self.depths * self.real).cummax(0).values, (1, 0))

    def kept(self, budget: Tensor, batch: int) -> Tensor:
        """(batch,) how many of each row's tokens are among the best `budget`."""
        best = self.real & (torch.arange(len(self.real), device=self.real.device) < budget)
        return torch.zeros(batch, dtype=torch.long, device=best.device).index_add_(0, self.rows, best.long())


@named(
    "budget",
    "[COSTS]",
    "DSpark, vLLM: verify the batch's most likely candidates only",
    costs,
    tuning=Tuning(param="k_max", values=(4, 8), argument="COSTS"),
)
class BudgetPolicy(RowPolicy):
    """DSpark's and vLLM's adaptive verification (docs/theory.md §8). With S live rows, which need S tokens verified
    besides the drafted ones, and the survivals ŝ = Π p_i of all drafted tokens:

        m* = argmax_m  (S + Σ of the m largest ŝ) / (seconds of drafting + seconds of verifying S + m tokens)

    The m* tokens of the batch with the largest ŝ are verified. ŝ is computed from max q, so it is known before the
    token is drawn (AcceptanceEstimator: global by design, it outlives `start`). m* is chosen before the round from the
    previous round's ŝ of the rows that are live now; a new row's ŝ are 1. A token's rank does not depend on tokens that
    its row draws later, and m* does not depend on this round: lossless under both verifiers.

    retrospective: choose m* from the ŝ of this round itself (DSpark, appendix A). Whether a token is verified then
    depends on tokens drawn after it: lossless under `match` only. (If seconds are linear in m, the quotient has one
    peak, smaller ŝ do not move it, and there is no bias. If seconds rise in steps, there is a bias.)

    graph: a verification takes as long as the next larger captured graph, of 1, 2, 4, 8, 16, 24, … tokens, as in vLLM's
    cost tables.

    cap: draft only as deep as those m* tokens of the previous round reach, at least one token, and charge each m the
    draft steps that it needs. For tokens that were not drafted, the row's ŝ are continued at the same rate, so that
    drafts can get deeper again. A new row's ŝ are 1 down to the batch's depth. All this is known before the round.
    Without cap all rows draft k_max tokens, and the budget saves verification only; so does vLLM, whose drafts cost the
    same at any depth. Where drafting goes step by step, the unused steps cost time: cap is on by default.

    costs: learnt while serving when left out.
    """

    needs = frozenset({Signal.MAX_PROB})
    capture = Capture(
        carried=("live", "survivals", "budget", "depth", "estimator.features"),
        read=("lengths", "last", "depth", "estimator.slope", "estimator.intercepts"),
    )

    def __init__(
        self,
        costs: PairCosts | LearntCosts | None = None,
        *,
        k_max: int = 8,
        retrospective: bool = False,
        cap: bool = True,
        graph: bool = False,
    ):
        if k_max < 1:
            raise InputError(f"budget k_max is {k_max}, expected a positive integer")
        self.costs, self.max_draft_tokens, self.graph = costs or LearntCosts(), k_max, graph
        self.retrospective, self.cap = retrospective, cap
        self.lossless: frozenset[Verifier] = frozenset({"match"}) if retrospective else BOTH
        self.estimator = AcceptanceEstimator(k_max)
        self.live = self.budget = torch.empty(0)  # of this round
        self.survivals = list[Tensor]()  # ŝ of each depth of this round, (batch,)

    def forget(self) -> None:
        self.estimator.forget()
        self.costs.forget()

    def start(self, batch: int, device: torch.device) -> None:
        self.estimator.start(device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.last = torch.zeros(batch, self.max_draft_tokens, device=device)  # ŝ of the round before
        self.depth = torch.full((), self.max_draft_tokens, device=device)  # the most tokens that rows may draft

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.lengths[rows] = lengths
        self.last[rows] = (torch.arange(self.max_draft_tokens, device=rows.device) < self.depth).float()

    def select(self, rows: Tensor) -> None:
        self.lengths, self.last = self.lengths[rows], self.last[rows]

    def start_round(self, live: Tensor) -> Tensor:
        self.estimator.start_round()
        self.live, self.survivals = live, list[Tensor]()
        ranked = Ranked.of(self.last, live[:, None].expand_as(self.last))
        steps = ranked.reach.clamp(min=1) if self.cap else torch.full_like(ranked.reach, self.max_draft_tokens)
        self.budget = self._best(ranked, steps)
        if self.cap:
            self.depth = torch.take(steps, self.budget)
        return self.depth.expand(live.shape)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        p = self.estimator.predict(step)
        self.survivals.append(self.survivals[-1] * p if self.survivals else p)
        return step.active

    def trim(self, drafted: Tensor) -> Tensor:
        ranked = Ranked.of(torch.stack(self.survivals, dim=1), self._real(drafted))
        if self.retrospective:
            self.budget = self._best(ranked, torch.full_like(ranked.reach, len(self.survivals)))
        return ranked.kept(self.budget, len(drafted))

    def observe(self, outcome: VerifyOutcome) -> None:
        self.estimator.observe(outcome)
        self.lengths = outcome.lengths
        self.last = torch.zeros_like(self.last)
        if self.survivals:
            count = outcome.drafted[:, None]
            depth = torch.arange(1, self.max_draft_tokens + 1, device=count.device)
            known = torch.stack(self.survivals, dim=1)
            known = torch.nn.functional.pad(known, (0, self.max_draft_tokens - known.shape[1]))
            further = known.gather(1, (count - 1).clamp(min=0)) ** (depth / count.clamp(min=1))
            self.last = torch.where(depth <= count, known, torch.where(count > 0, further, 0.0))

    def _real(self, drafted: Tensor) -> Tensor:
        """(batch, depths) bool, whether the row drafted a token at the depth."""
        return torch.arange(len(self.survivals), device=drafted.device) < drafted[:, None]

    def _best(self, ranked: Ranked, steps: Tensor) -> Tensor:
        """m*, the smallest of equally good ones. steps: (slots + 1,) draft steps that each m is charged."""
        rows, context = self.live.sum(), torch.where(self.live, self.lengths, 0).sum()
        tokens = rows + torch.arange(len(steps), device=steps.device)
        tokens = graph_size(tokens, STRIDE) if self.graph else tokens
        seconds = self.costs.draft_seconds(rows, context, steps) + self.costs.verify_seconds(tokens, context)
        return torch.argmax((rows + ranked.gains) / seconds)


def graph_size(tokens: Tensor, stride: int) -> Tensor:
    """Size of the smallest captured graph that holds so many tokens. Sizes double up to `stride`, then grow by it."""
    doublings = torch.stack([tokens > 2**n for n in range(stride.bit_length() - 1)]).sum(0)
    return torch.where(tokens <= stride, 2**doublings, (tokens + stride - 1) // stride * stride)
