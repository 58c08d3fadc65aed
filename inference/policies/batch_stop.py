"""Ends a round for the whole batch: when the expected gain of one more draft step no longer pays for its time.

A draft step takes about as long for one row as for all of them, so a round must not wait for the last row that would
like to go on. Any policy can be wrapped that verifies all it drafts; its rows still stop where it says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.errors import InputError
from accept_head.inference.policies.content import content_hash
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
    """`policy`, and docs/theory.md §5 summed over the rows. After k draft steps, R the rows that it would have go on:

        gain_r = S_r·β̂_r·ρ_{k+1}                       tokens that row r is expected to gain by one more
        the batch goes on  ⇔  Σ_{r∈R} [gain_r − λ·t_one]₊ > λ·t_draft(B),   and row r with it  ⇔  gain_r > λ·t_one
        λ = B·τ / (n·t_draft(B) + t_target(B·(1 + ℓ))), at least B / t_target(B)              tokens/s, Dinkelbach

    S_r: product of what the policy has predicted of the row's tokens, 1 if it predicts nothing. β̂_r: its
    prediction of the token to be drawn next, 1 if it makes none. t_one: seconds of one more token to verify. Where
    the host pads, a step is one more token for all B live rows, and none is cheaper for a row that stops: t_one
    counts B times on the right and not on the left. τ, n, ℓ: tokens that a row emitted, draft steps, and tokens
    that it had verified in a round, averages of the past. Seconds are the model's, not the clock's: tensor-parallel
    ranks decide alike. λ is the speed at what was drafted so far, hence never above the best one: it rises to that,
    from the side on which too much is drafted.

    ρ_d = accepted / Σ S_r·β̂_r over the rows that drafted to depth d, as they were at the decision; those rows
    count as accepted whose first d tokens were. (Nothing is censored: a rejection before d decides.) So it holds
    the acceptance of a token that is not drawn yet, and what is wrong with the predictions on the whole. κ_d is the
    same with S_r once the policy has judged Y_d: κ_d·S_r is the chance that d tokens are accepted, more than which
    the next one cannot gain. Hence ρ_d begins as if of `prior` rows with `optimism`·κ_{d−1}, and κ_d with ρ_d; κ_0
    = 1.

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
        if probe < 0:
            raise InputError(f"batch-stop probe is {probe}, expected a number of rounds or 0")
        if not 1 < memory < float("inf"):
            raise InputError(f"batch-stop memory is {memory}, expected a number of rows above 1")
        self.policy, self.costs, self.host = policy, costs, host
        self.content = content_hash(policy)  # so that two with different policies inside have different hashes
        self.needs, self.scores, self.peeks, self.lossless = policy.needs, policy.scores, policy.peeks, policy.lossless
        self.max_draft_tokens, self.by_tenant = policy.max_draft_tokens, policy.by_tenant
        self.prior, self.optimism, self.memory, self.probe = prior, optimism, memory, probe
        # Of each depth: accepted, Σ S·β̂ before the token was drawn, and Σ S after the policy judged it.
        self.accepted, self.before, self.after = ([0.0] * self.max_draft_tokens for _ in range(3))
        # Sums over rows and rounds: rows, tokens emitted, draft steps, tokens verified besides the last one. At first
        # as of one row that drafted nothing.
        self.totals = [1.0, 1.0, float(host.feeds), 0.0]
        self.idle = 0  # rounds without drafts in a row

    # All that is decided here is decided on the host, row by row: a dozen operations on a few numbers are dearer on any
    # device, and as arrays, than to read the numbers (in vLLM on a CPU 0.5 ms a round and 0.15 ms a token, with caches
    # that the models have swept), and the loop waits for the device after each token anyway, to see who goes on.

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """What was learnt stays."""
        self.policy.start(batch, device)
        self.idle, self.lengths = 0, [0] * batch
        # Of each depth of this round, a row: S·β̂ if it went on to it, else 0; and S once it was judged.
        self.decided, self.judged = list[list[float]](), list[list[float]]()

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.policy.admit(rows, lengths)
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self.lengths[row] = length

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        self.policy.set_tenants(rows, keys)

    def select(self, rows: Tensor) -> None:
        self.policy.select(rows)
        places = rows.tolist()
        self.lengths = [self.lengths[row] for row in places]
        self.decided, self.judged = (
            [[survival[row] for row in places] for survival in part] for part in (self.decided, self.judged)
        )

    # --- a round -----------------------------------------------------------------------------------------------------

    def start_round(self, live: Tensor) -> Tensor:
        budget = self.policy.start_round(live)
        self.predicted, self.predicted_next = self.policy.predicted, self.policy.predicted_next
        return budget.clamp(max=self.longest(live.tolist(), budget.tolist()))

    def longest(self, alive: Sequence[bool], budget: Sequence[int]) -> int:
        """A round begins: most tokens that any of its rows may draft."""
        self.decided, self.judged, self.counted, self.steps = [], [], 0, 0
        self._set_prices(sum(alive), sum(itertools.compress(self.lengths, alive)))
        self._set_ratios()
        wanting = [float(a and tokens > 0) for a, tokens in zip(alive, budget, strict=True)]
        length = self.max_draft_tokens if self._pays([row * self.rho[0] for row in wanting], self.first_price) else 0
        if length == 0 and 0 < self.probe <= self.idle and self._pays(wanting, self.first_price):
            length = 1
        self.idle = 0 if length else self.idle + 1
        self.survival = [1.0] * len(alive)
        self.decided.append(wanting if length else [0.0] * len(alive))
        return length

    def draw_next(self, step: DraftStep) -> Tensor:
        self.steps = step.depth
        return self.policy.draw_next(step)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        active = self.policy.keep_drafting(step) if self.policy.stops_early else step.active
        # A policy that looks ahead was shown the state at the drawn token: one more forward has taken place.
        self.steps = max(self.steps, step.depth + (step.drawn_hidden is not None))
        judged = [probability.tolist() for probability in self.predicted[self.counted :]]
        self.counted = len(self.predicted)
        following = self.predicted_next[-1].tolist() if self.predicted_next else None
        wanting = active.tolist()
        going = self.narrow(step.depth, wanting, judged, following)
        return active if going == wanting else torch.tensor(going, device=active.device)

    def narrow(
        self,
        depth: int,
        wanting: list[bool],
        judged: Sequence[Sequence[float]],
        following: Sequence[float] | None,
    ) -> list[bool]:
        """Which of the rows that the policy would have go on after Y_depth do. judged: P̂ of the tokens that the policy
        has judged since the last time, the rows' each. following: β̂ of the next token, of a policy that looks ahead."""
        self.steps = max(self.steps, depth)
        for probability in judged:
            self.survival = [s * p for s, p in zip(self.survival, probability, strict=True)]
        self.judged.append(self.survival)
        if depth >= self.max_draft_tokens:
            return wanting
        hope, rho = self.survival, self.rho[depth]
        if following is not None:
            hope = [s * p for s, p in zip(hope, following, strict=True)]
        gain = [h * rho if a else 0.0 for h, a in zip(hope, wanting, strict=True)]
        pays = self._pays(gain, self.step_price)
        going = [pays and g > self.token_price for g in gain]
        self.decided.append([h if g else 0.0 for h, g in zip(hope, going, strict=True)])
        return going

    def _pays(self, gain: Sequence[float], price: float) -> bool:
        """Whether a step with this gain of each row is worth its price."""
        return sum(max(0.0, g - self.token_price) for g in gain) > price

    # --- what is known at its beginning ------------------------------------------------------------------------------

    def _set_prices(self, rows: int, context: int) -> None:
        """What time is worth this round, in tokens. rows: live ones. context: the tokens of all of them."""
        drafting, verifying = self.costs.draft_seconds(rows, context), self.costs.verify_seconds(rows, context)
        one = self.costs.verify_seconds(rows + 1, context) - verifying
        emitted, steps, verified = (total / self.totals[0] for total in self.totals[1:])
        seconds = steps * drafting + self.costs.verify_seconds(rows * (1 + verified), context)
        plain = verifying + self.host.feeds * drafting
        speed = max(rows * emitted / seconds, rows / plain)  # λ
        column = rows * one if self.host.padded else 0.0
        self.token_price = 0.0 if self.host.padded else speed * one
        self.step_price = speed * (drafting + column)
        self.first_price = speed * column if self.host.feeds else self.step_price

    def _set_ratios(self) -> None:
        """ρ of every depth."""
        self.rho, kappa = list[float](), 1.0
        for accepted, before, after in zip(self.accepted, self.before, self.after, strict=True):
            self.rho.append((self.prior * self.optimism * kappa + accepted) / (self.prior + before))
            kappa = (self.prior * self.rho[-1] + accepted) / (self.prior + after)

    # --- what is learnt of it ----------------------------------------------------------------------------------------

    def observe(self, outcome: VerifyOutcome) -> None:
        self.lengths = outcome.lengths.tolist()
        told = (outcome.drafted.tolist(), outcome.submitted.tolist(), outcome.accepted.tolist())
        rounds = [
            (row, *tokens) for row, (live, *tokens) in enumerate(zip(outcome.live.tolist(), *told, strict=True)) if live
        ]
        keep = (1 - 1 / self.memory) ** len(rounds)
        for sums in (self.accepted, self.before, self.after, self.totals):
            sums[:] = [keep * value for value in sums]
        for row, drafted, submitted, accepted in rounds:
            # A host may verify less than was drafted: of the rest nothing is known. A token that the policy peeked at
            # and declined was a step that gained nothing.
            looked = submitted + (self.peeks and submitted == drafted)
            for depth, survival in enumerate(self.decided[:looked]):
                self.before[depth] += survival[row]
            for depth, survival in enumerate(self.judged[:submitted]):
                self.after[depth] += survival[row]
            for depth in range(min(accepted, len(self.decided))):
                self.accepted[depth] += 1
        longest = max((drafted for _, drafted, _, _ in rounds), default=0)
        # A host may not ask at the last depth.
        steps = max(longest, self.steps) if longest else int(self.host.feeds)
        verified = [submitted for _, _, submitted, _ in rounds]
        self.totals[0] += len(rounds)
        self.totals[1] += sum(accepted + 1 for *_, accepted in rounds)
        self.totals[2] += len(rounds) * steps
        self.totals[3] += len(rounds) * max(verified, default=0) if self.host.padded else sum(verified)
        self.decided, self.judged = [], []
        self.policy.observe(outcome)
