"""The end of a round for the whole batch, decided where the models run: the rule of `BatchStopPolicy` as functions of
tensors, which can be captured in CUDA graphs and asked in chunks. There a dozen operations on a few numbers are one
launch, and to read the numbers is what takes time."""

from __future__ import annotations

import torch
from torch import Tensor

from accept_head.cost import PairCosts
from accept_head.inference.policies.batch_stop import OURS, BatchStopPolicy, Host
from accept_head.inference.policy import DraftPolicy, DraftStep, RowPolicy, Signal, VerifyOutcome

KIND = torch.float64  # as on the host


def batch_stop(policy: DraftPolicy, costs: PairCosts, *, host: Host, device: torch.device) -> DraftPolicy:
    """`policy` within the rule, in the form that suits where it will run. Raises InputError as BatchStopPolicy does."""
    rule = BatchStopPolicy(policy, costs, host=host)
    if device.type == "cuda" and is_of_tensors(rule):
        return DeviceBatchStopPolicy(rule)  # type: ignore[return-value]  # nobody sets what it predicts
    return rule


def is_of_tensors(rule: BatchStopPolicy) -> bool:
    """Whether all that the rule has to know is in tensors: its policy learns nothing, and how many draft forwards a
    round had follows from what was drafted."""
    policy = rule.policy
    learns = getattr(type(policy), "observe", None) is not RowPolicy.observe
    looks = policy.peeks or Signal.DRAWN_HIDDEN in policy.needs
    asked = policy.in_chunks or not policy.stops_early
    return rule.host == OURS and policy.carries is not None and asked and not learns and not looks


class DeviceBatchStopPolicy(RowPolicy):
    """The same as `rule`, one for our own loop, which pads, that `is_of_tensors` and has learnt nothing. All sums are
    tensors to which `observe` adds in place; a round's price and ratios are made anew at its beginning."""

    stops_early = True
    in_chunks = True
    OWN = ("survival", "decided", "judged", "told", "rho", "step_price", "longest")

    def __init__(self, rule: BatchStopPolicy):
        self.policy, self.costs, self.content = rule.policy, rule.costs, rule.content
        self.needs, self.scores, self.lossless = rule.needs, rule.scores, rule.lossless
        self.max_draft_tokens = rule.max_draft_tokens
        self.prior, self.optimism, self.memory, self.probe = rule.prior, rule.optimism, rule.memory, rule.probe
        self.carries = (*self.OWN, *(f"policy.{name}" for name in rule.policy.carries or ()))
        self.inputs, self.keeps = (
            tuple(f"policy.{name}" for name in names) for names in (rule.policy.inputs, rule.policy.keeps)
        )
        # Of each depth: accepted, Σ S·β̂ before the token was drawn, and Σ S after the policy judged it.
        self.accepted, self.before, self.after = (torch.zeros(self.max_draft_tokens, dtype=KIND) for _ in range(3))
        self.totals = torch.zeros(4, dtype=KIND)  # rows, tokens emitted, draft steps, tokens verified besides the last
        self.lengths, self.idle = torch.empty(0, dtype=torch.long), torch.zeros((), dtype=torch.long)
        self.told = 0  # how many of the policy's predictions are in `survival`
        self.survival = self.rho = self.step_price = self.longest = torch.empty(0, dtype=KIND)
        self.decided, self.judged = list[Tensor](), list[Tensor]()
        self.forget()

    def forget(self) -> None:
        """As if it were new, in the same memory: of one row that drafted nothing."""
        for sums in (self.accepted, self.before, self.after, self.totals):
            sums.zero_()
        self.totals[:2] = 1.0

    @property
    def learnt(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return self.accepted, self.before, self.after, self.totals, self.lengths, self.idle

    @property
    def predicted(self) -> list[Tensor]:  # type: ignore[override]
        return self.policy.predicted

    @property
    def predicted_next(self) -> list[Tensor]:  # type: ignore[override]
        return self.policy.predicted_next

    # --- rows --------------------------------------------------------------------------------------------------------

    def start(self, batch: int, device: torch.device) -> None:
        """What was learnt stays, and stays where it is, if that is on the device."""
        self.policy.start(batch, device)
        if self.lengths.shape != (batch,) or self.lengths.device != torch.empty(0, device=device).device:
            self.accepted, self.before, self.after, self.totals, self.idle = (
                each.to(device) for each in (self.accepted, self.before, self.after, self.totals, self.idle)
            )
            self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.lengths.zero_()
        self.idle.zero_()

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        self.policy.admit(rows, lengths)
        self.lengths[rows] = lengths

    def select(self, rows: Tensor) -> None:
        """Between rounds."""
        self.policy.select(rows)
        self.lengths = self.lengths[rows]

    # --- a round -----------------------------------------------------------------------------------------------------

    def start_round(self, live: Tensor) -> Tensor:
        budget = self.policy.start_round(live)
        self.step_price, self.rho = self._price(live), self._ratios()
        wanting = (live & (budget > 0)).to(KIND)
        pays = (wanting * self.rho[0]).sum() > self.step_price
        self.longest = pays * self.max_draft_tokens
        if self.probe:
            probing = (self.idle >= self.probe) & (wanting.sum() > self.step_price)
            self.longest = torch.maximum(self.longest, probing.long())
        self.survival, self.told = torch.ones_like(wanting), 0
        self.decided, self.judged = [wanting * (self.longest > 0)], []
        return torch.minimum(budget, self.longest)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        active = self.policy.keep_drafting(step) if self.policy.stops_early else step.active
        for probability in self.predicted[self.told :]:
            self.survival = self.survival * probability
        self.told = len(self.predicted)
        self.judged.append(self.survival)
        if step.depth >= self.max_draft_tokens:
            return active
        hope = self.survival * self.predicted_next[-1] if self.predicted_next else self.survival
        gain = torch.where(active, hope * self.rho[step.depth], 0.0)
        going = (gain > 0) & (gain.sum() > self.step_price)
        self.decided.append(torch.where(going, hope, 0.0))
        return going

    # --- what is known at its beginning ------------------------------------------------------------------------------

    def _price(self, live: Tensor) -> Tensor:
        """Of a step, in tokens: it is one more token to verify of every live row."""
        rows, context = live.sum().to(KIND), (self.lengths * live).sum().to(KIND)
        drafting, verifying = self.costs.draft_seconds(rows, context), self.costs.verify_seconds(rows, context)
        column = rows * (self.costs.verify_seconds(rows + 1, context) - verifying)
        emitted, steps, verified = self.totals[1:] / self.totals[0]
        seconds = steps * drafting + self.costs.verify_seconds(rows * (1 + verified), context)
        return torch.maximum(rows * emitted / seconds, rows / verifying) * (drafting + column)

    def _ratios(self) -> Tensor:
        """ρ of every depth, (max_draft_tokens,). It is a·κ + b of the depth before, and so is κ = g·κ + h of it, which
        as a sum over all earlier depths, Σ_j h_j·Π_{j<i≤d} g_i with h_0 = κ_0 = 1, takes a few operations in place of
        some a depth."""
        accepted, near, far = self.accepted, self.prior + self.before, self.prior + self.after
        a, b = self.prior * self.optimism / near, accepted / near
        ones = torch.ones_like(accepted[:1])
        g = torch.cat([ones, (self.prior * a / far)[:-1]])
        h = torch.cat([ones, ((self.prior * b + accepted) / far)[:-1]])
        depth = torch.arange(len(g), device=g.device)
        factors = torch.where(depth > depth[:, None], g, 1.0).cumprod(-1)  # (j, d)
        kappa = torch.where(depth >= depth[:, None], h[:, None] * factors, 0.0).sum(0)
        return a * kappa + b

    # --- what is learnt of it ----------------------------------------------------------------------------------------

    def observe(self, outcome: VerifyOutcome) -> None:
        live, submitted = outcome.live, outcome.submitted
        rows = live.sum()
        keep = (1 - 1 / self.memory) ** rows.to(KIND)
        depth = torch.arange(self.max_draft_tokens, device=live.device)[:, None]
        reached = live & (depth < submitted)  # (max_draft_tokens, batch)
        for sums, survival in ((self.before, self.decided), (self.after, self.judged)):
            sums.mul_(keep)
            if survival:
                sums[: len(survival)] += torch.where(reached[: len(survival)], torch.stack(survival), 0.0).sum(-1)
        self.accepted.mul_(keep).add_((live & (depth < outcome.accepted)).sum(-1))
        longest, widest = (outcome.drafted * live).max(), (submitted * live).max()
        emitted = ((outcome.accepted + 1) * live).sum()
        self.totals.mul_(keep).add_(torch.stack([rows, emitted, rows * longest, rows * widest]))
        self.idle.copy_(torch.where(self.longest > 0, 0, self.idle + 1))
        self.lengths.copy_(outcome.lengths)
