"""Stop when the draft's own probability of all drawn tokens becomes small."""

from __future__ import annotations

from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.spec import named
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, Signal


@named("cumulative-confidence", "[THRESHOLD]", "LLMCad: stop when all drawn tokens together had less than this")
class CumulativeConfidencePolicy(ThresholdPolicy):
    """Stop after Y_k ⇔ Π_{i≤k} q(Y_i) < threshold; Y_k is kept. LLMCad's rule for a chain. LLMCad's constants could not
    be verified; the default corresponds to a head at threshold 0.7.

    Greedy decoding reads the draft's plain softmax.
    """

    needs = reads = frozenset({Signal.LOGPROB})
    statistic = "product"
    grid = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

    def __init__(self, threshold: float = 0.3, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"cumulative-confidence threshold is {threshold}, expected a probability from 0 to 1")
        super().__init__("cumulative-confidence", threshold, k_min, k_max)

    def score(self, step: DraftStep) -> Tensor:
        assert step.logprob is not None
        return step.logprob.exp()
