"""Ends a round for the whole batch: when the expected gain of one more draft step no longer pays for its time.

A draft step takes about as long for one row as for all rows. So a round should not wait for the last row that wants to
draft on. Any policy that verifies all its drafted tokens can be wrapped; its rows still stop where it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.costs.host import PADDED, Host
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.engine.capture import Capture, capture_of
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.past_rounds import PastRounds, Seen
from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, VerifyOutcome

TINY = 1e-12  # seconds


class BatchStopPolicy(RowPolicy):
    """Wraps `policy` with the stopping rule of docs/theory.md §5, summed over the rows.

    After k draft steps, with R the rows in which the policy would draft on:

        gain_r = S_r·β̂_r·ρ_{k+1}                       tokens that row r is expected to gain by one more
        the batch goes on  ⇔  Σ_{r∈R} [gain_r − λ·t_one]₊ > λ·t_step,       and row r with it  ⇔  gain_r > λ·t_one
        λ = B·τ / (seconds of an average round), at least B / t_plain(B)                       tokens/s, Dinkelbach

    S_r: product of the policy's predictions for the row's tokens, 1 if it predicts nothing. β̂_r: its prediction for
    the next token. If it makes none, that for the last one, as doubtful tokens come together; before the first, and if
    it predicts nothing, 1. t_one: seconds of one more token of the row. t_step: of a draft step, however many rows take
    part. If the host verifies padding, a step adds a token for all B live rows, and a row that stops saves nothing:
    verifying then belongs to the step. So does drafting, if stopped rows are drafted on. If a round with drafts costs
    more than one without, whatever it drafts, that belongs to the first step; so does what a first step takes longer
    than another. τ and the seconds of a round come from averages over the last RECENT rows or so, as the price of time
    is the speed at which the present text can be had. λ is the speed of past rounds, so it is never above the best one.
    It rises to the best speed from the side on which too much is drafted. Before the first step all gains are ρ_1, so
    the host decides on that step (`plan`), with all live rows in R. A first step that does not pay by itself is taken
    if it does together with those after it: they gain Σ_d [B·(ρ_d·h_d − v_d·λ·t_one) − u_d·λ·t_step], up to the depth
    at which that is largest. Of the rows and rounds that draft at all, h_d is the mean S·β̂ at depth d, v_d the share of
    rows that draft so far, and u_d the share of rounds in which one does. They are sums like those of m_d, with
    USUAL_REACH usual rows.

    Where the host verifies in blocks of tokens, a block that is begun costs λ·t_block, and t_one is what a token costs
    besides. Of the rows with the largest gains so many go on that Σ_r [gain_r − λ·t_one]₊ − λ·t_block·(blocks that they
    begin) is largest, if that is above λ·t_step.

    costs: measured, or learnt from the seconds of the rounds. Ranks of one tensor-parallel group agree on each answer,
    so they may hold different costs.

    A row whose own tokens do not pay drafts nothing: its first token counts f_r·ρ_1, with f_r = (4 + a + 2·√(1 + a)) /
    (4 + e), at most 1. a, e: its first tokens that were accepted, and that ρ_1 expected to be, in sums that decay with
    each round. So f_r is at the upper end of what the row's record allows, and returns to 1 while the row is left out.

    ρ_d = κ_d·m_d, from sums over the rows that drafted to depth d. κ_d = accepted / Σ S_r, with S_r after the policy
    judged Y_d: how right it is. A row counts as accepted if its first d tokens were. (Nothing is censored: a rejection
    before d decides.) m_d = Σ S_r / Σ S_r·β̂_r, the latter before Y_d was drawn: what the policy says of the present
    text. It varies far less than the 0 and 1 of verdicts, so a few rows tell of other text. It is over the last RECENT
    rows or so, of which a new request's share is forgotten, and USUAL rows like those of the last `memory`. Those start
    as if SURE rows had given 1, and κ_d as if `prior` rows had given `optimism`·κ'_{d−1}; κ'_0 = 1. κ' is κ if the
    policy predicts nothing; m_d is 1 then. Else κ'_d is as if those rows had given κ'_{d−1}, as predictions say
    themselves how chances fall with depth.

    Several rounds are learnt from together, so λ, ρ and f are some rounds old (past_rounds.py).

    Never absorbing: all sums decay with each row and round, whether the depth was reached or not. So κ_d and m_d of an
    abandoned depth return to where they began, until the depth is tried again. Depths of a policy that predicts nothing
    return one at a time: κ of an untried depth is below that of the depth before. K = 0 ends in the same way. Besides,
    one token is drafted after the policy was asked in `probe` rounds without drafts (0: never). It is not drafted if
    even a token that is sure to be accepted would cost more time than it saves.

    The policy's k_min bounds when the *policy* may stop a row. The batch may end sooner: a bound that suits one row is
    too expensive for many.

    Global by design: κ, m, λ and τ belong to all rows together and outlive `start`. Rows have no state but their
    lengths, their record and the policy's own. Raises InputError for a policy that drafts nothing, or that trims: its
    trimming would depend on how deep the batch goes, and so on tokens drawn later.
    """

    may_rest = True
    OF_A_ROUND = ("survival", "decided", "judged", "counted", "steps")

    def __init__(
        self,
        policy: DraftPolicy,
        costs: PairCosts | LearntCosts,
        *,
        prior: float = 15.0,
        optimism: float = 0.9,
        memory: float = 500.0,
        probe: int = 32,
        host: Host = PADDED,
    ):
        name, inner = type(policy).__name__, Drafting(policy)
        if not inner.max_draft_tokens:
            raise InputError(f"costs are given to policy {name}, which drafts nothing")
        if inner.trims:
            raise InputError(
                f"costs are given to policy {name}, which drops drawn tokens; expected one that verifies all it drafts"
            )
        if not 0 < prior < float("inf"):
            raise InputError(f"batch-stop prior is {prior}, expected a positive number of rows")
        if not 0 < optimism <= 1:
            raise InputError(f"batch-stop optimism is {optimism}, expected a share above 0 and at most 1")
        if probe < 0:
            raise InputError(f"batch-stop probe is {probe}, expected a number of rounds or 0")
        if not 1 < memory < float("inf"):
            raise InputError(f"batch-stop memory is {memory}, expected a number of rows above 1")
        self.policy, self.inner, self.costs, self.host = policy, inner, costs, host
        self.content = content_hash(policy)  # content_hash of the wrapper must depend on the wrapped policy
        self.needs, self.max_draft_tokens, self.by_tenant = inner.needs, inner.max_draft_tokens, inner.by_tenant
        self.prior, self.optimism, self.memory, self.probe = prior, optimism, memory, probe
        if inner.peeks:
            self.draw_next = self._draw_next
        self.counts_steps = inner.peeks or inner.looks_ahead  # there may be more draft steps than drawn tokens
        self.past = PastRounds(
            self.max_draft_tokens,
            prior=prior,
            optimism=optimism,
            memory=memory,
            predicts=inner.predicts,
            peeks=inner.peeks,
        )
        self._allocate(0, torch.device("cpu"))
        self.lengths = np.zeros(0)  # tokens of each row's text
        self.planned_by: tuple[object, ...] = ()  # what the last plan went by, texts aside
        self.counted = 0  # number of the policy's predictions that `survival` includes
        self.survival = torch.zeros(0, dtype=torch.float64)
        self.steps = torch.zeros((), dtype=torch.long)  # of this round, if counted
        self.tokens = 0  # to verify if drafting ended now, where they come in blocks
        # Per depth of this round, (batch,) each: S·β̂ of the rows that drafted on to it, else 0; and S after judging it.
        self.decided, self.judged = list[Tensor](), list[Tensor]()
        self.forget()

    def _allocate(self, batch: int, device: torch.device) -> None:
        """What past rounds tell the steps of the next one, in float64 tensors that change in place. So CUDA graphs can
        contain them."""
        self.told = torch.zeros(2 + self.max_draft_tokens + batch, dtype=torch.float64, device=device)
        # In tokens: the prices of one more token of a row, of a draft step, and of a block. Then ρ of depths 2, 3, …;
        # and what each row may draft.
        self.token_price, self.step_price, self.block_price, *self.rho = self.told[: 2 + self.max_draft_tokens].unbind()
        self.budget = self.told[2 + self.max_draft_tokens :]
        self.nothing = torch.zeros((), dtype=torch.float64, device=device)

    def forget(self) -> None:
        """Reset what was learnt, in the same memory; and the costs, if they are learnt."""
        self.past.forget()
        self.costs.forget()
        self.planned_by = ()

    @property
    def capture(self) -> Capture | None:
        """None around a policy that learns, as its use of the outcome is unknown here."""
        held = capture_of(self.policy)
        if held is None or self.inner.learns:
            return None
        return Capture(
            carried=(*self.OF_A_ROUND, *(f"policy.{name}" for name in held.carried)),
            read=tuple(f"policy.{name}" for name in held.read),
            unread=("lengths", "planned_by", *(f"policy.{name}" for name in held.unread)),
        )

    @property
    def predicted(self) -> list[Tensor]:
        return self.inner.predicted

    @property
    def predicted_next(self) -> list[Tensor]:
        return self.inner.predicted_next

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """Keeps what was learnt. Tensors also keep their memory if there are as many rows on the same device."""
        self.inner.start(batch, device)
        if self.budget.shape != (batch,) or self.told.device != torch.empty(0, device=device).device:
            self._allocate(batch, device)
        self.lengths, self.planned_by = np.zeros(batch), ()
        self.past.begin(batch)

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.inner.admit(rows, lengths)
        places = rows.tolist()
        self.past.admit(places)
        self.lengths[places], self.planned_by = lengths.tolist(), ()

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        self.inner.set_tenants(rows, keys)

    def select(self, rows: Tensor) -> None:
        """Called between rounds only."""
        self.inner.select(rows)
        places = rows.tolist()
        self.past.select(places)
        self.lengths, self.planned_by = self.lengths[places], ()
        if len(places) != len(self.budget):
            self._allocate(len(places), self.told.device)

    # --- a round -----------------------------------------------------------------------------------------------------

    def plan(self, live: Sequence[bool]) -> None:
        """Decide on the first step, and tell what the others go by. As long as nothing is learnt and the same rows take
        part, that stays as it is: a few more tokens of context change next to nothing."""
        past, most, coefficients = self.past, self.max_draft_tokens, self.costs.coefficients
        probes = 0 < self.probe <= past.idle
        goes_by = probes, list(live), past.rounds - len(past.waiting), coefficients
        if goes_by == self.planned_by:
            return
        self.planned_by, takes_part = goes_by, np.array(live, bool)
        rows, context = int(takes_part.sum()), float(self.lengths @ takes_part)
        prices = past.prices(coefficients, self.host)
        average, plain, *more = (of_context * context + of_rows * rows + one for of_context, of_rows, one in prices)
        speed = rows * max(past.emitted / max(average, TINY), 1 / max(plain, TINY))  # λ
        token, step, first, block = (speed * seconds for seconds in more)
        (rho, *further), at_best, later = past.rho, past.at_best, past.after_first(rows, token, step)
        if probes:
            most, rho, at_best, later = 1, 1.0, np.ones_like(at_best), 0.0
        pays = rows * max(0.0, rho - token) + later - block * self.host.blocks(rows, rows) > first
        budget = most * pays * (rho * at_best > token)
        self.told.copy_(torch.tensor([token, step, block, *further, *budget.tolist()], dtype=torch.float64))

    def start_round(self, live: Tensor) -> Tensor:
        budget = torch.minimum(self.policy.start_round(live), self.budget.long())
        drafts = (live & (budget > 0)).double()
        self.decided, self.judged, self.survival, self.counted = [drafts], [], torch.ones_like(drafts), 0
        if self.counts_steps:
            self.steps = torch.zeros((), dtype=torch.long, device=live.device)
        if self.host.block > 1:
            self.tokens = int(live.sum() + drafts.sum())
        return budget

    def _draw_next(self, step: DraftStep) -> Tensor:
        self.steps = torch.where(step.active.any(), step.depth, self.steps)
        wanted: Tensor = self.policy.draw_next(step)  # type: ignore[attr-defined]
        return wanted

    def keep_drafting(self, step: DraftStep) -> Tensor:
        active = self.policy.keep_drafting(step)
        if step.drawn_hidden is not None:  # the drawn token was fed to be judged: one more forward
            self.steps = torch.where(step.active.any(), step.depth + 1, self.steps)
        for probability in self.predicted[self.counted :]:
            self.survival = self.survival * probability
        self.counted = len(self.predicted)
        # A row that drafts no further is not fed its token, so a policy that reads the state there cannot judge it.
        unread = self.inner.looks_ahead
        self.judged.append(self.survival.masked_fill(~step.active, torch.nan) if unread else self.survival)
        if step.depth >= self.max_draft_tokens:
            return active
        predictions = self.predicted_next or self.predicted
        hope = self.survival * predictions[-1] if predictions else self.survival
        surplus = torch.where(active, hope * self.rho[step.depth - 1] - self.token_price, self.nothing)
        if self.host.block > 1:
            goes_on = self._in_blocks(surplus)
        else:
            goes_on = (surplus > 0) & (surplus.clamp(min=0).sum() > self.step_price)
        self.decided.append(torch.where(goes_on, hope, self.nothing))
        return goes_on

    def _in_blocks(self, surplus: Tensor) -> Tensor:
        """(batch,) whether each row is among those that go on, where tokens are verified in blocks. Only CPUs have
        them. There a loop over a few rows takes less time than starting one operation on all."""
        gains, block, worth, best, most = surplus.tolist(), float(self.block_price), -float(self.step_price), 0.0, 0
        rows = sorted((row for row, gain in enumerate(gains) if gain > 0), key=gains.__getitem__, reverse=True)
        for count, row in enumerate(rows, start=1):
            worth += gains[row] - block * self.host.blocks(self.tokens + count - 1, 1)
            if worth > best:
                best, most = worth, count
        goes_on = [False] * len(gains)
        for row in rows[:most]:
            goes_on[row] = True
        self.tokens += most
        return torch.tensor(goes_on)

    # --- learning, at the end of a round -----------------------------------------------------------------------------

    def observe(self, outcome: VerifyOutcome) -> None:
        of_a_round, depths = torch.stack([*self.decided, *self.judged]).cpu().numpy(), len(self.decided)
        steps = int(self.steps) if self.counts_steps else 0
        self.past.add(Seen(outcome.on_host, of_a_round[:depths], of_a_round[depths:], steps, self.host))
        self.lengths = outcome.on_host[1].copy()  # `admit` writes there
        if self.inner.learns:
            self.policy.observe(outcome)
