"""SVIP: stop when the draft's entropy suggests that its distribution is far from the target's."""

from __future__ import annotations

from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.policies.spec import named
from accept_head.inference.policies.threshold import ThresholdPolicy
from accept_head.inference.policy import DraftStep, Signal


@named("svip", "[THRESHOLD]", "SVIP: the same on the scale of its authors")
class SvipPolicy(ThresholdPolicy):
    """Stop after Y_k ⇔ √(c·H(q_k)) > threshold, H in nats, c = 0.15; Y_k is kept (arXiv:2411.18462). The release has
    threshold 0.3, which is H > 0.6 nats, and 1 to 40 tokens.

    H is the entropy of the distribution that is sampled from. The release takes the plain softmax, as greedy decoding
    does here.
    """

    needs = reads = frozenset({Signal.ENTROPY})
    grid = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8)
    SCALE = 0.15

    def __init__(self, threshold: float = 0.3, *, k_min: int = 1, k_max: int = 40):
        if not 0 <= threshold < float("inf"):
            raise InputError(f"svip threshold is {threshold}, expected a number, 0 or more")
        super().__init__("svip", threshold, k_min, k_max)

    @staticmethod
    def level_of(threshold: float) -> float:
        return -threshold

    def score(self, step: DraftStep) -> Tensor:
        assert step.entropy is not None
        return -(self.SCALE * step.entropy.clamp(min=0)).sqrt()
