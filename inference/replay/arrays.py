"""Replay: what a policy would have cost on coupled traces, without a model in the loop.

Two ways in, both in distribution what the decode loop does (docs/theory.md §4, post-hoc coupling):
replay_fixed       draft lengths, all in one pass
replay_thresholds  rules that stop when a running statistic falls below a level: one pass for all levels and bounds
Any other policy goes through `replay_host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accept_head.cost import DecodeCounts, oracle_counts
from accept_head.errors import InputError
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, Signal
from accept_head.inference.replay.comparison import Measured
from accept_head.inference.replay.coupled import CoupledTraces

HIDDEN = frozenset({Signal.FED_HIDDEN, Signal.DRAWN_HIDDEN})
LANES = 128  # settings that walk through the responses together: bounds memory


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What one policy did on n responses.

    counts: (n, 4) generated tokens, discarded tokens, target forwards, draft forwards of each.
    draft_lengths: (k_max + 1,) rounds that drafted so many tokens.
    at_risk: (k_max,) rounds that drafted to this depth with all earlier tokens accepted; accepted: (k_max,) those of
        them whose token at this depth was accepted too.
    """

    name: str
    params: dict[str, Any]
    counts: np.ndarray
    draft_lengths: np.ndarray
    at_risk: np.ndarray
    accepted: np.ndarray

    @property
    def total(self) -> DecodeCounts:
        return _counts(self.counts.sum(0))

    def measured(self, responses: Sequence[int] | None = None) -> Measured:
        """For `compare`; of these responses only, if given."""
        rows = self.counts if responses is None else self.counts[list(responses)]
        return Measured(name=self.name, params=self.params, counts=[_counts(row) for row in rows])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Of a threshold rule."""

    threshold: float
    k_min: int = 1
    k_max: int = 20


def replay_fixed(traces: CoupledTraces, lengths: Sequence[int]) -> list[Replayed]:
    """fixed:K for each K; `none` for 0."""
    check_k_max("fixed", max(lengths), traces)
    lanes = torch.minimum(traces.drafts[:, None], torch.tensor(lengths))  # (P, lengths)
    walked = walk_rounds(traces, lanes)
    return [
        replayed_of(walked, lane, f"fixed:{k}" if k else "none", {"k": k} if k else {})
        for lane, k in enumerate(lengths)
    ]


def replay_oracle(traces: CoupledTraces) -> Replayed:
    """Stops just before each rejection (theorem 4.1): no policy does better."""
    walked = walk_rounds(traces, torch.minimum(traces.drafts, traces.leading)[:, None])
    walked.counts[:, 0] = [
        [count.generated, count.discarded, count.target_forwards, count.draft_forwards]
        for row in traces.traces["accepted"]
        for count in [oracle_counts(generated=len(row), rejections=list(row[:-1]).count(False))]
    ]
    return replayed_of(walked, 0, "oracle", {})


def replay_thresholds(
    traces: CoupledTraces, policy: ThresholdPolicy, settings: Sequence[Setting], name: str
) -> list[Replayed]:
    """The rule of `policy` at every setting; its own threshold and bounds are not looked at. Settings with one
    threshold share all work but the walk; the tokens are scored once for all.

    Raises InputError when a setting drafts more than the rollouts hold.
    """
    if policy.by_depth:
        raise InputError(f"{name} corrects its scores by depth or by the past: replay_host.replay prices it")
    scores = score_tokens(traces, policy, floor=min(policy.level_of(setting.threshold) for setting in settings))
    lanes = threshold_lengths(traces, policy, settings, scores)
    in_vain = None
    if policy.peeks or (policy.lag == 0 and Signal.DRAWN_HIDDEN in policy.needs):  # a forward just to judge
        bounds = torch.tensor([setting.k_max for setting in settings])
        in_vain = lanes < torch.minimum(traces.drafts.int()[:, None], bounds)
    lag = {"lag": policy.lag} if Signal.DRAWN_HIDDEN in policy.reads else {}
    replayed = []
    for start in range(0, len(settings), LANES):
        part = slice(start, start + LANES)
        walked = walk_rounds(traces, lanes[:, part], None if in_vain is None else in_vain[:, part])
        for lane, setting in enumerate(settings[part]):
            params = {"threshold": setting.threshold, "k_min": setting.k_min, "k_max": setting.k_max, **lag}
            replayed.append(replayed_of(walked, lane, f"{name}:{setting.threshold:g}", params))
    return replayed


def threshold_lengths(
    traces: CoupledTraces, policy: ThresholdPolicy, settings: Sequence[Setting], scores: Tensor
) -> Tensor:
    """Tokens that a round from each position drafts, (P, settings) int32. scores: by `score_tokens`.

    Raises InputError when a setting drafts more than the rollouts hold.
    """
    check_k_max(type(policy).__name__, max(setting.k_max for setting in settings), traces)
    running = running_statistic(traces, policy, scores)
    # The statistic never rises, so a rule that is asked after each token stops at the first one that is below the
    # level; with a lag, so many tokens later; and one that peeks, just before it.
    later = 0 if policy.peeks else 1 + policy.lag
    stops = {
        threshold: (running >= policy.level_of(threshold)).sum(-1, dtype=torch.int32) + later
        for threshold in {setting.threshold for setting in settings}
    }
    most = traces.drafts.int()
    return torch.stack(
        [stops[s.threshold].clamp(min=s.k_min).minimum(most.clamp(max=s.k_max)) for s in settings], dim=-1
    )


def running_statistic(traces: CoupledTraces, policy: ThresholdPolicy, scores: Tensor) -> Tensor:
    """The policy's statistic once each token of a round's path is judged, (P, k_max); 0 where there is none. scores: by
    `score_tokens`."""
    judged = torch.cat([scores, scores.new_zeros(1, *scores.shape[1:])])[traces.path]  # (P, k_max), or (P, k_max, 2)
    survival, statistic = policy.begin(judged.shape[:1], judged.device)
    running = judged.new_empty(judged.shape[:2])
    for depth in range(running.shape[1]):  # not cumprod, which may round otherwise than the policy does
        survival, statistic = policy.follow(survival, statistic, judged[:, depth])
        running[:, depth] = statistic
    return running


def round_starts(traces: CoupledTraces, lengths: Tensor) -> Tensor:
    """The positions at which rounds start, in order, when a round from each position drafts lengths, (P,)."""
    following = torch.arange(traces.positions) + torch.minimum(lengths, traces.leading) + 1
    starts = []
    for start, length in zip(traces.starts.tolist(), traces.lengths.tolist(), strict=True):
        place = start
        while place < start + length:
            starts.append(place)
            place = int(following[place])
    return torch.tensor(starts)


@torch.no_grad()
def score_tokens(traces: CoupledTraces, policy: ThresholdPolicy, floor: float = -float("inf")) -> Tensor:
    """The policy's score of every token, (M,) float32; (M, 2), P̂ and β̂, where it `predicts_next`.

    floor: the lowest level of interest. A rollout's token that no round can reach with a statistic of at least that
    gets the score 0: whoever draws it (k_min may force it) is below all levels already, and cannot rise again.
    """
    if not policy.reads & HIDDEN:
        step = draft_step(traces, slice(None), torch.device("cpu"))
        return policy.score(step).float()
    device, numbers = _device_of(policy), (2,) if policy.predicts_next else ()
    on = torch.zeros(traces.positions, *numbers)
    off = torch.zeros(len(traces.rejected), traces.k_max - 1, *numbers)
    for positions, rollouts, fed, hidden in traces.hidden():
        fed, hidden = fed.to(device), hidden.to(device)
        rejected = (traces.rejected[rollouts] - positions.start).to(device)
        on[positions] = policy.score(_on_path(traces, positions, fed, hidden, rejected)).float().cpu()
        _score_rollouts(traces, policy, rollouts, hidden, on[traces.rejected[rollouts]], off[rollouts], floor)
    return torch.cat([on, off.flatten(0, 1)])


def _score_rollouts(
    traces: CoupledTraces,
    policy: ThresholdPolicy,
    rollouts: slice,
    hidden: Tensor,
    rejected: Tensor,
    out: Tensor,
    floor: float,
) -> None:
    """Fill out (rollouts, k_max − 1), token by token, as far as the running statistic allows. rejected: (rollouts,) the
    scores of the tokens that they follow. A round may have begun before these: its statistic is lower still."""
    lengths, steps = traces.rollout_lengths[rollouts], traces.k_max - 1
    survival, running = policy.follow(*policy.begin(lengths.shape, rejected.device), rejected)
    numbers = torch.arange(rollouts.start, rollouts.stop)
    for slot in range(steps):
        alive = torch.where((running >= floor) & (slot < lengths))[0]
        if not len(alive):
            return
        if Signal.DRAWN_HIDDEN in policy.reads and slot == steps - 1:
            out[alive, slot] = 1.0  # the last token of the longest round: nothing depends on it
            return
        tokens = traces.positions + numbers[alive] * steps + slot
        rows = alive.to(hidden.device)
        drawn = hidden[rows, slot + 1] if slot + 1 < steps else None
        score = policy.score(draft_step(traces, tokens, hidden.device, hidden[rows, slot], drawn)).float().cpu()
        out[alive, slot] = score
        survival[alive], running[alive] = policy.follow(survival[alive], running[alive], score)


def _on_path(traces: CoupledTraces, positions: slice, fed: Tensor, hidden: Tensor, rejected: Tensor) -> DraftStep:
    """The tokens of a shard's positions. An accepted token is the response's own: the state at it is the one that the
    next position's is drawn from (at a response's end, where nobody asks, it is any other)."""
    drawn = fed.roll(-1, 0)
    drawn[rejected] = hidden[:, 0]
    return draft_step(traces, positions, fed.device, fed, drawn)


def draft_step(
    traces: CoupledTraces,
    tokens: slice | Tensor,
    device: torch.device,
    fed: Tensor | None = None,
    drawn: Tensor | None = None,
) -> DraftStep:
    """Tokens as one draft step, for ThresholdPolicy.score."""
    ids = traces.ids[tokens].to(device)
    return DraftStep(
        depth=0,
        token_ids=ids,
        active=torch.ones_like(ids, dtype=torch.bool),
        fed_hidden=fed,
        drawn_hidden=drawn,
        logprob=traces.logprob[tokens].to(device),
        entropy=traces.entropy[tokens].to(device),
        max_prob=traces.max_prob[tokens].to(device),
    )


@dataclass(frozen=True)
class Walked:
    """counts: (n, lanes, 4). lengths: (lanes, k_max + 1) rounds by tokens drafted; judged, accepted: (lanes, k_max + 1)
    rounds by depths at risk and by tokens accepted."""

    counts: np.ndarray
    lengths: np.ndarray
    judged: np.ndarray
    accepted: np.ndarray


def walk_rounds(traces: CoupledTraces, lanes: Tensor, in_vain: Tensor | None = None) -> Walked:
    """From round to round through all responses, in many lanes at once. lanes: (P, lanes) tokens that a round from each
    position drafts; in_vain: (P, lanes) bool, whether it feeds the last of them for nothing."""
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
        forwards += drafted if in_vain is None else drafted + (in_vain[here, lane] & live)
        for histogram, value in zip(histograms, (drafted, torch.minimum(drafted, accepted + 1), accepted), strict=True):
            histogram += torch.bincount((lane * sizes + value)[live], minlength=width * sizes)
        # Beyond the end only after a drawn end token, which nothing follows.
        place = torch.where(live, torch.minimum(place + accepted + 1, end), place)
    generated = traces.lengths[:, None].expand(responses, width)
    counts = torch.stack([generated, discarded, rounds, forwards], dim=-1).double().numpy()
    return Walked(counts, *histograms.view(3, width, sizes).numpy())


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
    """How many rounds reached depth 1, 2, …: (k_max + 1,) → (k_max,)."""
    return histogram[::-1].cumsum()[::-1][1:]


def _device_of(policy: ThresholdPolicy) -> torch.device:
    head = getattr(policy, "head", None)
    return next(head.parameters()).device if head is not None else torch.device("cpu")


def _counts(row: Sequence[float]) -> DecodeCounts:
    generated, discarded, target_forwards, draft_forwards = map(float, row)
    return DecodeCounts(
        generated=generated, discarded=discarded, target_forwards=target_forwards, draft_forwards=draft_forwards
    )


def check_k_max(name: str, k_max: int, traces: CoupledTraces) -> None:
    if k_max > traces.k_max:
        raise InputError(f"{name} drafts up to {k_max} tokens, but the rollouts are for rounds of {traces.k_max}")
