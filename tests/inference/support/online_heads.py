"""Small heads that learn while they decode."""

from __future__ import annotations

import torch

from accept_head import AcceptanceHead
from accept_head.head_config import HeadConfig
from accept_head.inference.policies.online.recalibration import OnlineRecalibration

HIDDEN, DEPTHS = 8, 4


def linear_head(seed=0):
    torch.manual_seed(seed)
    return AcceptanceHead(HeadConfig(hidden_size=HIDDEN, depth=0, reads="before")).eval()


def correction(signals=((), ())):
    made = OnlineRecalibration(DEPTHS, signals=signals)
    made.start(1, torch.device("cpu"))
    return made
