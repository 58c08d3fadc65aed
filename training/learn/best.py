"""The weights of each candidate's best epoch, by the dev traces, and which candidates they make the run's heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accept_head.quality import Quality
from accept_head.training.learn.candidates import Candidate

# Share of the dev KL that a residual must save over its base, and a weaker decay over a stronger one. A smaller gain
# can be luck in choosing the best epoch, or hold for these prompts alone.
PAYS = 0.01


class BestWeights:
    """weights: those kept, by the candidate's place; none for a candidate that was never better than its base.
    kl: the dev KL that a candidate has to be below."""

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = candidates
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.kl = [mean_kl(one.base.dev) * (1 - PAYS) if one.base else math.inf for one in candidates]

    def judge(self, place: int, dev: dict[str, Quality]) -> None:
        """Keep the candidate's weights as they are now, if they are its best. dev: their quality."""
        kl = mean_kl(dev)
        if kl < self.kl[place]:
            state = self.candidates[place].head.state_dict()
            self.kl[place] = kl
            self.weights[place] = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def take(self) -> bool:
        """Give heads the weights that are kept of them. Returns whether there are any."""
        for place, state in self.weights.items():
            self.candidates[place].head.load_state_dict(state)
        return bool(self.weights)

    def chosen(self) -> list[int]:
        """One candidate of each name, by its place."""
        chosen: dict[str, int] = {}
        for place, one in enumerate(self.candidates):
            before = chosen.setdefault(one.name, place)
            if self.kl[place] < self.kl[before] * (1 - PAYS) or before not in self.weights:
                chosen[one.name] = place
        return list(chosen.values())

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "kl": self.kl}

    def load(self, state: dict[str, Any]) -> None:
        self.weights, self.kl = state["weights"], state["kl"]


def mean_kl(found: dict[str, Quality]) -> float:
    """Over the predictions of a head."""
    return sum(each.binary_kl for each in found.values()) / len(found)
