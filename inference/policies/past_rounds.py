"""What past rounds have taught the batch's rule (batch_stop.py). It is learnt on the host, once a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accept_head.inference.costs.host import Host

OWN_PRIOR, OWN_MEMORY = 4.0, 64.0  # of a row's record: tokens that it is taken to have had, and rounds that count
SURE = 5.0  # rows of sure tokens that a depth is taken to have had
RECENT, USUAL = 64.0, 16.0  # rows that count as recent, and rows as usual that they are taken to have among them


class PastRounds:
    """Sums that decay. In float64, as they enter differences of nearly equal numbers.

    sums: (3, depths), of all rows: accepted tokens, Σ S·β̂ before they were drawn, and Σ S after the policy judged them.
    recent: (2, depths), the last two of these sums over fewer rows. totals: 6, of all rows: rows, emitted tokens, draft
    steps, verified drafted tokens, these with padding or in blocks, and rows of rounds with drafts.
    record: (2, batch), first tokens of each row that were accepted, and that were expected to be. idle: rounds without
    drafts until now.
    """

    def __init__(self, depths: int, *, prior: float, optimism: float, memory: float):
        self.depth, self.prior, self.optimism, self.memory = np.arange(depths)[:, None], prior, optimism, memory
        self.forget()
        self.begin(0)

    def forget(self) -> None:
        """Reset the sums to those of one row that drafted nothing."""
        self.sums, self.recent = np.zeros((3, len(self.depth))), np.zeros((2, len(self.depth)))
        self.totals = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]

    def begin(self, batch: int) -> None:
        """So many rows begin, of which nothing is known."""
        self.record, self.idle = np.zeros((2, batch)), 0

    # --- what follows from them --------------------------------------------------------------------------------------

    def ratios(self) -> list[float]:
        """ρ of every depth."""
        rho, kappa = list[float](), 1.0
        for accepted, after, mean in np.stack([self.sums[0], self.sums[2], self.means], axis=1).tolist():
            kappa = (self.prior * self.optimism * kappa + accepted) / (self.prior + after)
            rho.append(kappa * mean)
        return rho

    @property
    def means(self) -> np.ndarray:
        """m of every depth, (depths,)."""
        (_, before, after), (before_lately, after_lately) = self.sums, self.recent
        usual = (SURE + after) / (SURE + before)
        return (USUAL * usual + after_lately) / (USUAL + before_lately)

    def at_best(self) -> np.ndarray:
        """f of every row, (batch,)."""
        accepted, expected = self.record
        return np.minimum(1.0, (OWN_PRIOR + accepted + 2 * np.sqrt(1 + accepted)) / (OWN_PRIOR + expected))

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

    def learn(
        self,
        counts: np.ndarray,
        decided: np.ndarray,
        judged: np.ndarray,
        *,
        rows: int,
        steps: int,
        slots: float,
        drew: bool,
        tried: bool,
    ) -> None:
        """Learn from a round of so many rows. counts: (3, batch), 0 for all other rows: tokens that were accepted, that
        were drawn or declined, and that were verified. decided, judged: (≤ depths, batch), S·β̂ and S. A token that was
        not judged, as the host did not ask or S is no number, counts as usual. steps: draft steps. slots: verified
        tokens with padding or in blocks. drew: whether a token was drafted. tried: whether one might be."""
        expected, keep = self.ratios()[0], (1 - 1 / self.memory) ** rows
        counted = self.depth < counts[:, None]  # (3, depths, batch)
        of_tokens = np.full(counted.shape, np.nan)
        of_tokens[0], of_tokens[1, : len(decided)], of_tokens[2, : len(judged)] = 1.0, decided, judged
        not_judged = np.isnan(of_tokens[2]) & counted[1]
        np.copyto(of_tokens[2], of_tokens[1] * self.means[:, None], where=not_judged)
        counted[2] |= not_judged
        more = of_tokens.sum(-1, where=counted)  # what is not known may be no number
        self.sums = keep * self.sums + more
        self.recent = (1 - 1 / RECENT) ** rows * self.recent + more[1:]
        accepted, _, verified = counts.sum(-1).tolist()
        new = rows, rows + accepted, rows * steps, verified, slots, rows * drew
        self.totals = [keep * total + more for total, more in zip(self.totals, new, strict=True)]
        self.idle = 0 if tried else self.idle + 1
        self.record *= 1 - 1 / OWN_MEMORY
        self.record[0] += counts[0] > 0
        self.record[1] += expected * (counts[2] > 0)
