"""Cost-aware stopping: the threshold at which one more token just pays for itself, without a grid (docs/theory.md §5).

Draft one more iff the expected tokens from it exceed λ·t_draft, where λ is the throughput of the policy itself.
Dinkelbach's iteration finds both together. A head's product differs from that expectation: it leaves out the next
token, is one token behind with a lag, and is biased if rejections were weighted. The replay measures the difference.
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
CLEARLY = 0.005  # relative: more than a threshold gains by chance on the traces that it was chosen on


def cost_aware(
    traces: CoupledTraces, policy: ThresholdPolicy, costs: ForwardCosts, *, name: str = "head", k_max: int | None = None
) -> tuple[float, Replayed]:
    """The threshold of a head's rule at which one more token just pays for itself, and its replay with k_min 1. k_max:
    that of the rollouts when left out. The rule's own threshold and bounds are ignored.

    The threshold is h = 1 − λ·t_draft/ρ. ρ is the ratio of accepted tokens to the sum of the statistic, over the
    decisions to draft on. If another threshold is clearly faster on these traces (`CLEARLY`), the factor ρ cannot
    correct the statistic, and that threshold is taken. It is only the second choice, because it follows the data
    closely and keeps less of its gain on other data.

    Raises InputError for a rule whose scores do not predict acceptance, or when k_max exceeds the rollouts.
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
            """Replay the threshold chosen on the rounds of the previous step."""
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
    """The decisions in a round from each position, (P, k_max − 1). Column k decides whether Y_{k+2} is drafted.

    statistic: its value at the decision; infinite if the rule cannot stop yet. accepted: whether all tokens up to
    Y_{k+2} are. possible: whether the round can have Y_{k+2}. free: whether Y_{k+2} costs no draft forward.
    """

    def __init__(self, traces: CoupledTraces, policy: ThresholdPolicy, k_max: int):
        running = running_statistic(traces, policy, score_tokens(traces, policy, floor=0.0))
        judged = running[:, : k_max - 1 - policy.lag]
        unjudged = torch.full((traces.positions, policy.lag), torch.inf)
        self.statistic = torch.cat([unjudged, judged], dim=-1)[:, : k_max - 1]
        self.most = traces.drafts.clamp(max=k_max)
        length = torch.arange(2, k_max + 1)  # of a round that ends with the token
        self.accepted = traces.leading[:, None] >= length
        self.possible = length <= self.most[:, None]
        # A rule that feeds each token to judge it has already run the forward that the last token is drawn from.
        extra_forwards = policy.lag == 0 and Signal.DRAWN_HIDDEN in policy.reads
        self.free = (length == self.most[:, None]) & extra_forwards

    def closed_form(self, starts: Tensor, price: float, level: float) -> float:
        """price/ρ, with ρ of the rounds from `starts` at this level. price: tokens that a draft forward is worth."""
        statistic, accepted, _ = self._asked(starts)
        went_on = statistic >= level
        ratio = float(accepted[went_on].sum() / statistic[went_on].sum()) if went_on.any() else 1.0
        return min(1.0, price / ratio) if ratio > 0 else 1.0

    def best_level(self, starts: Tensor, price: float, _: float) -> float:
        """The level at which rounds from `starts` gain most. The gain is Σ (accepted − price) over all decisions whose
        statistic is not below the level."""
        statistic, accepted, free = self._asked(starts)
        statistic, order = statistic.sort(descending=True)
        worth = (accepted - price * ~free)[order]
        sums = torch.cat([worth.new_zeros(1), worth.cumsum(0)])
        # Half-way between the last statistic that drafts and the first that stops; no level separates equal ones.
        edges = torch.cat([statistic.new_ones(1), statistic, statistic.new_zeros(1)])
        apart = edges[:-1] > edges[1:]
        apart[0] = True
        best = int(torch.where(apart, sums, -torch.inf).argmax())
        return float((edges[best] + edges[best + 1]) / 2)

    def _asked(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(statistic, accepted, free) of all possible decisions in rounds from `starts`, flattened."""
        asked = self.possible[starts] & self.statistic[starts].isfinite()
        tables = (self.statistic.double(), self.accepted.double(), self.free)
        statistic, accepted, free = (table[starts][asked] for table in tables)
        return statistic, accepted, free

    def lengths(self, level: float) -> Tensor:
        """(P,) tokens that a round from each position drafts at this level."""
        return torch.minimum(1 + (self.statistic >= level).sum(-1), self.most)
