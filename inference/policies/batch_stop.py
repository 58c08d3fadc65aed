"""Ends a round for the whole batch: when the expected gain of one more draft step no longer pays for its time.

A draft step takes about as long for one row as for all of them, so a round must not wait for the last row that would
like to go on. Any policy can be wrapped that verifies all it drafts; its rows still stop where it says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policies.goodput import Probe
from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, VerifyOutcome


@dataclass(frozen=True)
class Host:
    """What a decode loop spends besides the policy's wishes. padded: the target verifies as many tokens of every row as
    of the row that drafted most. feeds: the draft's first forward takes place in a round without drafts, too."""

    padded: bool
    feeds: bool


OURS = Host(padded=True, feeds=False)
VLLM = Host(padded=False, feeds=True)


class BatchStopPolicy(RowPolicy):
    """`policy`, and equations §5 summed over the rows. After k draft steps, R the rows that it would have go on:

        gain_r = S_r·ρ_{k+1}                           tokens that row r is expected to gain by one more
        the batch goes on  ⇔  Σ_{r∈R} [gain_r − λ·t_one]₊ > λ·t_draft(B),   and row r with it  ⇔  gain_r > λ·t_one
        λ = B·τ / (n·t_draft(B) + t_target(B·(1 + ℓ))), at least B / t_target(B)              tokens/s, Dinkelbach

    S_r: product of what the policy has predicted of the row's tokens, 1 if it predicts nothing. t_one: seconds of one
    more token to verify. Where the host pads, a step is one more token for all B live rows, and none is cheaper for a
    row that stops: t_one counts B times on the right and not on the left. τ, n, ℓ: tokens that a row emitted, draft
    steps, and tokens that it had verified in a round, averages of the past. Seconds are the model's, not the clock's:
    tensor-parallel ranks decide alike. λ is the speed at what was drafted so far, hence never above the best one: it
    rises to that, from the side on which too much is drafted.

    ρ_d = accepted / Σ S_r over the rows that drafted to depth d, with S_r as it was at the decision; those rows count
    as accepted whose first d tokens were. (Nothing is censored: a rejection before d decides.) So it holds the
    acceptance of a token that is not drawn yet, and what is wrong with the predictions on the whole. κ_d is the same
    with S_r once the policy has judged Y_d: κ_d·S_r is the chance that d tokens are accepted, more than which the next
    one cannot gain. Hence ρ_d begins as if of `prior` rows with `optimism`·κ_{d−1}, and κ_d with ρ_d; κ_0 = 1.

    Never absorbing: all sums are forgotten, a share of 1/`memory` a row and round, whether the depth was reached or
    not. ρ_d of a depth that was given up thus returns to optimism·κ_{d−1}, until the depth is tried again; only one at
    a time, as κ_d, not known yet either, is as low as ρ_d then. K = 0 is left in this way, too, and no later than after
    `probe` rounds without drafts (0: no such limit) one token is drafted; not if even a token that is sure to be
    accepted would cost more time than it saves, since then no acceptance could make drafting right.

    The policy's k_min says how soon *it* may stop a row. The batch's end does not wait for it: a bound that suits one
    row is too dear for many.

    Global by design: ρ, κ, τ, n and ℓ are of all rows together, and outlive `start`. Rows have no state but their
    lengths and the policy's own. Raises InputError for a policy that drafts nothing, or that trims: what it drops would
    depend on how deep the batch goes, and so on what is drawn later.
    """

    stops_early = True

    def __init__(
        self,
        policy: DraftPolicy,
        costs: PairCosts,
        *,
        prior: float = 20.0,
        optimism: float = 0.9,
        memory: float = 500.0,
        probe: int = 32,
        host: Host = OURS,
    ):
        if not policy.max_draft_tokens:
            raise InputError(f"costs are given to policy {type(policy).__name__}, which drafts nothing")
        if policy.trims:
            raise InputError(
                f"costs are given to policy {type(policy).__name__}, which drops drawn tokens; expected one that "
                "verifies all it drafts"
            )
        if not 0 < prior < float("inf"):
            raise InputError(f"batch-stop prior is {prior}, expected a positive number of rows")
        if not 0 < optimism <= 1:
            raise InputError(f"batch-stop optimism is {optimism}, expected a share above 0 and at most 1")
        if not 1 < memory < float("inf"):
            raise InputError(f"batch-stop memory is {memory}, expected a number of rows above 1")
        self.policy, self.costs, self.host = policy, costs, host
        self.content = content_hash(policy)  # so that two with different policies inside have different hashes
        self.needs, self.scores, self.peeks, self.lossless = policy.needs, policy.scores, policy.peeks, policy.lossless
        self.max_draft_tokens = policy.max_draft_tokens
        self.prior, self.optimism, self.memory = prior, optimism, memory
        self.probe = Probe("batch-stop", probe)
        # Of each depth: accepted, and Σ S before and after the policy judged the token.
        self.accepted, self.before, self.after = torch.zeros(3, self.max_draft_tokens)
        # Sums over rows and rounds: rows, tokens emitted, draft steps, tokens verified besides the last one. At first
        # as of one row that drafted nothing.
        self.totals = torch.tensor([1.0, 1.0, float(host.feeds), 0.0])

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """What was learnt stays."""
        self.policy.start(batch, device)
        self.probe.start(device)
        for name in ("accepted", "before", "after", "totals"):
            setattr(self, name, getattr(self, name).to(device))
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        # Of each depth of this round, (batch,): S of the rows that went on to it, and S once it was judged.
        self.decided, self.judged = list[Tensor](), list[Tensor]()

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.policy.admit(rows, lengths)
        self.lengths[rows] = lengths

    def select(self, rows: Tensor) -> None:
        self.policy.select(rows)
        self.lengths = self.lengths[rows]
        self.decided, self.judged = ([survival[rows] for survival in part] for part in (self.decided, self.judged))

    # --- a round -----------------------------------------------------------------------------------------------------

    def start_round(self, live: Tensor) -> Tensor:
        budget = self.policy.start_round(live)
        self.predicted = self.policy.predicted
        self.survival, self.kappa = torch.ones(live.shape, device=live.device), torch.ones((), device=live.device)
        self.decided, self.judged, self.counted, self.steps = [], [], 0, 0
        self._set_prices(live.sum(), torch.where(live, self.lengths, 0).sum())
        wanting = live & (budget > 0)
        pays = self._pays(self._gain(1, wanting), self.first_price)
        allowed = self._pays(wanting.float(), self.first_price)
        length = self.probe.length(torch.where(pays, self.max_draft_tokens, 0), allowed)
        self.decided[0] = torch.where(length > 0, self.decided[0], 0.0)
        return torch.minimum(budget, length)

    def draw_next(self, step: DraftStep) -> Tensor:
        self.steps = step.depth
        return self.policy.draw_next(step)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        active = self.policy.keep_drafting(step) if self.policy.stops_early else step.active
        # A policy that looks ahead was shown the state at the drawn token: one more forward has taken place.
        self.steps = max(self.steps, step.depth + (step.drawn_hidden is not None))
        self._judge(step.depth)
        if step.depth >= self.max_draft_tokens:
            return active
        gain = self._gain(step.depth + 1, active)
        going = (gain > self.token_price) & self._pays(gain, self.step_price)
        self.decided[-1] = torch.where(going, self.decided[-1], 0.0)
        return active & going

    def _gain(self, depth: int, active: Tensor) -> Tensor:
        """(batch,) tokens that each active row is expected to gain by Y_depth."""
        self.decided.append(torch.where(active, self.survival, 0.0))
        hoped = self.prior * self.optimism * self.kappa
        self.rho = (hoped + self.accepted[depth - 1]) / (self.prior + self.before[depth - 1])
        return self.decided[-1] * self.rho

    def _judge(self, depth: int) -> None:
        """Take in what the policy has predicted since, now that Y_depth is drawn."""
        for probability in self.predicted[self.counted :]:
            self.survival = self.survival * probability
        self.counted = len(self.predicted)
        self.judged.append(self.survival)
        self.kappa = (self.prior * self.rho + self.accepted[depth - 1]) / (self.prior + self.after[depth - 1])

    def _pays(self, gain: Tensor, price: Tensor) -> Tensor:
        """() bool, whether a step with this gain, (batch,), is worth its price, ()."""
        return (gain - self.token_price).clamp(min=0).sum() > price

    # --- prices, in tokens -------------------------------------------------------------------------------------------

    def _set_prices(self, rows: Tensor, context: Tensor) -> None:
        """What time is worth this round. rows, context: (), live rows and the tokens of all of them."""
        drafting, verifying = self.costs.draft_seconds(rows, context), self.costs.verify_seconds(rows, context)
        one = self.costs.verify_seconds(rows + 1, context) - verifying
        emitted, steps, verified = self.totals[1:] / self.totals[0]
        seconds = steps * drafting + self.costs.verify_seconds(rows * (1 + verified), context)
        plain = verifying + self.host.feeds * drafting
        speed = torch.maximum(rows * emitted / seconds, rows / plain)  # λ
        column = rows * one if self.host.padded else 0 * one
        self.token_price = 0 * one if self.host.padded else speed * one
        self.step_price = speed * (drafting + column)
        self.first_price = speed * column if self.host.feeds else self.step_price

    def observe(self, outcome: VerifyOutcome) -> None:
        live, submitted = outcome.live, outcome.submitted
        rows = live.sum()
        longest, widest = (torch.where(live, tokens, 0).max() for tokens in (outcome.drafted, submitted))
        keep = (1 - 1 / self.memory) ** rows
        self.accepted, self.before, self.after = keep * self.accepted, keep * self.before, keep * self.after
        depths = torch.arange(1, len(self.decided) + 1, device=live.device)
        # A host may verify less than was drafted: of the rest nothing is known.
        tried = live[:, None] & (depths <= submitted[:, None])
        # A token that the policy peeked at and declined was a step that gained nothing.
        declined = self.peeks & (submitted == outcome.drafted)
        looked = live[:, None] & (depths <= (submitted + declined)[:, None])
        self.accepted[: len(depths)] += (tried & (depths <= outcome.accepted[:, None])).sum(0)
        self._sum(self.before, self.decided, looked)
        self._sum(self.after, self.judged, tried)
        # A host may not ask at the last depth.
        steps = torch.where(longest > 0, longest.clamp(min=self.steps), int(self.host.feeds))
        emitted = ((outcome.accepted + 1) * live).sum()
        verified = rows * widest if self.host.padded else (submitted * live).sum()
        self.totals = keep * self.totals + torch.stack([rows, emitted, rows * steps, verified])
        self.decided, self.judged, self.lengths = [], [], outcome.lengths
        self.policy.observe(outcome)

    @staticmethod
    def _sum(sums: Tensor, survivals: list[Tensor], counted: Tensor) -> None:
        """Add survivals, (rows,) a depth, of those that are counted, (rows, depths), to sums, (k_max,)."""
        if n := len(survivals):
            sums[:n] += torch.where(counted[:, :n], torch.stack(survivals, dim=1), 0.0).sum(0)
