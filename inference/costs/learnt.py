"""Costs of forwards learnt from the rounds that are served: `costs=auto`.

    seconds of a draft step         = γ_d + β_d·(tokens fed) + α_d·(context)
    seconds of a round's remainder  = γ_t + β_t·(tokens verified) + α_t·(context)

with non-negative coefficients, from the last rounds. Context and tokens are summed over the rows. The remainder is all
that is not drafting: verification, sampling, and what the host does between rounds. A round without drafts has a γ of
its own, as hosts and kernels go other ways there. So has the first draft step of a round: it may feed more than one
token a row (an EAGLE-3 drafter is fed all that were accepted), and begins what the others go on with. Policies only
ask what a forward costs; that a policy's costs are learnt is the matter of `Drafting`, through which every decode loop
asks it.

What is believed lies in tensors on the policy's device that change in place, so that CUDA graphs can contain it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from accept_head.cost import BatchForwardCost, Quantity
from accept_head.inference.costs.host import PADDED, Host
from accept_head.inference.policy import VerifyOutcome

ROUNDS = 128  # that are remembered
FEW, LONG = 8, 1024  # for so long, the last few of each draft length are
OFTEN, SELDOM = 24, 16  # a fit after each of the first rounds, then after every sixteenth
NEAR, DRIFT = 8, 0.8  # in a fit each eight rounds are less by a share of their mean, as a machine's speed changes
# Draft lengths of the first rounds: no cost is known without some of each kind. They are tried twice, as the first time
# kernels are compiled, which takes a hundred times as long; from that nothing is learnt. (Nor is this told of rounds in
# which graphs are captured.)
TRIAL = (2, 0, 4, 0, 1, 3)
PLAIN = 64  # a round without drafts after so many, to know what it costs
LIKE = 2  # nothing is known of drafts for so many rows if none are remembered of up to so many times more or fewer
NO_LIMIT = 1 << 30
TIMES_OFF = 3.0  # a round that is off by more than so many median deviations counts less, by the square
REFITS, SETTLED = 10, 0.01  # at most; until no weight changes by so much
# Standard deviations of the priors in `fitted`, in forwards. Of drafts and of the target: of the difference between the
# γ of both kinds, and of what the tokens of a forward cost. CONTEXT, for either: of what its context costs.
OF_DRAFTS, OF_TARGET, CONTEXT = (1.0, 0.04), (0.1, 1.0), 0.05
NOISE = 0.1, 0.01  # of a round's seconds, as a share: before it is known, and at least
UNTIMED = 1e-3, 1.0  # seconds of a draft and of a target forward before any was timed
TINY = 1e-12  # seconds


class LearntCosts:
    """PairCosts that follow the clock. host: the decode loop that tells the seconds. Until the first rounds were timed,
    drafting costs next to nothing.

    coefficients: α, β and γ of each forward, as of PairCosts. on_device: the same, (4, 3) float64.
    limit: () int64, the most tokens that a row may draft in this round.
    """

    def __init__(self) -> None:
        self.host: Host = PADDED
        self.on_device, self.limit = torch.zeros(4, 3, dtype=torch.float64), torch.zeros((), dtype=torch.long)
        self.forget()

    def forget(self) -> None:
        """Reset to the initial state, in the same memory."""
        self.draft, self.target = (
            BatchForwardCost(alpha=0.0, beta=0.0, gamma=gamma, r_squared=0.0) for gamma in UNTIMED
        )
        self.first, self.plain = self.draft, self.target
        # Of the rounds: for the average draft step, whether it is a later one than the first (the share of such ones);
        # for the remainder, whether the round drafted. Then tokens, context, seconds, and the round's number. Of the
        # remainder also its rows.
        self.drafts = defaultdict[int, list[tuple[float, ...]]](list)  # by number of steps
        self.rests = list[tuple[float, ...]]()
        self.rounds, self.unknown = 0, False  # and whether nothing is remembered of drafts for so many rows
        self._tell_policy(limit=limit_of(0))

    def start(self, device: torch.device) -> None:
        """A decode loop on this device begins. Keeps what was learnt."""
        self.on_device, self.limit = self.on_device.to(device), self.limit.to(device)

    def draft_seconds(self, rows: Quantity, context_tokens: Quantity, steps: Quantity = 1) -> Quantity:
        """As PairCosts. The first step is not as the others."""
        later, first = (self._seconds(place, rows, context_tokens) for place in (0, 1))
        return steps * later + (steps > 0) * (first - later)

    def verify_seconds(self, batch_tokens: Quantity, context_tokens: Quantity) -> Quantity:
        """As PairCosts."""
        return self._seconds(2, batch_tokens, context_tokens)

    def plain_seconds(self, rows: Quantity, context_tokens: Quantity) -> Quantity:
        """As PairCosts."""
        return self._seconds(3, rows, context_tokens)

    def _seconds(self, forward: int, tokens: Quantity, context: Quantity) -> Tensor:
        alpha, beta, gamma = self.on_device[forward]
        return alpha * context + beta * tokens + gamma

    def _tell_policy(self, limit: int) -> None:
        """Set coefficients and limit. Where nothing is known of drafts, one token is drafted at no price."""
        believed = [[each.alpha, each.beta, each.gamma] for each in (self.draft, self.first, self.target, self.plain)]
        if self.unknown:
            believed[:2], believed[2], limit = [[0.0, 0.0, 0.0]] * 2, [self.plain.alpha, 0.0, self.plain.gamma], 1
        self.coefficients = believed
        self.on_device.copy_(torch.tensor(believed, dtype=torch.float64))
        self.limit.fill_(limit)

    def believed(self) -> dict[str, dict[str, float]]:
        """The coefficients of each forward, in seconds, and the share of the variance that they explain. first: of the
        first draft step of a round. plain: of the target in a round without drafts."""
        return {name: asdict(getattr(self, name)) for name in ("draft", "first", "target", "plain")}

    def __str__(self) -> str:
        """In milliseconds: of a forward, of each of its tokens, and of 1000 tokens of context."""
        return ", ".join(
            f"{name} {1000 * one.gamma:.1f} ms + {1000 * one.beta:.2f} a token + {1e6 * one.alpha:.1f} per 1000 before"
            for name, one in (
                ("draft", self.draft),
                ("its first", self.first),
                ("target", self.target),
                ("plain", self.plain),
            )
        )

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from a round."""
        host, steps = self.host, outcome.draft_forwards
        assert outcome.seconds is not None and outcome.draft_seconds is not None and steps is not None
        of_rows = outcome.on_host[:4] * outcome.on_host[0]
        rows, context, fed, verified = of_rows.sum(-1).tolist()
        longest, ran = int(of_rows[3].max()), int(steps)
        self.rounds += 1
        unknown, fits = self.unknown, False
        if rows and self.rounds > len(TRIAL):
            if ran:
                fed = rows * ran if host.drafts_stopped else fed
                self.drafts[ran].append((1 - 1 / ran, fed / ran, context, outcome.draft_seconds / ran, self.rounds))
            tokens = rows * (1 + longest) if host.verifies_padding else rows + verified
            rest = outcome.seconds - outcome.draft_seconds
            self.rests.append((verified > 0, tokens, context, rest, self.rounds, rows))
            fits = (unknown and verified > 0) or 2 * len(TRIAL) <= self.rounds <= OFTEN or self.rounds % SELDOM == 0
            if fits:
                self._fit()
            if self.rounds >= 2 * len(TRIAL):
                self.unknown = not any(drafts and 1 / LIKE <= rows / of <= LIKE for drafts, *_, of in self.rests)
        limit = limit_of(self.rounds)
        if fits or unknown or self.unknown or limit != limit_of(self.rounds - 1):
            self._tell_policy(limit)

    def _fit(self) -> None:
        self.rests = remembered(self.rests, self.rounds)
        for steps, seen in self.drafts.items():
            self.drafts[steps] = remembered(seen, self.rounds, few=FEW)
        self.target, self.plain = fitted(np.array(self.rests), 0.0, *OF_TARGET)
        if drafts := [each for seen in self.drafts.values() for each in seen]:
            # What a token costs beside a forward is much the same for both models: it is the machine's arithmetic
            # beside its memory. Drafts alone hardly tell, as most steps have about as many rows.
            ratio = self.target.beta / max(self.target.gamma, TINY)
            self.draft, self.first = fitted(np.array(drafts), ratio, *OF_DRAFTS)


def limit_of(rounds: int) -> int:
    """The most tokens that a row may draft after so many rounds: in most, once the costs are known, any."""
    if rounds < 2 * len(TRIAL):
        return TRIAL[rounds % len(TRIAL)]
    return 0 if rounds % PLAIN == 0 else NO_LIMIT


def remembered(seen: Sequence[tuple[float, ...]], now: int, few: int = 0) -> list[tuple[float, ...]]:
    """Of the last ROUNDS until `now`; and the last `few`, which still tell the first step from the others after all
    rounds have drafted alike."""
    last = len(seen) - few
    return [each for place, each in enumerate(seen) if now - each[4] < (ROUNDS if place < last else LONG)]


def fitted(seen: np.ndarray, ratio: float, differ: float, width: float) -> tuple[BatchForwardCost, BatchForwardCost]:
    """The costs of a forward of one kind, and of the other kind, whose γ differs. seen: (n, 5 or more), the share of
    the first kind in a round (1 or 0 if there is one forward), tokens, context, seconds, and the round's number.

    Rounds are compared with those near them: as long as texts grow, or nothing is drafted, the machine may become
    slower, and that must not be taken for their doing. Rounds long past say nothing else. Priors, each with its
    deviation in forwards: both kinds have the same γ (differ), β = ratio·γ of the first kind (width), and context costs
    nothing (CONTEXT).
    """
    share, of_first, seconds, blocks = seen[:, :1], seen[:, 0] > 0, seen[:, 3], seen[:, 4] // NEAR
    near = blocks == np.unique(blocks)[:, None]  # (blocks, n)
    recent = seen[:, 4].max() - seen[:, 4] < ROUNDS
    drift = np.where(recent, DRIFT, 1.0)[:, None]
    features = np.concatenate([share, 1 - share, seen[:, 1:3]], axis=1)
    scale = np.maximum(features.mean(0), 1e-9)
    scale[:2] = 1.0
    level = max(float(np.median(seconds)), TINY)
    priors = np.array([[1, -1, 0, 0], [-ratio * scale[2], 0, 1, 0], [0, 0, 0, 1]]) / [[differ], [width], [CONTEXT]]
    values = np.column_stack([features / scale, seconds])
    # From the beginning, as few rounds have no line that an outlier among them does not bend.
    weights, noise = np.minimum(1, TIMES_OFF * level / np.maximum(seconds, TINY)) ** 2, NOISE[0]
    for _ in range(REFITS):
        rounds = values - drift * means_of_blocks(values, near * weights)
        weighted = rounds * np.sqrt(weights)[:, None]
        terms, _ = nnls(np.concatenate([weighted[:, :4], noise * priors]), np.append(weighted[:, 4], np.zeros(3)))
        off = np.abs(rounds[:, 4] - rounds[:, :4] @ terms)
        usual = np.full(len(off), np.median(off))
        noise = max(1.5 * usual[0] / level, NOISE[1])  # 1.5: of a normal distribution
        for kind in (of_first, ~of_first):  # where most rounds are of one, those of the other are no outliers
            if (kind & recent).any():
                usual[kind] = np.median(off[kind & recent])
        limit = np.maximum(TIMES_OFF * usual, 1e-9)
        before, weights = weights, np.minimum(1, limit / np.maximum(off, limit)) ** 2
        if np.abs(weights - before).max() < SETTLED:
            break
    spread = rounds[:, 4] - np.average(rounds[:, 4], weights=weights)
    r_squared = 1 - float(weights @ off**2) / max(float(weights @ spread**2), 1e-18)
    *gammas, beta, alpha = (terms / scale).tolist()
    one = BatchForwardCost(alpha=alpha, beta=beta, gamma=gammas[0], r_squared=r_squared)
    return one, replace(one, gamma=gammas[1])


def means_of_blocks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """values: (n, columns) → the mean of each one's block. weights: (blocks, n), 0 outside of the block."""
    means: np.ndarray = (weights > 0).T @ (weights @ values / weights.sum(1, keepdims=True))
    return means
