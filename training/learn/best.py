"""The weights of each candidate's best epoch on the dev traces, and which candidates become the run's heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accept_head.quality import Quality
from accept_head.training.learn.candidates import Candidate

# Share of the dev KL that a residual must save over its base, and a weaker decay over a stronger one. A smaller gain
# can be luck in the choice of the best epoch, or hold only for these prompts.
PAYS = 0.01


class BestWeights:
    """The best weights of each candidate so far.

    weights: by the candidate's index; none for a candidate that was never better than its base. kl: the dev KL that
    each candidate has to be below.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = candidates
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.kl = [mean_kl(one.base.dev) * (1 - PAYS) if one.base else math.inf for one in candidates]

    def judge(self, place: int, dev: dict[str, Quality]) -> None:
        """Keep the candidate's present weights if they are its best. dev: their quality on dev traces."""
        kl = mean_kl(dev)
        if kl < self.kl[place]:
            state = self.candidates[place].head.state_dict()
            self.kl[place] = kl
            self.weights[place] = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def take(self) -> bool:
        """Load the kept weights into their heads. Returns whether there are any; they must be judged again."""
        for place, state in self.weights.items():
            self.candidates[place].head.load_state_dict(state)
        return bool(self.weights)

    def chosen(self) -> list[int]:
        """The index of the chosen candidate for each name."""
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
    """Mean binary KL over the predictions of a head."""
    return sum(each.binary_kl for each in found.values()) / len(found)
