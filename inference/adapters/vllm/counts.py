"""Verified rounds, counted by depth on the device: the host reads nothing until it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accept_head.inference.policy import VerifyOutcome

# Rows, at each depth d = 1, 2, …:
COLUMNS = (
    "drafted",  # that drew Y_d
    "verified",  # that had it verified
    "judged",  # of which verification tells whether Y_d was accepted: those before it were
    "accepted",
    "scored",  # judged, and the policy had predicted how likely Y_d's acceptance is
    "scored_accepted",
    "predicted",  # sum of the scored rows' predictions: how many of them the policy expected to be accepted
)
# What ended a row's draft: the policy, before the limit; the limit; or the row drafted nothing.
ENDS = ("policy", "limit", "none")


class DraftCounts:
    """Sums over rounds: `by_depth`, (k_max, columns), and `ends`, (3,), both float64, exact up to 2^53."""

    def __init__(self, k_max: int, device: torch.device | str):
        self.depths = torch.arange(1, k_max + 1, device=device)
        self.by_depth = torch.zeros(k_max, len(COLUMNS), dtype=torch.float64, device=device)
        self.ends = torch.zeros(len(ENDS), dtype=torch.float64, device=device)
        self.stream: torch.cuda.Stream | None = None  # that the sums are made on

    def add(self, outcome: VerifyOutcome, predicted: Sequence[Tensor], stopped: Tensor) -> None:
        """Count one round; what is deeper than k_max is left out.

        predicted: P̂ of the tokens at depth 1, 2, …, (batch,) each, NaN where a row has none; may be shorter than the
        drafts. stopped: (batch,) bool, rows whose draft the policy ended.
        """
        live = outcome.live
        drafted, verified, judged, accepted = (
            torch.where(live, tokens, 0)
            for tokens in (outcome.drafted, outcome.submitted, outcome.judged, outcome.accepted)
        )
        is_judged, is_accepted = self._reached(judged), self._reached(accepted)
        p = self._by_depth(predicted, len(live))
        is_scored = is_judged & ~p.isnan()
        columns = (
            self._reached(drafted),
            self._reached(verified),
            is_judged,
            is_accepted,
            is_scored,
            is_scored & is_accepted,
            torch.where(is_scored, p, 0.0),
        )
        self.by_depth += torch.stack([column.double() for column in columns], dim=-1).sum(0)
        some = drafted > 0
        ends = (some & stopped, some & ~stopped, live & ~some)
        self.ends += torch.stack(ends, dim=-1).double().sum(0)
        self.stream = torch.cuda.current_stream(live.device) if live.is_cuda else None

    def _reached(self, tokens: Tensor) -> Tensor:
        """(batch,) → (batch, k_max) bool, whether a row has a token at each depth."""
        return tokens[:, None] >= self.depths

    def _by_depth(self, predicted: Sequence[Tensor], batch: int) -> Tensor:
        """(batch, k_max), NaN where nothing was predicted."""
        known = [p.double() for p in predicted[: len(self.depths)]]
        missing = torch.full((batch,), torch.nan, dtype=torch.float64, device=self.depths.device)
        return torch.stack([*known, *[missing] * (len(self.depths) - len(known))], dim=-1)

    def read(self) -> tuple[list[list[float]], list[float]]:
        """Both sums on the host, as of the last `add`. Waits for the device; any thread may call it."""
        with torch.cuda.stream(self.stream):  # behind the sums, whatever stream the calling thread uses; None: no-op
            values = torch.cat([self.by_depth.flatten(), self.ends]).tolist()
        width = len(COLUMNS)
        depths = [values[start : start + width] for start in range(0, width * len(self.by_depth), width)]
        return depths, values[-len(ENDS) :]
