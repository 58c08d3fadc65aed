"""Replay of rules that stop when a running statistic falls below a threshold: one pass for all thresholds and bounds.

Every token is scored once (scores.py), and the scores determine a rule's draft length at each position. Other policies
are asked round by round (asking.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import Signal
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.walk import Replayed, check_k_max, replayed_of, walk_rounds

LANES = 128  # settings per walk: bounds memory


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Threshold and bounds of a threshold rule."""

    threshold: float
    k_min: int = 1
    k_max: int = 20


def replay_thresholds(
    traces: CoupledTraces, policy: ThresholdPolicy, settings: Sequence[Setting], name: str
) -> list[Replayed]:
    """Replay the rule of `policy` at every setting, ignoring the policy's own threshold and bounds. Tokens are scored
    once for all settings; settings with one threshold share all work but the walk.

    Raises InputError when a setting drafts more than the rollouts hold.
    """
    if policy.by_depth:
        raise InputError(f"{name} corrects its scores by depth or by the past: asking.replay prices it")
    scores = score_tokens(traces, policy, floor=min(policy.level_of(setting.threshold) for setting in settings))
    lanes = threshold_lengths(traces, policy, settings, scores)
    extra_forwards = None
    if policy.lag == 0 and Signal.DRAWN_HIDDEN in policy.needs:  # a forward that only judges
        bounds = torch.tensor([setting.k_max for setting in settings])
        extra_forwards = lanes < torch.minimum(traces.drafts.int()[:, None], bounds)
    lag = {"lag": policy.lag} if Signal.DRAWN_HIDDEN in policy.reads else {}
    replayed = []
    for start in range(0, len(settings), LANES):
        part = slice(start, start + LANES)
        walked = walk_rounds(traces, lanes[:, part], None if extra_forwards is None else extra_forwards[:, part])
        for lane, setting in enumerate(settings[part]):
            params = {"threshold": setting.threshold, "k_min": setting.k_min, "k_max": setting.k_max, **lag}
            replayed.append(replayed_of(walked, lane, f"{name}:{setting.threshold:g}", params))
    return replayed


def threshold_lengths(
    traces: CoupledTraces, policy: ThresholdPolicy, settings: Sequence[Setting], scores: Tensor
) -> Tensor:
    """Tokens that a round from each position drafts, (P, settings) int32. scores: from `score_tokens`.

    Raises InputError when a setting drafts more than the rollouts hold.
    """
    check_k_max(type(policy).__name__, max(setting.k_max for setting in settings), traces)
    running = running_statistic(traces, policy, scores)
    # The statistic never rises, so a rule stops after the first token below the level; with a lag, `lag` tokens later.
    later = 1 + policy.lag
    stops = {
        threshold: (running >= policy.level_of(threshold)).sum(-1, dtype=torch.int32) + later
        for threshold in {setting.threshold for setting in settings}
    }
    most = traces.drafts.int()
    return torch.stack(
        [stops[s.threshold].clamp(min=s.k_min).minimum(most.clamp(max=s.k_max)) for s in settings], dim=-1
    )


def running_statistic(traces: CoupledTraces, policy: ThresholdPolicy, scores: Tensor) -> Tensor:
    """The policy's statistic after judging each token of a round's path, (P, k_max); 0 where there is no token. scores:
    from `score_tokens`."""
    judged = torch.cat([scores, scores.new_zeros(1, *scores.shape[1:])])[traces.path]  # (P, k_max), or (P, k_max, 2)
    survival, statistic = policy.begin(judged.shape[:1], judged.device)
    running = judged.new_empty(judged.shape[:2])
    for depth in range(running.shape[1]):  # not cumprod, which may round differently from the policy
        survival, statistic = policy.follow(survival, statistic, judged[:, depth])
        running[:, depth] = statistic
    return running
