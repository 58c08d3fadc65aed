"""Named sets of training settings. `--recipe` picks one; any single setting can be overridden."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from accept_head.errors import InputError
from accept_head.head_config import Predicts
from accept_head.training.learn.mixing import Packing

Keep = Literal["best", "last"]

LR_HIDDEN_SIZE = 128
MOST_CHANNELS = 1024  # width `auto` is the draft's hidden size, but at most this
MOST_COMPONENTS = 128  # the same for a head with a base
# Rates that `auto` tries. The strong one generalises to prompts of another kind. The weak one learns more about the
# prompts of the traces (docs/log.md).
DECAYS = (8.0, 0.0)
AUTO_BATCH = (4, 32)  # least and most traces of a step, which is otherwise an 800th of the traces
STEPS_AN_EPOCH = 800


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training settings of a head.

    depth: residual blocks.
    width: channels of the head. None: the draft's hidden size. `auto`: the same, but at most MOST_CHANNELS.
    predicts: token, next or both.
    signals, embedding: whether the head also reads the draft signals, and the draft's input embedding of the drawn
        token.
    base: whether the signals go into a base that is fitted first. The other inputs, with the state standardised, then
        go into a residual, which is kept when it pays on dev traces.
    residual: whether a head with a base has a residual.
    w_acc, w_rej: loss weights of acceptance and rejection.
    packing: `exact`, or `mixing` with share r of target tokens, for a head that reads the state at the drawn token;
        `prefix` for a head that reads the state before it.
    epochs: passes over the traces.
    batch_size: traces per optimizer step, over all processes. `auto`: see AUTO_BATCH.
    lr: Adam's peak, after warmup_share of all steps; then a cosine to zero. A named recipe's lr is for LR_HIDDEN_SIZE
        channels; see `for_hidden_size`.
    decay: rate per epoch at which a residual's weights shrink at the peak lr. It does not depend on the number of steps
        in an epoch. `auto`: each of DECAYS is tried, and the weak one is taken when it pays on dev traces. With keep
        `last`, only the strong one is tried.
    alternatives: how many alternatives to each drawn token a head with prefix packing learns from. `all`: as many as
        the traces have; see `for_alternatives`.
    keep: the epoch whose weights are kept; see HeadTraining.
    """

    depth: int = 3
    predicts: Predicts = "token"
    signals: bool = False
    embedding: bool = False
    base: bool = False
    residual: bool = True
    width: int | Literal["auto"] | None = None
    w_acc: float = 1.0
    w_rej: float = 1.0
    packing: Packing = "mixing"
    alternatives: int | Literal["all"] = 0
    r: float = 0.15
    epochs: int = 3
    batch_size: int | Literal["auto"] = 32
    lr: float = 3e-3
    decay: float | Literal["auto"] = 0.0
    warmup_share: float = 0.03
    keep: Keep = "last"

    def __post_init__(self) -> None:
        for name in ("w_acc", "w_rej", "lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.decay != "auto" and not 0 <= self.decay < float("inf"):
            raise InputError(f"decay is {self.decay}, expected a number from 0 on, or auto")
        if self.epochs < 1:
            raise InputError(f"epochs is {self.epochs}, expected a positive integer")
        if self.batch_size != "auto" and self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}, expected a positive integer or auto")
        if self.alternatives != "all" and self.alternatives < 0:
            raise InputError(f"alternatives is {self.alternatives}, expected a number from 0 on, or all")
        if isinstance(self.alternatives, int) and self.alternatives and not self.knows_alternatives:
            raise InputError(
                f"alternatives is {self.alternatives}, but only a head that predicts token or both, with prefix "
                "packing, can learn of tokens that were not fed to the draft"
            )
        if isinstance(self.width, int) and self.width < 1:
            raise InputError(f"width is {self.width}, expected a positive integer or auto")
        for name in ("r", "warmup_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected a number from 0 to 1")

    def for_hidden_size(self, hidden_size: int) -> Recipe:
        """This recipe with a fixed width and with lr × LR_HIDDEN_SIZE / channels.

        channels: width in which the state enters the first product. Adam's step moves a pre-activation by about
        lr × channels.
        """
        if self.base:
            components = min(hidden_size, MOST_COMPONENTS) if self.width == "auto" else self.width or hidden_size
            return replace(self, lr=self.lr * LR_HIDDEN_SIZE / components, width=components)
        width = min(hidden_size, MOST_CHANNELS) if self.width == "auto" else self.width
        width = None if width == hidden_size else width
        return replace(self, lr=self.lr * LR_HIDDEN_SIZE / hidden_size, width=width)

    @property
    def decays(self) -> tuple[float, ...]:
        """The decay rates to try, the strong one first."""
        if self.decay == "auto":
            return DECAYS if self.keep == "best" else DECAYS[:1]
        return (self.decay,)

    @property
    def knows_alternatives(self) -> bool:
        """Whether the head can learn from alternatives, which the draft was not fed with."""
        return self.packing == "prefix" and self.predicts != "next"

    def for_alternatives(self, there: int) -> Recipe:
        """This recipe with a fixed number of alternatives. Raises InputError for more than the traces have."""
        if self.alternatives == "all":
            return replace(self, alternatives=there if self.knows_alternatives else 0)
        if self.alternatives > there:
            raise InputError(
                f"alternatives is {self.alternatives}, but the traces have {there}; `accept-head collect` with "
                f"--alternatives {self.alternatives} makes such"
            )
        return self

    def for_traces(self, traces: int, processes: int) -> Recipe:
        """This recipe with a fixed batch_size, of at least one trace per process.

        `auto` becomes a power of two per process (AUTO_BATCH). A number above the number of traces is cut to a multiple
        of `processes`.
        """
        if self.batch_size == "auto":
            least, most = AUTO_BATCH
            each = min(max(traces // STEPS_AN_EPOCH, least), most, traces) // processes
            return replace(self, batch_size=processes << max(each.bit_length() - 1, 0))
        fitting = max(1, min(self.batch_size, traces) // processes) * processes
        return replace(self, batch_size=fitting) if traces < self.batch_size else self

    def override(self, **given: Any) -> Recipe:
        """This recipe with every value that is not None replaced."""
        known = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in given.items() if value is not None and name in known})


RECIPES = {
    # SpecDec++ §4.4 and §5: token mixing with r = 0.15, 3 epochs, batch 32, and the weight of the published head.
    "specdecpp": Recipe(w_rej=6.0),
    # The draft's probability of the drawn token predicts most of its acceptance (docs/log.md), so the base is fitted to
    # it first. The residual reads the drawn token and the state before it. This state predicts as well as the state at
    # the token, one draft forward earlier. Small steps.
    "default": Recipe(
        depth=2,
        signals=True,
        embedding=True,
        base=True,
        width="auto",
        packing="prefix",
        alternatives="all",
        epochs=6,
        batch_size="auto",
        decay="auto",
        keep="best",
    ),
    # The base alone: no draft is run, and a few dozen prompts are enough.
    "signals": Recipe(depth=0, signals=True, base=True, residual=False, packing="prefix", alternatives="all"),
}


def variants(recipe: Recipe, depth: int | list[int] | None, w_rej: float | list[float] | None) -> dict[str, Recipe]:
    """The recipe of every head of a run, by the head's name.

    Single values give one head, named "". A list makes a sweep: one head for each combination, named like
    depth3-w_rej6. Raises InputError naming the option when a list is empty or has a value twice.
    """
    if not isinstance(depth, list) and not isinstance(w_rej, list):
        return {"": recipe.override(depth=depth, w_rej=w_rej)}
    depths = _listed("depth", recipe.depth if depth is None else depth)
    weights = _listed("w_rej", recipe.w_rej if w_rej is None else w_rej)
    return {f"depth{d}-w_rej{_short(w)}": recipe.override(depth=d, w_rej=w) for d in depths for w in weights}


def _listed(option: str, values: Any) -> list[Any]:
    values = values if isinstance(values, list) else [values]
    if not values:
        raise InputError(f"--{option} is an empty list, expected at least one value")
    if twice := [value for place, value in enumerate(values) if value in values[:place]]:
        raise InputError(f"--{option} is {values}, which has {twice[0]} twice")
    return values


def _short(number: float) -> str:
    """6.0 as 6, but with all digits when rounding would make two numbers equal."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)
