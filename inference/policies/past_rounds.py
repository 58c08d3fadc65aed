"""What past rounds have taught the batch's rule (batch_stop.py). It is learnt on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from accept_head.inference.costs.host import Host

OWN_PRIOR, OWN_MEMORY = 4.0, 64.0  # of a row's record: tokens that it is taken to have had, and rounds that count
SURE = 5.0  # rows of sure tokens that a depth is taken to have had
# Rows that count as recent; and rows as usual that they are taken to have among them, for what is predicted at a depth
# and for how often it is reached. With as many for both, hard text after easy text would be drafted for without end.
RECENT, USUAL, USUAL_REACH = 64.0, 16.0, 5.0
# Rounds that are learnt from together, once there were some, and their rows. Python that has not run since the last
# forwards takes several times as long as what has just run.
TOGETHER, ROWS_TOGETHER = 8, 32


class Seen(NamedTuple):
    """A round. counts: (5, batch), as of VerifyOutcome.on_host. decided, judged: (≤ depths, batch), S·β̂ and S. steps:
    draft steps that the policy knows of."""

    counts: np.ndarray
    decided: np.ndarray
    judged: np.ndarray
    steps: int
    host: Host


class PastRounds:
    """Sums that decay. In float64, as they enter differences of nearly equal numbers.

    sums: (5, depths), of all rows: accepted tokens, Σ S after the policy judged them, Σ S·β̂ before they were drawn,
    rows that drew one, and rows of rounds in which one did. recent: (4, depths), all but the first over fewer rows.
    totals: 6, over as few: rows, emitted tokens, draft steps, verified drafted tokens, these with padding or in blocks,
    and rows of rounds with drafts. record: (2, batch), first tokens of each row that were accepted, and that were
    expected to be. rounds: until now. idle: the last of them without drafts. rho, at_best: ρ of every depth, and f of
    every row, (batch,), as of the rounds that were learnt from. reached: `reach` of them, with gains for S·β̂.
    """

    def __init__(self, depths: int, *, prior: float, optimism: float, memory: float, predicts: bool, peeks: bool):
        self.depth, self.prior, self.optimism, self.memory = np.arange(depths)[:, None], prior, optimism, memory
        self.predicts, self.peeks, self.record, self.at_best = predicts, peeks, np.zeros((2, 0)), np.ones(0)
        self.forget()
        self.begin(0)

    def forget(self) -> None:
        """Reset the sums to those of one row that drafted nothing."""
        self.sums, self.recent = np.zeros((5, len(self.depth))), np.zeros((4, len(self.depth)))
        self.totals = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        self.rounds, self.waiting = 0, list[Seen]()
        self.learn()

    # --- rows --------------------------------------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        """So many rows begin, of which nothing is known."""
        self.learn()
        self.record, self.at_best, self.idle = np.zeros((2, batch)), np.ones(batch), 0

    def admit(self, rows: Sequence[int]) -> None:
        """Nothing is known of these rows, and their share of what is recent was of other text."""
        self.learn()
        self.recent *= 1 - len(rows) / max(1, len(self.at_best))
        self.record[:, rows] = 0
        self.learn()

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        self.record, self.at_best = self.record[:, rows], self.at_best[rows]

    # --- what follows from them --------------------------------------------------------------------------------------

    def ratios(self) -> list[float]:
        """ρ of every depth."""
        rho, before = list[float](), 1.0  # what is known of κ at the depth before
        for accepted, after, mean in np.stack([*self.sums[:2], self.means], axis=1).tolist():
            kappa = (self.prior * self.optimism * before + accepted) / (self.prior + after)
            rho.append(kappa * mean)
            # Predictions say how chances fall with depth. Without them, depths that nobody has tried must.
            before = (self.prior * before + accepted) / (self.prior + after) if self.predicts else kappa
        return rho

    @property
    def means(self) -> np.ndarray:
        """m of every depth, (depths,)."""
        (_, after, before, *_), (after_lately, before_lately, *_) = self.sums, self.recent
        usual = (SURE + after) / (SURE + before)
        return (USUAL * usual + after_lately) / (USUAL + before_lately)

    def reach(self) -> np.ndarray:
        """Of the rows that draft at all, by depth: mean S·β̂, 0 for those that stop before; the share that drafts so
        far; and the share of the rounds in which one of them does. (3, depths)."""
        usual = (SURE + self.sums[2:]) / (SURE + self.sums[2:, :1])
        return (USUAL_REACH * usual + self.recent[1:]) / (USUAL_REACH + self.recent[1:, :1])

    def after_first(self, rows: int, token: float, step: float) -> float:
        """Tokens that `rows` rows are expected to gain by the steps after the first, less their price: by the number of
        steps that gains most. token, step: prices, in tokens."""
        gains = self.reached * np.array([[rows], [-rows * token], [-step]])
        return float(max(accumulate(gains.sum(0).tolist()[1:], initial=0.0)))

    @property
    def emitted(self) -> float:
        """τ: tokens that a row emits in an average round."""
        return self.totals[1] / self.totals[0]

    def prices(self, coefficients: Sequence[Sequence[float]], host: Host) -> list[list[float]]:
        """Seconds, as factors of context, rows and 1: of an average round; of one without drafts; of one more token of
        a row; of a draft step; of the first of a round; and of a block of tokens. (6, 3). coefficients: (5, 3), as of
        PairCosts."""
        (_, drafted, _), _, (_, verified, _), _, (_, by_block, _) = coefficients  # of one more token
        _, _, steps, tokens, slots, share = (total / self.totals[0] for total in self.totals)
        by_row = 0.0 if host.drafts_stopped else drafted
        padding = verified if host.verifies_padding else 0.0
        by_block = by_block if host.block > 1 else 0.0
        token = by_row + verified - padding - by_block
        found = []
        for place, (later, first, verify, plain, _) in enumerate(zip(*coefficients, strict=True)):
            a_row, one = place == 1, place == 2
            slot, step, more = padding * a_row, later - by_row * a_row, verify - plain  # more: of any drafts
            if host.feeds:
                plain = plain + first - later
                least, begins = plain + later, more + slot
            else:
                more = more + first - later
                least, begins = plain, more + step + slot
            seconds = plain + steps * step + (slots * (padding + by_block) + tokens * token) * a_row + share * more
            block = host.block * by_block * one
            found.append([seconds, least, token * one, step + slot, begins, block])
        return [list(each) for each in zip(*found, strict=True)]

    # --- learning ----------------------------------------------------------------------------------------------------

    def add(self, seen: Seen) -> None:
        """One more round. It is learnt from now or with later ones, the rows' records aside."""
        live, _, _, submitted, accepted = seen.counts
        self.record *= 1 - 1 / OWN_MEMORY
        self.record[0] += live * accepted > 0
        self.record[1] += self.rho[0] * (live * submitted > 0)
        self.rounds += 1
        rested, drafts = self.idle > 0, bool(seen.decided[0].any())
        self.idle = 0 if drafts else self.idle + 1
        self.waiting.append(seen)
        waiting = len(self.waiting)
        many = waiting >= min(TOGETHER, 1 + self.rounds // TOGETHER) or waiting * int(live.sum()) >= ROWS_TOGETHER
        if many or drafts == rested:  # drafting begins or ends
            self.learn()

    def learn(self) -> None:
        """Learn from the rounds that wait."""
        for seen in self.waiting:
            self._learn(*seen)
        self.waiting, self.rho = [], self.ratios()
        self.reached = self.reach()
        self.reached[0] *= self.rho
        accepted, expected = self.record
        self.at_best = np.minimum(1.0, (OWN_PRIOR + accepted + 2 * np.sqrt(1 + accepted)) / (OWN_PRIOR + expected))

    def _learn(self, counts: np.ndarray, decided: np.ndarray, judged: np.ndarray, steps: int, host: Host) -> None:
        live, _, drafted, submitted, accepted = counts
        accepted, drafted, submitted = np.stack([accepted, drafted, submitted]) * live
        rows, longest = int(live.sum()), int(drafted.max())
        # A host may verify less than was drafted: nothing is known of the rest. A token that the policy peeked at and
        # declined was a draft step without a gain.
        looked = submitted + (submitted == drafted) * live if self.peeks else submitted
        tokens = np.stack([accepted, submitted, looked])
        # The host may skip asking at the last depth, so the policy can know of too few steps.
        steps = max(longest, steps) if longest else int(host.feeds)
        slots = host.slots(rows, submitted)
        keep = (1 - 1 / self.memory) ** rows
        counted = self.depth < tokens[:, None]  # (3, depths, batch)
        of_tokens = np.full(counted.shape, np.nan)
        of_tokens[0], of_tokens[1, : len(judged)], of_tokens[2, : len(decided)] = 1.0, judged, decided
        # A token that was not judged, as the host did not ask or S is no number, counts as usual.
        not_judged = np.isnan(of_tokens[1]) & counted[2]
        np.copyto(of_tokens[1], of_tokens[2] * self.means[:, None], where=not_judged)
        counted[1] |= not_judged
        drew = counted[2].sum(-1)
        # What is not known may be no number.
        more = np.stack([*of_tokens.sum(-1, where=counted), drew, rows * (drew > 0)])
        self.sums = keep * self.sums + more
        lately = (1 - 1 / RECENT) ** rows
        self.recent = lately * self.recent + more[1:]
        gained, verified, _ = tokens.sum(-1).tolist()
        new = rows, rows + gained, rows * steps, verified, slots, rows * (longest > 0)
        self.totals = [lately * total + more for total, more in zip(self.totals, new, strict=True)]
