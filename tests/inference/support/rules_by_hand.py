"""Threshold rules on made-up traces, decided token by token, and the oracle's counts."""

from __future__ import annotations

import numpy as np
import torch

from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.entropy import EntropyPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.max_prob import MaxProbPolicy
from accept_head.inference.policies.svip import SvipPolicy
from tests.inference.support.made_up import HIDDEN
from tests.inference.support.toy import random_head


def head_of(**config):
    """Sure of most tokens, so that a product falls slowly."""
    head = random_head(HIDDEN, **config)
    torch.nn.init.constant_(head.output.bias, 1.5)
    return head


DRAWN, SIGNALS, BEFORE = head_of(), head_of(signals=True), head_of(reads="before", signals=True)
BOTH, BOTH_DRAWN = head_of(reads="before", signals=True, predicts="both"), head_of(predicts="both")
RULES = {
    "confidence": ConfidencePolicy,
    "cumulative-confidence": CumulativeConfidencePolicy,
    "max-prob": MaxProbPolicy,
    "entropy": EntropyPolicy,
    "svip": SvipPolicy,
    "head before": lambda threshold, **bounds: HeadPolicy(BEFORE, threshold, **bounds),
    "head lag 1": lambda threshold, **bounds: HeadPolicy(DRAWN, threshold, lag=1, **bounds),
    "head lag 0": lambda threshold, **bounds: HeadPolicy(DRAWN, threshold, lag=0, **bounds),
    "head with signals lag 1": lambda threshold, **bounds: HeadPolicy(SIGNALS, threshold, lag=1, **bounds),
    "head with signals lag 0": lambda threshold, **bounds: HeadPolicy(SIGNALS, threshold, lag=0, **bounds),
    "head of both": lambda threshold, **bounds: HeadPolicy(BOTH, threshold, **bounds),
    "head of both lag 1": lambda threshold, **bounds: HeadPolicy(BOTH_DRAWN, threshold, lag=1, **bounds),
    "head of both by its product": lambda threshold, **bounds: HeadPolicy(BOTH, threshold, rule="product", **bounds),
}
LAGGING = {"head lag 1", "head with signals lag 1", "head of both lag 1"}
GAINS = {"head of both", "head of both lag 1"}
COSTLY = {"head lag 0", "head with signals lag 0"}


def head_score(head, hidden, prediction="token"):
    """P̂ or β̂ of one token, by the head's own forward on one row."""

    def score(token):
        state = token.fed if hidden == "fed" else token.drawn
        signals = torch.tensor([[token.logprob, token.entropy, token.max_prob]]) if head.config.signals else None
        with torch.no_grad():
            return float(head.probability(state[None], prediction, signals=signals))

    return score


SCORES = {
    "confidence": lambda token: np.exp(token.logprob),
    "cumulative-confidence": lambda token: np.exp(token.logprob),
    "max-prob": lambda token: token.max_prob,
    "entropy": lambda token: -token.entropy,
    "svip": lambda token: -np.sqrt(0.15 * token.entropy),
    "head before": head_score(BEFORE, "fed"),
    "head lag 1": head_score(DRAWN, "drawn"),
    "head lag 0": head_score(DRAWN, "drawn"),
    "head with signals lag 1": head_score(SIGNALS, "drawn"),
    "head with signals lag 0": head_score(SIGNALS, "drawn"),
    "head of both": head_score(BOTH, "fed"),
    "head of both lag 1": head_score(BOTH_DRAWN, "drawn"),
    "head of both by its product": head_score(BOTH, "fed"),
}
NEXT = {"head of both": head_score(BOTH, "fed", "next"), "head of both lag 1": head_score(BOTH_DRAWN, "drawn", "next")}


def decider(name, threshold, k_min, k_max):
    """docs/theory.md §3, §5 or a plain cut-off, token by token: (how many are drafted, forwards for nothing)."""
    score, lag = SCORES[name], int(name in LAGGING)

    def stop_is_known_after(tokens):
        scores = [score(token) for token in tokens]
        if name in GAINS:
            return 1 - np.prod(scores) * NEXT[name](tokens[-1]) > threshold
        if name.startswith("head"):
            return 1 - np.prod(scores) > threshold
        if name == "cumulative-confidence":
            return np.prod(scores) < threshold
        return scores[-1] < threshold if name in ("confidence", "max-prob") else -scores[-1] > threshold

    def decide(tokens):
        most = min(len(tokens), k_max)
        stopped = False
        for depth in range(1, most):
            judged = tokens[: depth - lag]
            stopped = stopped or (len(judged) > 0 and bool(stop_is_known_after(judged)))
            if stopped and depth >= k_min:
                return depth, int(name in COSTLY)
        return most, 0

    return decide


def assert_same(replayed, walked):
    """All figures; of the slow walk, or of another replay."""
    assert np.array_equal(replayed.counts, walked.counts)
    size = len(walked.draft_lengths)
    for name in ("draft_lengths", "at_risk", "accepted"):
        assert getattr(replayed, name)[:size].tolist() == getattr(walked, name).tolist(), name


def theorem_4_1(record):
    """S: the positions but the last at which the proposal is rejected; nothing is discarded, |S| + 1 verifications."""
    generated = len(record["accepted"])
    verified = 1 + sum(not kept for kept in record["accepted"][:-1])
    return [generated, 0, verified, generated - verified]
