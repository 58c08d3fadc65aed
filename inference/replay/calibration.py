"""A head's calibration by depth: the rounds of coupled traces that it is fitted on, and how well it then holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from accept_head.calibration import DepthCalibration, Rounds, fit_affine, fit_isotonic, fit_temperatures
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.walk import round_starts
from accept_head.quality import quality

Method = Literal["temperature", "isotonic", "affine"]
FITS: dict[Method, Callable[..., DepthCalibration]] = {
    "temperature": fit_temperatures,
    "isotonic": fit_isotonic,
    "affine": fit_affine,
}


def rounds_of(traces: CoupledTraces, policy: HeadPolicy, depths: int | None = None) -> Rounds:
    """Rounds that are as long as can be, one after the other through all responses, with what the head says of their
    tokens: at any shorter ones the head itself would have chosen which tokens it is judged by. depths: the first so
    many of each; as many as the traces were rolled out for, but for the last, when left out.
    """
    depths = depths or traces.k_max - 1
    starts = round_starts(traces, traces.drafts)
    scores = score_tokens(traces, policy)
    scores = scores[..., 0] if policy.predicts_next else scores
    tokens = traces.path[starts, :depths]  # (rounds, depths)
    depth = torch.arange(tokens.shape[1])
    drafted = depth < traces.drafts[starts, None]
    at_risk = drafted & (depth <= traces.leading[starts, None])
    truth = torch.from_numpy(np.concatenate(traces.traces.with_format("numpy")["acceptance"][:]))
    places = (starts[:, None] + depth).clamp(max=traces.positions - 1)
    return Rounds(
        predicted=torch.cat([scores, scores.new_zeros(1)])[tokens].double().numpy(),
        acceptance=torch.where(at_risk, truth[places].double(), 0.0).numpy(),
        drafted=drafted.numpy(),
        at_risk=at_risk.numpy(),
    )


def calibrated(rounds: Rounds, calibration: DepthCalibration) -> Rounds:
    """The same rounds, with the probabilities that the calibration makes of them."""
    predicted = torch.from_numpy(rounds.predicted).float()
    columns = [calibration(depth + 1, predicted[:, depth]) for depth in range(predicted.shape[1])]
    return Rounds(
        predicted=torch.stack(columns, dim=1).double().numpy(),
        acceptance=rounds.acceptance,
        drafted=rounds.drafted,
        at_risk=rounds.at_risk,
    )


def survival_quality(rounds: Rounds) -> list[dict[str, float]]:
    """Of each depth: how well Π P̂ says whether a round's tokens up to there are all accepted (calibration.Quality)."""
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
