"""Verified rounds, counted by depth on the device: the host reads nothing until it is asked.

Rounds are kept as they come and summed many at a time: a dozen small operations a round would be felt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
AT_ONCE = 64  # rounds


class _Round(NamedTuple):
    outcome: VerifyOutcome
    predicted: Tensor  # (batch, judged depths)
    stopped: Tensor


class DraftCounts:
    """Sums over rounds: `by_depth`, (k_max, columns), and `ends`, (3,), both float64, exact up to 2^53."""

    def __init__(self, k_max: int, device: torch.device | str):
        self.depths = torch.arange(1, k_max + 1, device=device)
        self.by_depth = torch.zeros(k_max, len(COLUMNS), dtype=torch.float64, device=device)
        self.ends = torch.zeros(len(ENDS), dtype=torch.float64, device=device)
        self.stream: torch.cuda.Stream | None = None  # that the sums are made on
        self.pending: list[_Round] = []

    def add(self, outcome: VerifyOutcome, predicted: Sequence[Tensor], stopped: Tensor) -> None:
        """Count one round; what is deeper than k_max is left out.

        predicted: P̂ of the tokens at depth 1, 2, …, (batch,) each, NaN where a row has none; may be shorter than the
        drafts. stopped: (batch,) bool, rows whose draft the policy ended.
        """
        known = predicted[: len(self.depths)]
        table = torch.stack(list(known), dim=-1) if known else outcome.drafted.new_empty(len(outcome.live), 0).double()
        self.pending.append(_Round(outcome, table, stopped))
        self.stream = torch.cuda.current_stream(outcome.live.device) if outcome.live.is_cuda else None
        if len(self.pending) >= AT_ONCE:
            self._sum()

    @torch.inference_mode()  # any thread may come here, and the sums may be made in it
    def _sum(self) -> None:
        if not self.pending:
            return
        outcomes = [each.outcome for each in self.pending]
        live = torch.cat([outcome.live for outcome in outcomes])
        tokens = (
            torch.cat([getattr(outcome, name) for outcome in outcomes]) for name in ("drafted", "submitted", "accepted")
        )
        drafted, verified, accepted = (torch.where(live, each, 0) for each in tokens)
        judged = torch.where(live, torch.minimum(verified, accepted + 1), 0)
        stopped = torch.cat([each.stopped for each in self.pending])
        p = torch.cat([self._padded(each.predicted) for each in self.pending])
        self.pending = []
        is_judged, is_accepted = self._reached(judged), self._reached(accepted)
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

    def _reached(self, tokens: Tensor) -> Tensor:
        """(batch,) → (batch, k_max) bool, whether a row has a token at each depth."""
        return tokens[:, None] >= self.depths

    def _padded(self, predicted: Tensor) -> Tensor:
        """(batch, depths) → (batch, k_max), NaN where nothing was predicted."""
        missing = len(self.depths) - predicted.shape[1]
        return torch.nn.functional.pad(predicted.double(), (0, missing), value=torch.nan)

    def read(self) -> tuple[list[list[float]], list[float]]:
        """Both sums on the host, as of the last `add`. Waits for the device; any thread may call it."""
        with torch.cuda.stream(self.stream):  # behind the rounds, whatever stream the calling thread uses; None: no-op
            self._sum()
            values = torch.cat([self.by_depth.flatten(), self.ends]).tolist()
        width = len(COLUMNS)
        depths = [values[start : start + width] for start in range(0, width * len(self.by_depth), width)]
        return depths, values[-len(ENDS) :]
