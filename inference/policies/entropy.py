"""Stop when the entropy of the draft's distribution is high."""

from __future__ import annotations

from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.spec import named
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, Signal


@named("entropy", "[NATS]", "stop after a token whose distribution had more entropy than this")
class EntropyPolicy(ThresholdPolicy):
    """Stop after Y_k ⇔ H(q_k) > threshold, in nats; Y_k is kept. This is SVIP's rule without its scale: √(c·H) > h is
    H > h²/c, 0.6 nats with the constants of its authors.

    Greedy decoding reads the draft's plain softmax.
    """

    needs = reads = frozenset({Signal.ENTROPY})
    grid = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)

    def __init__(self, threshold: float = 0.6, *, k_min: int = 1, k_max: int = 20):
        if not 0 <= threshold < float("inf"):
            raise InputError(f"entropy threshold is {threshold}, expected a number of nats, 0 or more")
        super().__init__("entropy", threshold, k_min, k_max)

    @staticmethod
    def level_of(threshold: float) -> float:
        return -threshold

    def score(self, step: DraftStep) -> Tensor:
        assert step.entropy is not None
        return -step.entropy
