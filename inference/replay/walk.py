"""The walk from round to round through all responses, given the draft length of a round from each position.

For fixed draft lengths and the oracle these lengths are known; thresholds.py computes them for threshold rules. The
walk has the same distribution as the decode loop (docs/theory.md, post-hoc coupling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accept_head.cost import DecodeCounts, oracle_counts
from accept_head.errors import InputError
from accept_head.inference.replay.comparison import Measured
from accept_head.inference.replay.coupled import CoupledTraces


@dataclass(frozen=True, kw_only=True)
class Replayed(Measured):
    """The replay of one policy on n responses.

    draft_lengths: (k_max + 1,) number of rounds by their draft length.
    at_risk: (k_max,) rounds that drafted to this depth with all earlier tokens accepted.
    accepted: (k_max,) those of them whose token at this depth was accepted too.
    """

    draft_lengths: np.ndarray
    at_risk: np.ndarray
    accepted: np.ndarray

    @property
    def total(self) -> DecodeCounts:
        generated, discarded, target_forwards, draft_forwards = map(float, self.counts.sum(0))
        return DecodeCounts(
            generated=generated, discarded=discarded, target_forwards=target_forwards, draft_forwards=draft_forwards
        )


def replay_fixed(traces: CoupledTraces, lengths: Sequence[int]) -> list[Replayed]:
    """Replay fixed:K for each K; K = 0 is `none`."""
    check_k_max("fixed", max(lengths), traces)
    lanes = torch.minimum(traces.drafts[:, None], torch.tensor(lengths))  # (P, lengths)
    walked = walk_rounds(traces, lanes)
    return [
        replayed_of(walked, lane, f"fixed:{k}" if k else "none", {"k": k} if k else {})
        for lane, k in enumerate(lengths)
    ]


def replay_oracle(traces: CoupledTraces) -> Replayed:
    """Replay the oracle, which stops just before each rejection (theorem 4.1). No policy of a draft model does better.
    With an EAGLE-3 drafter one might: what is accepted depends on where rounds begin, and this oracle does not choose
    that. There its rounds are as long as those of the traces at most."""
    before_last = torch.repeat_interleave(traces.starts + traces.lengths - 1, traces.lengths)
    room = before_last - torch.arange(traces.positions)  # a response's last token comes with the last verification
    walked = walk_rounds(traces, torch.minimum(torch.minimum(traces.drafts, traces.leading), room)[:, None])
    if traces.depths == 1:  # then its rounds have any length
        walked.counts[:, 0] = [
            astuple(oracle_counts(generated=len(row), rejections=list(row[:-1]).count(False)))
            for row in traces.traces["accepted"]
        ]
    return replayed_of(walked, 0, "oracle", {})


@dataclass(frozen=True)
class Walked:
    """The result of a walk. counts: (n, lanes, 4), as in Replayed. lengths, judged, accepted: (lanes, k_max + 1) number
    of rounds by drafted, judged and accepted tokens."""

    counts: np.ndarray
    lengths: np.ndarray
    judged: np.ndarray
    accepted: np.ndarray


def walk_rounds(traces: CoupledTraces, lanes: Tensor, extra_forwards: Tensor | None = None) -> Walked:
    """Walk from round to round through all responses, in many lanes at once. lanes: (P, lanes) tokens that a round from
    each position drafts. extra_forwards: (P, lanes) bool, whether the round has a draft forward that draws no token."""
    responses, width, sizes = len(traces.lengths), lanes.shape[1], traces.k_max + 1
    lane = torch.arange(width).expand(responses, width)
    place = traces.starts[:, None].expand(responses, width).clone()
    end = (traces.starts + traces.lengths)[:, None].expand(responses, width)
    discarded, rounds, forwards = (torch.zeros(responses, width, dtype=torch.long) for _ in range(3))
    histograms = torch.zeros(3, width * sizes, dtype=torch.long)
    while (live := place < end).any():
        here = place.clamp(max=traces.positions - 1)
        drafted = lanes[here, lane].long() * live
        accepted = torch.minimum(drafted, traces.leading[here])
        discarded += drafted - accepted
        rounds += live
        forwards += drafted if extra_forwards is None else drafted + (extra_forwards[here, lane] & live)
        for histogram, value in zip(histograms, (drafted, torch.minimum(drafted, accepted + 1), accepted), strict=True):
            histogram += torch.bincount((lane * sizes + value)[live], minlength=width * sizes)
        # Only a drawn end token, which nothing follows, can lead past the end.
        place = torch.where(live, torch.minimum(place + accepted + 1, end), place)
    generated = traces.lengths[:, None].expand(responses, width)
    counts = torch.stack([generated, discarded, rounds, forwards], dim=-1).double().numpy()
    return Walked(counts, *histograms.view(3, width, sizes).numpy())


def round_starts(traces: CoupledTraces, lengths: Tensor) -> Tensor:
    """The positions at which rounds start, in order. lengths: (P,) tokens that a round from each position drafts."""
    following = torch.arange(traces.positions) + torch.minimum(lengths, traces.leading) + 1
    starts = []
    for start, length in zip(traces.starts.tolist(), traces.lengths.tolist(), strict=True):
        place = start
        while place < start + length:
            starts.append(place)
            place = int(following[place])
    return torch.tensor(starts)


def replayed_of(walked: Walked, lane: int, name: str, params: dict[str, Any]) -> Replayed:
    return Replayed(
        name=name,
        params=params,
        counts=walked.counts[:, lane],
        draft_lengths=walked.lengths[lane],
        at_risk=_at_least(walked.judged[lane]),
        accepted=_at_least(walked.accepted[lane]),
    )


def _at_least(histogram: np.ndarray) -> np.ndarray:
    """Number of rounds that reached depth 1, 2, …: (k_max + 1,) → (k_max,)."""
    return histogram[::-1].cumsum()[::-1][1:]


def check_k_max(name: str, k_max: int, traces: CoupledTraces) -> None:
    if k_max > traces.k_max:
        raise InputError(f"{name} drafts up to {k_max} tokens, but the rollouts are for rounds of {traces.k_max}")
