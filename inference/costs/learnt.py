"""Costs of forwards learnt from the rounds that are served: `costs=auto`.

    seconds of a draft step         = γ_d + β_d·(tokens fed) + α_d·(context)
    seconds of a round's remainder  = γ_t + β_t·(tokens verified) + ω_t·(these in whole blocks) + α_t·(context)

with non-negative coefficients, from the last rounds. Context and tokens are summed over the rows. The remainder is all
that is not drafting: verification, sampling, and what the host does between rounds.

Where arithmetic comes in blocks of tokens (`Host.block`), a few deep drafts cost as much as the block that they begin.
A round without drafts has a γ of its own, as hosts and kernels go other ways there. So has the first draft step of a
round: it may feed more than one token a row (an EAGLE-3 drafter is fed all that were accepted), and begins what the
others go on with.

Policies only ask what a forward costs; that a policy's costs are learnt is the matter of `Drafting`, through which
every decode loop asks it.

What is believed lies in tensors on the policy's device that change in place, so that CUDA graphs can contain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from accept_head.cost import BatchForwardCost, Quantity
from accept_head.inference.costs.host import PADDED, Host
from accept_head.inference.policy import VerifyOutcome

ROUNDS, LONG = 128, 512  # that are remembered, and of those with about as many rows as there are now
# A fit after each of the first rounds, then after every sixteenth. Rounds are looked at together, as Python that has
# not run since the last forwards takes several times as long as what has just run.
OFTEN, SELDOM = 24, 16
NEAR, DRIFT = 8, 0.8  # in a fit each eight rounds are less by a share of their mean, as a machine's speed changes
# Draft lengths of the first rounds: no cost is known without some of each kind. They are tried twice, as the first time
# kernels are compiled, which takes a hundred times as long; from that nothing is learnt. (Nor is this told of rounds in
# which graphs are captured.)
TRIAL = (2, 0, 4, 0, 1, 3)
PLAIN = 64  # a round without drafts after so many, to know what it costs
LIKE = 2  # up to so many times more or fewer rows are about as many; if of those none drafted lately, nothing is known
# Drafts that have to be remembered, or some are tried: seconds are noisy, and a few slow rounds must not end drafting.
# TRIES: in rounds without drafts, what so many drafts may take. But no more of them than ENOUGH.
TRIES, ENOUGH = 16.0, 32
NO_LIMIT = 1 << 30
TIMES_OFF = 3.0  # a round that is off by more than so many median deviations counts less, by the square
REFITS, SETTLED = 10, 0.01  # at most; until no weight changes by so much
# Standard deviations of the priors in `fitted`, in forwards. Of drafts and of the target: of the difference between the
# γ of both kinds, and of what the context of a forward costs, its tokens, and the target's in blocks.
OF_DRAFTS, OF_TARGET = (1.0, 0.05, 0.04), (0.1, 0.05, 0.3, 0.2)
NOISE = 0.1, 0.01  # of a round's seconds, as a share: before it is known, and at least
UNTIMED = 1e-3, 1.0  # seconds of a draft and of a target forward before any was timed
TINY = 1e-12  # seconds


class Timed(NamedTuple):
    """A part of a round. kind: of its forwards, the share that is of the first kind. number: of the round. rows: that
    took part. context, tokens: of a forward, of all rows. in_blocks: the target's tokens in whole blocks, 0 where there
    are none."""

    kind: float
    seconds: float
    number: int
    rows: float
    context: float
    tokens: float
    in_blocks: float = 0.0


class LearntCosts:
    """PairCosts that follow the clock. host: the decode loop that tells the seconds. Until the first rounds were timed,
    drafting costs next to nothing.

    coefficients: as of PairCosts. on_device: those of the forwards, (4, 3) float64.
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
        self.first, self.plain, self.by_block = self.draft, self.target, 0.0
        # Of the rounds: the average draft step, whose kind is whether it is a later one than the first; and the
        # remainder, whose kind is whether the round drafted.
        self.drafts, self.rests = list[Timed](), list[Timed]()
        self.rounds, self.unknown = 0, False  # and whether too little is remembered of drafts for so many rows
        # (number, outcome's counts, draft forwards, seconds, those of drafting); and how many rows the last one had
        self.waiting, self.rows = list[tuple[int, np.ndarray, int, float, float]](), 0
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
        """Set coefficients and limit. Where too little is known of drafts, they are free, of one and two tokens in
        turn."""
        forwards = self.draft, self.first, self.target, self.plain
        believed = [*([each.alpha, each.beta, each.gamma] for each in forwards), [0.0, self.by_block, 0.0]]
        if self.unknown:
            free = [0.0, 0.0, 0.0]
            believed = [free, free, [self.plain.alpha, 0.0, self.plain.gamma], believed[3], free]
            limit = 2 - self.rounds % 2
        self.coefficients = believed
        self.on_device.copy_(torch.tensor(believed[:4], dtype=torch.float64))
        self.limit.fill_(limit)

    def believed(self) -> dict[str, dict[str, float]]:
        """The coefficients of each forward, in seconds, and the share of the variance that they explain. first: of the
        first draft step of a round. plain: of the target in a round without drafts. by_block: the part of the target's
        beta that goes by blocks."""
        found = {name: asdict(getattr(self, name)) for name in ("draft", "first", "target", "plain")}
        return found | {"target": found["target"] | {"by_block": self.by_block}}

    def __str__(self) -> str:
        """In milliseconds: of a forward, of each of its tokens, and of 1000 tokens of context."""
        forwards = {"draft": self.draft, "its first": self.first, "target": self.target, "plain": self.plain}
        parts = [
            f"{name} {1000 * one.gamma:.1f} ms + {1000 * one.beta:.2f} a token + {1e6 * one.alpha:.1f} per 1000 before"
            for name, one in forwards.items()
        ]
        return ", ".join([*parts, f"in blocks {1000 * self.by_block:.2f} of the target's"])

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from a round: with later ones, as long as all have as many rows and enough is known."""
        counts, steps = outcome.on_host, outcome.draft_forwards
        assert outcome.seconds is not None and outcome.draft_seconds is not None and steps is not None
        self.rounds += 1
        self.waiting.append((self.rounds, counts, int(steps), outcome.seconds, outcome.draft_seconds))
        rows, before = int(counts[0].sum()), self.rows
        limit, unknown, fits = limit_of(self.rounds), self.unknown, False
        if len(self.waiting) == SELDOM or unknown or self.rounds <= OFTEN or rows not in (before, 0):
            fits = self._look_at_waiting()
        if fits or unknown or self.unknown or limit != limit_of(self.rounds - 1):
            self._tell_policy(limit)

    def _look_at_waiting(self) -> bool:
        """Remember the rounds that wait → whether all that is remembered was fitted."""
        host, unknown, fits = self.host, self.unknown, False
        for number, counts, ran, seconds, draft_seconds in self.waiting:
            of_rows = counts[:4] * counts[0]
            rows, context, fed, verified = of_rows.sum(-1).tolist()
            if not rows or number <= len(TRIAL):
                continue
            self.rows = rows
            if ran:
                fed = rows * ran if host.drafts_stopped else fed
                self.drafts.append(Timed(1 - 1 / ran, draft_seconds / ran, number, rows, context, fed / ran))
            slots = host.slots(rows, of_rows[3])
            tokens, in_blocks = rows + (slots if host.verifies_padding else verified), (host.block > 1) * (rows + slots)
            rest = seconds - draft_seconds
            self.rests.append(Timed(float(verified > 0), rest, number, rows, context, tokens, in_blocks))
            fits |= (unknown and verified > 0) or 2 * len(TRIAL) <= number <= OFTEN or number % SELDOM == 0
        self.waiting.clear()
        if fits:
            self._fit(self.rows)
        if self.rests and self.rounds >= 2 * len(TRIAL):
            drafted, rows = [each for each in self.rests if each.kind], self.rows
            lately = (each for each in reversed(drafted) if self.rounds - each.number < ROUNDS)
            few = len(drafted) < self._enough(rows, self.rests[-1].context)
            self.unknown = few or not any(is_like(each, rows) for each in lately)
        return fits

    def _enough(self, rows: float, context: float) -> float:
        """How many drafts have to be remembered."""
        alone = self.plain.seconds(context_tokens=context, batch_tokens=rows)
        drafted = self.first.seconds(context_tokens=context, batch_tokens=rows)
        drafted += self.target.seconds(context_tokens=context, batch_tokens=2 * rows)
        return min(ENOUGH, TRIES * alone / max(drafted - alone, TINY))

    def _fit(self, rows: float) -> None:
        self.rests, self.drafts = (remembered(seen, self.rounds, rows) for seen in (self.rests, self.drafts))
        self.target, self.plain, self.by_block = fitted(self.rests, 0.0, *OF_TARGET)
        if self.drafts:
            # What a token costs beside a forward is much the same for both models: it is the machine's arithmetic
            # beside its memory. Drafts alone hardly tell, as most steps have about as many rows. What goes by blocks is
            # left out: a draft step's few tokens begin no further one.
            ratio = (self.target.beta - self.by_block) / max(self.target.gamma, TINY)
            self.draft, self.first, _ = fitted(self.drafts, ratio, *OF_DRAFTS)


def limit_of(rounds: int) -> int:
    """The most tokens that a row may draft after so many rounds: in most, once the costs are known, any."""
    if rounds < 2 * len(TRIAL):
        return TRIAL[rounds % len(TRIAL)]
    return 0 if rounds % PLAIN == 0 else NO_LIMIT


def remembered(seen: Sequence[Timed], now: int, rows: float) -> list[Timed]:
    """Of the last ROUNDS until `now`; and those of the last LONG that had about as many rows."""
    return [each for each in seen if now - each.number < (LONG if is_like(each, rows) else ROUNDS)]


def is_like(seen: Timed, rows: float) -> bool:
    return 1 / LIKE <= rows / seen.rows <= LIKE


def fitted(
    seen: Sequence[Timed], ratio: float, differ: float, *widths: float
) -> tuple[BatchForwardCost, BatchForwardCost, float]:
    """The costs of a forward of one kind, and of the other kind, whose γ differs; and the part of β that is by block.

    Rounds are compared with those near them: as long as texts grow, or nothing is drafted, the machine may become
    slower, and that must not be taken for their doing. Rounds long past say nothing else. Priors, each with its
    deviation in forwards: both kinds have the same γ (differ), and of the sizes (widths) tokens cost ratio·γ of the
    first kind, the others nothing.
    """
    table = np.fromiter(chain.from_iterable(seen), float).reshape(len(seen), -1)
    share, seconds, number = table.T[:3]
    of_first, recent = share > 0, number.max() - number < ROUNDS
    near = np.flatnonzero(np.diff(number // NEAR, prepend=-1))  # where each block of rounds begins
    drift = np.where(recent, DRIFT, 1.0)[:, None]
    sizes = table[:, 4 : 4 + len(widths)]
    scale = np.concatenate([[1.0, 1.0], np.maximum(sizes.mean(0), 1e-9)])
    values = np.column_stack([share, 1 - share, sizes / scale[2:], seconds])
    level, count = max(float(np.median(seconds)), TINY), len(scale)
    priors = np.eye(count)[1:]
    priors[0, :2], priors[2, 0] = (1, -1), -ratio * scale[3]
    priors /= np.array([differ, *widths])[:, None]
    # From the beginning, as few rounds have no line that an outlier among them does not bend.
    weights, noise = np.minimum(1, TIMES_OFF * level / np.maximum(seconds, TINY)) ** 2, NOISE[0]
    for _ in range(REFITS):
        rounds = values - drift * means_of_blocks(values, weights, near)
        weighted = rounds * np.sqrt(weights)[:, None]
        given = np.concatenate([weighted[:, :-1], noise * priors]), np.append(weighted[:, -1], np.zeros(len(priors)))
        terms, _ = nnls(*given)
        off = np.abs(rounds[:, -1] - rounds[:, :-1] @ terms)
        usual = np.full(len(off), np.median(off))
        noise = max(1.5 * usual[0] / level, NOISE[1])  # 1.5: of a normal distribution
        for kind in (of_first, ~of_first):  # where most rounds are of one, those of the other are no outliers
            if (kind & recent).any():
                usual[kind] = np.median(off[kind & recent])
        limit = np.maximum(TIMES_OFF * usual, 1e-9)
        before, weights = weights, np.minimum(1, limit / np.maximum(off, limit)) ** 2
        if np.abs(weights - before).max() < SETTLED:
            break
    spread = rounds[:, -1] - np.average(rounds[:, -1], weights=weights)
    r_squared = 1 - float(weights @ off**2) / max(float(weights @ spread**2), 1e-18)
    gamma, other, alpha, beta, *by_block = (terms / scale).tolist()
    one = BatchForwardCost(alpha=alpha, beta=beta + sum(by_block), gamma=gamma, r_squared=r_squared)
    return one, replace(one, gamma=other), sum(by_block)


def means_of_blocks(values: np.ndarray, weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """values: (n, columns) → the weighted mean of each one's block. weights: (n,). starts: where each block begins."""
    sums = np.add.reduceat(weights[:, None] * values, starts) / np.add.reduceat(weights, starts)[:, None]
    return np.repeat(sums, np.diff(starts, append=len(values)), axis=0)
