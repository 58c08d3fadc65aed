"""The calibration of a head's predictions at each depth of a round, on coupled traces."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.walk import round_starts
from accept_head.inference.report.data import CalibrationCurve
from accept_head.quality import expected_calibration_error

DEPTHS = ((1, 1), (2, 2), (3, 3), (4, 6), (7, None))
BINS = 10


def calibrate_depths(traces: CoupledTraces, head: str, predicted: Tensor) -> list[CalibrationCurve]:
    """Predicted against true acceptance at each depth, over tokens whose predecessors in the round were all accepted.

    Rounds have the greatest possible length. In shorter rounds, the head itself would have selected the tokens.

    predicted: (M,), P̂ of each token. The true acceptance is a(Y) = min(1, p/q).
    """
    starts = round_starts(traces, traces.drafts)
    reached = torch.minimum(traces.drafts, traces.leading + 1)[starts]
    depths = torch.cat([torch.arange(1, int(n) + 1) for n in reached])
    tokens = traces.tokens_of(starts.repeat_interleave(reached), depths - 1)
    truth = torch.from_numpy(np.concatenate(traces.traces.with_format("numpy")["acceptance"][:]))
    curves = []
    for low, high in DEPTHS:
        mine = tokens[(depths >= low) & (depths <= (high or traces.k_max))]
        if len(mine):
            label = f"{low}" if low == high else f"{low}-{high}" if high else f"{low}+"
            curves.append(_curve(head, label, predicted[mine].double(), truth[mine].double()))
    return curves


def _curve(head: str, depth: str, predicted: Tensor, observed: Tensor) -> CalibrationCurve:
    index = (predicted * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(index, minlength=BINS)
    filled = counts > 0
    means = [
        (torch.zeros(BINS, dtype=torch.double).index_add_(0, index, values) / counts)[filled].tolist()
        for values in (predicted, observed)
    ]
    return CalibrationCurve(
        head=head,
        depth=depth,
        count=len(predicted),
        predicted=means[0],
        observed=means[1],
        counts=counts[filled].tolist(),
        ece=expected_calibration_error(predicted, observed, torch.full_like(predicted, 1 / len(predicted)), BINS),
    )
