"""Named sets of training settings. `--recipe` picks one; any single setting can be overridden."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from accept_head.errors import InputError
from accept_head.head import Predicts
from accept_head.training.mixing import Packing

LR_HIDDEN_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """depth: residual blocks. predicts: token, next or both. signals: whether the head also reads the draft signals.

    w_acc, w_rej: loss weights of acceptance and rejection. packing: exact, or mixing with share r of target tokens, for
    a head that reads the state at the drawn token; prefix for one that reads the state before it. epochs: passes over
    the traces. batch_size: traces an optimizer step, over all processes. lr: Adam's peak, after warmup_share of all
    steps; then cosine to zero. A named recipe's lr is for LR_HIDDEN_SIZE channels; see `for_hidden_size`.
    """

    depth: int = 3
    predicts: Predicts = "token"
    signals: bool = False
    w_acc: float = 1.0
    w_rej: float = 1.0
    packing: Packing = "mixing"
    r: float = 0.15
    epochs: int = 3
    batch_size: int = 32
    lr: float = 3e-3
    warmup_share: float = 0.03

    def __post_init__(self) -> None:
        for name in ("w_acc", "w_rej", "lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}, expected a positive number")
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected a positive integer")
        for name in ("r", "warmup_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected a number from 0 to 1")

    def for_hidden_size(self, hidden_size: int) -> Recipe:
        """lr × LR_HIDDEN_SIZE / hidden_size: a step of Adam moves a pre-activation by about lr × channels."""
        return replace(self, lr=self.lr * LR_HIDDEN_SIZE / hidden_size)

    def for_traces(self, traces: int, processes: int) -> Recipe:
        """With the batch size cut to the traces there are, to a multiple of `processes`, at least one each."""
        fitting = max(1, min(self.batch_size, traces) // processes) * processes
        return replace(self, batch_size=fitting) if traces < self.batch_size else self

    def override(self, **given: Any) -> Recipe:
        """This recipe with every value that is not None replaced."""
        known = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in given.items() if value is not None and name in known})


RECIPES = {
    # SpecDec++ §4.4 and §5: token mixing with r = 0.15, 3 epochs, batch 32, and the weight of the published head.
    "specdecpp": Recipe(w_rej=6.0),
    # The hidden state does not say how likely the draft thought the token it drew; the signals do. With them the state
    # before the token is as good a judge as the one at it, and judges one draft forward earlier.
    "default": Recipe(signals=True, packing="prefix", epochs=10, batch_size=16),
}
