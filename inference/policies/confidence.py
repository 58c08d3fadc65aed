"""Stop when the draft gave the drawn token a low probability."""

from __future__ import annotations

from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.spec import named
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, Signal


@named("confidence", "[THRESHOLD]", "stop after a token that the draft gave less than this")
class ConfidencePolicy(ThresholdPolicy):
    """Stop after Y_k ⇔ q(Y_k) < threshold; Y_k is kept. transformers' `assistant_confidence_threshold`, per row.

    k_max is its `num_assistant_tokens`. Greedy decoding reads the draft's plain softmax, as in transformers.
    """

    needs = reads = frozenset({Signal.LOGPROB})

    def __init__(self, threshold: float = 0.4, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold <= 1:
            raise InputError(f"confidence threshold is {threshold}, expected a probability from 0 to 1")
        super().__init__("confidence", threshold, k_min, k_max)

    def score(self, step: DraftStep) -> Tensor:
        assert step.logprob is not None
        return step.logprob.exp()
