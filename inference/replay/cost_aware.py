"""Cost-aware stopping: the threshold at which one more token just pays for itself, without a grid (docs/theory.md §5).

Draft one more iff the tokens expected from it exceed λ·t_draft, λ the throughput of the policy itself: Dinkelbach's
iteration finds both together. What a head predicts is not quite that: its product leaves out the next token, is one
token behind with a lag, and leans to one side where rejections were weighted. The replay says by how much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accept_head.cost import ForwardCosts
from accept_head.errors import InputError
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import Signal
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.dinkelbach import dinkelbach
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.thresholds import Setting, replay_thresholds, running_statistic
from accept_head.inference.replay.walk import Replayed, round_starts

DIGITS = 4  # of a threshold
CLEARLY = 0.005  # relative: faster by more than what a threshold gains by chance on the traces it was chosen on


def cost_aware(
    traces: CoupledTraces, policy: ThresholdPolicy, costs: ForwardCosts, *, name: str = "head", k_max: int | None = None
) -> tuple[float, Replayed]:
    """The threshold of a head's rule at which one more token just pays for itself, and its replay; k_min is 1. k_max:
    as long as the rollouts are, when left out. The rule's own threshold and bounds are not looked at.

    It is h = 1 − λ·t_draft/ρ, with ρ the ratio of tokens that were accepted to what the statistic said where the round
    went on. Only where one number cannot mend the statistic, so that another threshold is clearly faster on these
    traces (`CLEARLY`), it is that one: it follows the data closely, and less of what it gains here is gained elsewhere.

    Raises InputError for a rule whose scores are no predictions of acceptance, or when k_max exceeds the rollouts.
    """
    if not policy.predicts or policy.level_of(0.25) != 0.75:
        raise InputError(
            f"cost-aware stopping needs predictions of acceptance, which {type(policy).__name__} does not make"
        )
    longest = traces.k_max if k_max is None else k_max
    decisions = _Decisions(traces, policy, longest)

    def converged(choose: Callable[[Tensor, float, float], float]) -> Replayed:
        level, lengths = 0.0, decisions.most

        def at(speed: float) -> Replayed:
            """Choose on the rounds of the step before."""
            nonlocal level, lengths
            chosen = choose(round_starts(traces, lengths), speed * costs.t_draft, level)
            setting = Setting(threshold=round(1 - chosen, DIGITS), k_max=longest)
            level = policy.level_of(setting.threshold)
            lengths = decisions.lengths(level)
            return replay_thresholds(traces, policy, [setting], name)[0]

        return dinkelbach(at, costs)

    closed, best = converged(decisions.closed_form), converged(decisions.best_level)
    speeds = [float(throughputs(replayed.counts.sum(0), costs)) for replayed in (closed, best)]
    found = best if speeds[1] > speeds[0] * (1 + CLEARLY) else closed
    return found.params["threshold"], found


class _Decisions:
    """What there is to decide in a round from each position: (P, k_max − 1), column k of it whether Y_{k+2} is drafted.

    statistic: as it is when that is decided; infinite where the rule cannot stop yet. accepted: whether all tokens up
    to that one are. possible: whether the round can go so far. free: whether it costs no draft forward.
    """

    def __init__(self, traces: CoupledTraces, policy: ThresholdPolicy, k_max: int):
        running = running_statistic(traces, policy, score_tokens(traces, policy, floor=0.0))
        judged = running[:, : k_max - 1 - policy.lag]
        unjudged = torch.full((traces.positions, policy.lag), torch.inf)
        self.statistic = torch.cat([unjudged, judged], dim=-1)[:, : k_max - 1]
        self.most = traces.drafts.clamp(max=k_max)
        length = torch.arange(2, k_max + 1)  # of the round that drafts it
        self.accepted = traces.leading[:, None] >= length
        self.possible = length <= self.most[:, None]
        # Who feeds a token just to judge it has paid for the last one when it comes to that.
        extra_forwards = policy.lag == 0 and Signal.DRAWN_HIDDEN in policy.reads
        self.free = (length == self.most[:, None]) & extra_forwards

    def closed_form(self, starts: Tensor, price: float, level: float) -> float:
        """price/ρ, ρ of the rounds from `starts` at the present level. price: tokens that a draft forward is worth."""
        statistic, accepted, _ = self._asked(starts)
        went_on = statistic >= level
        ratio = float(accepted[went_on].sum() / statistic[went_on].sum()) if went_on.any() else 1.0
        return min(1.0, price / ratio) if ratio > 0 else 1.0

    def best_level(self, starts: Tensor, price: float, _: float) -> float:
        """The level at which rounds from `starts` gain most: Σ (accepted − price) over all decisions to draft a token
        whose statistic is not below it."""
        statistic, accepted, free = self._asked(starts)
        statistic, order = statistic.sort(descending=True)
        worth = (accepted - price * ~free)[order]
        sums = torch.cat([worth.new_zeros(1), worth.cumsum(0)])
        # Half-way between the last one drafted and the first one not; equal ones cannot be told apart.
        edges = torch.cat([statistic.new_ones(1), statistic, statistic.new_zeros(1)])
        apart = edges[:-1] > edges[1:]
        apart[0] = True
        best = int(torch.where(apart, sums, -torch.inf).argmax())
        return float((edges[best] + edges[best + 1]) / 2)

    def _asked(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(statistic, accepted, free) of all decisions that there could be in rounds from `starts`, in one row."""
        asked = self.possible[starts] & self.statistic[starts].isfinite()
        tables = (self.statistic.double(), self.accepted.double(), self.free)
        statistic, accepted, free = (table[starts][asked] for table in tables)
        return statistic, accepted, free

    def lengths(self, level: float) -> Tensor:
        """(P,) tokens that a round from each position drafts at this level."""
        return torch.minimum(1 + (self.statistic >= level).sum(-1), self.most)
