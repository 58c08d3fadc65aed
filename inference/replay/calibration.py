"""A head's calibration by depth: the rounds of coupled traces to fit it on, and the quality of the result."""

from __future__ import annotations

import numpy as np
import torch

from accept_head.calibration import DepthCalibration, Rounds
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.walk import round_starts
from accept_head.quality import quality

DEPTHS = 8  # of a round; deeper tokens have the map of the last one


def rounds_of(traces: CoupledTraces, policy: HeadPolicy) -> Rounds:
    """Rounds of the largest possible length, one after the other through all responses, with the head's predictions for
    the first DEPTHS tokens of each. With shorter rounds the head itself would select the tokens that it is judged on.
    """
    starts = round_starts(traces, traces.drafts)
    scores = score_tokens(traces, policy)
    scores = scores[..., 0] if policy.predicts_next else scores
    tokens = traces.path[starts, : min(traces.k_max - 1, DEPTHS)]  # (rounds, depths)
    depth = torch.arange(tokens.shape[1])
    drafted = depth < traces.drafts[starts, None]
    at_risk = drafted & (depth <= traces.leading[starts, None])
    truth = torch.from_numpy(np.concatenate(traces.traces.with_format("numpy")["acceptance"][:]))
    places = traces.tokens_of(starts[:, None], depth).clamp(max=traces.of_responses - 1)
    return Rounds(
        predicted=torch.cat([scores, scores.new_zeros(1)])[tokens].double().numpy(),
        acceptance=torch.where(at_risk, truth[places].double(), 0.0).numpy(),
        drafted=drafted.numpy(),
        at_risk=at_risk.numpy(),
    )


def calibrated(rounds: Rounds, calibration: DepthCalibration) -> Rounds:
    """The same rounds with calibrated probabilities."""
    predicted = torch.from_numpy(rounds.predicted).float()
    columns = [calibration(depth + 1, predicted[:, depth]) for depth in range(predicted.shape[1])]
    return Rounds(
        predicted=torch.stack(columns, dim=1).double().numpy(),
        acceptance=rounds.acceptance,
        drafted=rounds.drafted,
        at_risk=rounds.at_risk,
    )


def survival_quality(rounds: Rounds) -> list[dict[str, float]]:
    """Per depth: how well Π P̂ predicts that all tokens of a round up to there are accepted (see quality.quality)."""
    survival = torch.from_numpy(rounds.predicted).cumprod(1)
    truth, drafted = torch.from_numpy(rounds.survived), torch.from_numpy(rounds.drafted)
    rows = []
    for depth in range(survival.shape[1]):
        mine = drafted[:, depth]
        if mine.any():
            rows.append(
                {"depth": depth + 1, **quality(survival[mine, depth].logit(eps=1e-7), truth[mine, depth]).to_dict()}
            )
    return rows
