"""Ends a round for the whole batch: when the expected gain of one more draft step no longer pays for its time.

A draft step takes about as long for one row as for all rows. So a round should not wait for the last row that wants to
draft on. Any policy that verifies all its drafted tokens can be wrapped; its rows still stop where it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.costs.host import PADDED, Host
from accept_head.inference.costs.learnt import LearntCosts
from accept_head.inference.engine.capture import Capture, capture_of
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, VerifyOutcome

OWN_PRIOR, OWN_MEMORY = 4.0, 64.0  # of a row's record: tokens that it is taken to have had, and rounds that count
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
    than another. τ and the seconds of a round come from averages over past rounds. λ is the speed of the past rounds,
    so it is never above the best one. It rises to the best speed from the side on which too much is drafted.

    costs: measured, or learnt from the seconds of the rounds. Ranks of one tensor-parallel group agree on each answer,
    so they may hold different costs.

    A row whose own tokens do not pay drafts nothing: its first token counts f_r·ρ_1, with f_r = (4 + a + 2·√(1 + a)) /
    (4 + e), at most 1. a, e: its first tokens that were accepted, and that ρ_1 expected to be, in sums that decay with
    each round. So f_r is at the upper end of what the row's record allows, and returns to 1 while the row is left out.

    ρ_d = accepted / Σ S_r·β̂_r, summed over the rows that drafted to depth d, with the values at that decision. A row
    counts as accepted if its first d tokens were accepted. (Nothing is censored: a rejection before d decides.) So ρ_d
    contains the acceptance of a token that is not drawn yet, and corrects the predictions on average. κ_d is the same
    ratio with S_r after the policy has judged Y_d: κ_d·S_r is the probability that d tokens are accepted. The next
    token cannot gain more than that. Hence ρ_d starts as if `prior` rows had given `optimism`·κ_{d−1}, and κ_d as if
    they had given ρ_d; κ_0 = 1.

    Never absorbing: all sums decay by 1/`memory` a row and round, whether the depth was reached or not. So ρ_d of an
    abandoned depth returns to optimism·κ_{d−1}, until the depth is tried again. Depths return one at a time: κ_d is
    unknown as well, and as low as ρ_d. K = 0 ends in the same way. Besides, one token is drafted after `probe` rounds
    without drafts (0: never). It is not drafted if even a token that is sure to be accepted would cost more time than
    it saves.

    The policy's k_min bounds when the *policy* may stop a row. The batch may end sooner: a bound that suits one row is
    too expensive for many.

    Global by design: ρ, κ, τ, n and ℓ belong to all rows together and outlive `start`. Rows have no state but their
    lengths and the policy's own. Raises InputError for a policy that drafts nothing, or that trims: its trimming would
    depend on how deep the batch goes, and so on tokens drawn later.
    """

    OF_A_ROUND = ("survival", "decided", "judged", "counted", "steps", "rho", "token_price", "step_price", "longest")

    def __init__(
        self,
        policy: DraftPolicy,
        costs: PairCosts | LearntCosts,
        *,
        prior: float = 20.0,
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
        depths = self.max_draft_tokens
        self.coefficients = torch.as_tensor(costs.coefficients, dtype=torch.float64)
        # Per depth: accepted, Σ S·β̂ before the token was drawn, and Σ S after the policy judged it. In float64, as they
        # are sums over many rounds and enter differences of nearly equal numbers.
        self.sums = torch.zeros(3, depths, dtype=torch.float64)
        # Sums of rows, emitted tokens, draft steps, verified drafted tokens, and rows of rounds with drafts.
        self.totals = torch.zeros(5, dtype=torch.float64)
        self.lengths, self.idle = torch.zeros(0, dtype=torch.long), torch.zeros((), dtype=torch.long)
        # (2, batch): first tokens of each row that were accepted, and that were expected to be.
        self.record = torch.zeros(2, 0, dtype=torch.float64)
        self.counted = 0  # number of the policy's predictions that `survival` includes
        self.survival = self.rho = self.token_price = self.step_price = torch.zeros(0, dtype=torch.float64)
        self.longest = self.steps = torch.zeros((), dtype=torch.long)
        # Per depth of this round, (batch,) each: S·β̂ of the rows that drafted on to it, else 0; and S after judging it.
        self.decided, self.judged = list[Tensor](), list[Tensor]()
        self.forget()

    def forget(self) -> None:
        """Reset the sums in place, to those of one row that drafted nothing; and the costs, if they are learnt."""
        self.sums.zero_()
        self.totals.zero_()[:2] = 1.0
        self.costs.forget()

    @property
    def capture(self) -> Capture | None:
        """None around a policy that learns, as its use of the outcome is unknown here."""
        held = capture_of(self.policy)
        if held is None or self.inner.learns:
            return None
        return Capture(
            carried=(*self.OF_A_ROUND, *(f"policy.{name}" for name in held.carried)),
            read=tuple(f"policy.{name}" for name in held.read),
            unread=tuple(f"policy.{name}" for name in held.unread),
            learnt=(self.sums, self.totals, self.lengths, self.idle, self.record),
        )

    @property
    def predicted(self) -> list[Tensor]:
        return self.inner.predicted

    @property
    def predicted_next(self) -> list[Tensor]:
        return self.inner.predicted_next

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """Keeps what was learnt. The sums also keep their memory if they are on the device already."""
        self.inner.start(batch, device)
        if self.lengths.shape != (batch,) or self.lengths.device != torch.empty(0, device=device).device:
            self.sums, self.totals, self.idle = (each.to(device) for each in (self.sums, self.totals, self.idle))
            self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
            self.record = torch.zeros(2, batch, dtype=torch.float64, device=device)
        if isinstance(self.costs, LearntCosts):
            self.coefficients = self.costs.coefficients  # which change in place
        self.coefficients = self.coefficients.to(device)
        for each in (self.lengths, self.record, self.idle):
            each.zero_()

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.inner.admit(rows, lengths)
        self.lengths[rows] = lengths
        self.record[:, rows] = 0

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        self.inner.set_tenants(rows, keys)

    def select(self, rows: Tensor) -> None:
        """Called between rounds only."""
        self.inner.select(rows)
        self.lengths, self.record = self.lengths[rows], self.record[:, rows]

    # --- a round -----------------------------------------------------------------------------------------------------

    def start_round(self, live: Tensor) -> Tensor:
        budget = self.policy.start_round(live)
        first_price = self._set_prices(live)
        self.rho = self._ratios()
        wanting = (live & (budget > 0)).double()
        accepted, expected = self.record
        gain = wanting * self.rho[0]
        pays = self._pays(gain, first_price)
        at_best = (OWN_PRIOR + accepted + 2 * (1 + accepted).sqrt()) / (OWN_PRIOR + expected)
        drafts = (gain * at_best.clamp(max=1) > self.token_price) & pays
        self.longest = pays * self.max_draft_tokens
        if self.probe:
            probes = self._pays(wanting, first_price) & (self.idle >= self.probe) & ~pays
            drafts, self.longest = drafts | probes, self.longest + probes
        self.survival, self.counted, self.steps = torch.ones_like(wanting), 0, torch.zeros_like(self.longest)
        self.decided, self.judged = [wanting * drafts], []
        return torch.minimum(budget, self.longest * drafts)

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
        self.judged.append(self.survival)
        if step.depth >= self.max_draft_tokens:
            return active
        predictions = self.predicted_next or self.predicted
        hope = self.survival * predictions[-1] if predictions else self.survival
        gain = torch.where(active, hope * self.rho[step.depth], 0.0)
        goes_on = self._pays(gain, self.step_price) & (gain > self.token_price)
        self.decided.append(torch.where(goes_on, hope, 0.0))
        return goes_on

    def _pays(self, gain: Tensor, price: Tensor) -> Tensor:
        """() bool, whether a step is worth its price. gain: (batch,) expected tokens of each row."""
        return (gain - self.token_price).clamp(min=0).sum() > price

    # --- prices and ratios, at the start of a round ------------------------------------------------------------------

    def _set_prices(self, live: Tensor) -> Tensor:
        """Set this round's price of a row's token and of a draft step, in tokens → the price of the first step."""
        rows = live.sum().double()
        size = torch.stack([(self.lengths * live).sum().double(), rows, torch.ones_like(rows)])
        later, first, verify, plain = (self.coefficients @ size).unbind()
        _, drafted, verified, _ = self.coefficients[:, 1].unbind()  # one more token
        # What a token costs its row; what a step costs beside.
        by_row = 0.0 if self.host.drafts_stopped else drafted
        step = later if self.host.drafts_stopped else later - rows * drafted
        more = verify - plain  # of any drafts
        if self.host.feeds:
            plain = plain + first - later
        else:
            more = more + first - later
        emitted, steps, tokens, share = (self.totals[1:] / self.totals[0]).unbind()
        seconds = plain + steps * step + rows * tokens * (verified + by_row) + share * more
        least = plain + later if self.host.feeds else plain
        speed = rows * torch.maximum(emitted / seconds.clamp(min=TINY), 1 / least.clamp(min=TINY))  # λ
        # Where padding is verified, one more slot is one more token for all rows.
        by_row, column = (by_row, rows * verified) if self.host.verifies_padding else (by_row + verified, 0.0)
        self.token_price, self.step_price = speed * by_row, speed * (step + column)
        return speed * (more + (column if self.host.feeds else step + column))

    def _ratios(self) -> Tensor:
        """ρ of every depth, (max_draft_tokens,). ρ_d = a·κ_{d−1} + b, and κ_d = g·κ_{d−1} + h. The recursion is written
        as the sum κ_d = Σ_j h_j·Π_{j<i≤d} g_i with h_0 = κ_0 = 1, which takes fewer operations than a loop."""
        accepted, before, after = self.sums
        near, far = self.prior + before, self.prior + after
        a, b = self.prior * self.optimism / near, accepted / near
        g, h = torch.nn.functional.pad(
            torch.stack([self.prior * a, self.prior * b + accepted])[:, :-1] / far[:-1], (1, 0), value=1.0
        )
        depth = self._depths()
        factors = torch.where(depth > depth[:, None], g, 1.0).cumprod(-1)  # (j, d)
        kappa = (h[:, None] * factors).triu().sum(0)
        return a * kappa + b

    def _depths(self) -> Tensor:
        """0, 1, …, (max_draft_tokens,)."""
        return torch.arange(self.max_draft_tokens, device=self.sums.device)

    # --- learning, at the end of a round -----------------------------------------------------------------------------

    def observe(self, outcome: VerifyOutcome) -> None:
        live, accepted, drafted, submitted = outcome.live, outcome.accepted, outcome.drafted, outcome.submitted
        rows = live.sum()
        keep = (1 - 1 / self.memory) ** rows.double()
        # A host may verify less than was drafted: nothing is known of the rest. A token that the policy peeked at and
        # declined was a draft step without a gain.
        looked = submitted + (submitted == drafted) if self.inner.peeks else submitted
        counts = torch.stack([accepted, looked, submitted])
        known = live & (self._depths()[:, None] < counts[:, None])  # (3, depths, batch)
        one, none = torch.ones_like(self.survival), torch.zeros_like(self.survival)
        columns = [one] * self.max_draft_tokens
        for survival in (self.decided, self.judged):
            columns += survival + [none] * (self.max_draft_tokens - len(survival))
        self.sums *= keep
        self.sums += torch.where(known, torch.stack(columns).view(known.shape), 0.0).sum(-1)
        longest = (drafted * live).max()
        # The host may skip asking at the last depth, so `steps` can be too small.
        steps = torch.where(longest > 0, torch.maximum(longest, self.steps), int(self.host.feeds))
        more, _, verified = (counts * live).sum(-1).unbind()
        if self.host.verifies_padding:
            verified = rows * (submitted * live).max()
        self.totals *= keep
        self.totals += torch.stack([rows, rows + more, rows * steps, verified, rows * (longest > 0)])
        self.idle[...] = torch.where(self.longest > 0, 0, self.idle + 1)
        self.lengths[...] = outcome.lengths
        self.record *= 1 - 1 / OWN_MEMORY
        self.record += torch.stack([known[0, 0], known[2, 0] * self.rho[0]])
        if self.inner.learns:
            self.policy.observe(outcome)
