"""Counts verified rounds by depth, on the host, which has their numbers anyway.

Rounds are kept as they come and summed many at a time, because a dozen small operations a round would take too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

# Number of rows, at each depth d = 1, 2, …:
COLUMNS = (
    "drafted",  # Y_d was drawn
    "verified",  # Y_d was verified
    "judged",  # Y_d was accepted or rejected: verified, with all earlier tokens accepted
    "accepted",
    "scored",  # judged, with a prediction of the policy
    "scored_accepted",
    "predicted",  # sum of the scored rows' predictions: the expected scored_accepted
)
# What ended a row's draft: the policy before the limit, the limit, or the row drafted nothing.
ENDS = ("policy", "limit", "none")
AT_ONCE = 64  # rounds


class VerifiedRound(NamedTuple):
    """One round of a batch, row by row. live: rows that took part. drafted, verified, accepted: tokens. stopped: rows
    whose draft the policy ended before its limit. predicted: P̂ of the tokens at depth 1, 2, …, a list of rows each; NaN
    for a row without a prediction. The list may be shorter than the drafts, or empty."""

    live: Sequence[bool]
    drafted: Sequence[int]
    verified: Sequence[int]
    accepted: Sequence[int]
    stopped: Sequence[bool]
    predicted: Sequence[Sequence[float]]


class DraftCounts:
    """Sums over rounds: `by_depth`, (k_max, columns), and `ends`, (3,), both float64, exact up to 2^53."""

    def __init__(self, k_max: int):
        self.depths = np.arange(1, k_max + 1)
        self.by_depth = np.zeros((k_max, len(COLUMNS)))
        self.ends = np.zeros(len(ENDS))
        self.pending: list[VerifiedRound] = []

    def add(self, verified: VerifiedRound) -> None:
        """Count one round; tokens deeper than k_max are left out."""
        self.pending.append(verified)
        if len(self.pending) >= AT_ONCE:
            self._sum()

    def _sum(self) -> None:
        if not self.pending:
            return
        rounds, self.pending = self.pending, []
        live = _joined((each.live for each in rounds), bool)
        drafted, verified, accepted = (
            np.where(live, _joined(tokens, int), 0)
            for tokens in zip(*((each.drafted, each.verified, each.accepted) for each in rounds), strict=True)
        )
        stopped = _joined((each.stopped for each in rounds), bool)
        p = np.concatenate([self._padded(each) for each in rounds])
        is_judged = self._reached(np.where(live, np.minimum(verified, accepted + 1), 0))
        is_accepted, is_scored = self._reached(accepted), is_judged & ~np.isnan(p)
        columns = (
            self._reached(drafted),
            self._reached(verified),
            is_judged,
            is_accepted,
            is_scored,
            is_scored & is_accepted,
            np.where(is_scored, p, 0.0),
        )
        self.by_depth += np.stack([column.sum(0, dtype=np.float64) for column in columns], axis=-1)
        some = drafted > 0
        self.ends += [np.count_nonzero(rows) for rows in (some & stopped, some & ~stopped, live & ~some)]

    def _reached(self, tokens: np.ndarray) -> np.ndarray:
        """(rows,) → (rows, k_max) bool, whether a row has a token at each depth."""
        return tokens[:, None] >= self.depths

    def _padded(self, verified: VerifiedRound) -> np.ndarray:
        """(rows, k_max) predictions, NaN without a prediction."""
        padded = np.full((len(verified.live), len(self.depths)), np.nan)
        known = verified.predicted[: len(self.depths)]
        if known:
            padded[:, : len(known)] = np.array(known).T
        return padded

    def read(self) -> tuple[list[list[float]], list[float]]:
        """`by_depth` and `ends` as lists, up to the last `add`."""
        self._sum()
        return self.by_depth.tolist(), self.ends.tolist()


def _joined(parts: Iterable[Sequence[int]], kind: type) -> np.ndarray:
    return np.array(list(chain.from_iterable(parts)), dtype=kind)
