"""The config of a head: its inputs, its size and what it predicts. A head's `config.json` holds just this."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from accept_head.base import places_of
from accept_head.errors import InputError
from accept_head.files import is_number
from accept_head.signals import SIGNALS

Predicts = Literal["token", "next", "both"]
Prediction = Literal["token", "next"]
Reads = Literal["drawn", "before"]

MAX_DEPTH = 4
MAX_CHANNELS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The config of a head: its inputs, its size and what it predicts.

    hidden_size: channels of the draft's last hidden state.
    depth: number of residual blocks, 0 (a linear probe) to 4.
    predicts: `token`, the acceptance probability a(Y_i) of the token fed at this position (SpecDec++); `next`, the
        expected acceptance β_{i+1} of the token to be drawn after it; or `both`, one logit each. With `both`, a head
        that reads which token was drawn (signals or embedding) predicts a(Y_i), and β_{i+1} if Y_i is accepted, before
        Y_i is fed. Without these inputs `next` depends on the state alone.
    reads: the hidden state that the head reads for Y_i. `drawn`: the state at Y_i (SpecDec++). `before`: the state that
        Y_i was drawn from.
    signals: draft signals (signals.SIGNALS) of Y_i that the head also reads. Not with predicts `next`.
    signal_mean, signal_std: mean and deviation that normalise each signal. With a base: each function of the signals.
    base: whether the logits have a part that is linear in functions of the signals (base.py). The residual then reads
        these functions in place of the signals.
    standardised: whether the state enters as its `width` largest principal components, standardised. The head applies
        them as a fixed matrix with an offset.
    residual: whether the head has more than its base: blocks and their inputs.
    embedding_std: root mean square of the draft's embedding matrix. The head then also reads the draft's input
        embedding of Y_i, divided by this. None: the head does not read the embedding. Not with predicts `next`.
    width: channels inside the head. None = hidden_size, and the state enters unchanged, as in the paper.
    """

    hidden_size: int
    depth: int = 3
    predicts: Predicts = "token"
    reads: Reads = "drawn"
    signals: tuple[str, ...] = ()
    signal_mean: tuple[float, ...] = ()
    signal_std: tuple[float, ...] = ()
    embedding_std: float | None = None
    width: int | None = None
    base: bool = False
    standardised: bool = False
    residual: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (
            ("hidden_size", 1, MAX_CHANNELS),
            ("width", 1, MAX_CHANNELS),
            ("depth", 0, MAX_DEPTH),
        ):
            value = getattr(self, name)
            if (type(value) is not int or not least <= value <= most) and (name != "width" or value is not None):
                raise InputError(f"head config: {name} is {value!r}, expected an integer from {least} to {most}")
        for name, kind in (("predicts", Predicts), ("reads", Reads)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"head config: {name} is {getattr(self, name)!r}, expected one of {get_args(kind)}")
        self._check_signals()
        self._check_base()
        if self.embedding_std is not None:
            if not is_number(self.embedding_std) or not self.embedding_std > 0:
                raise InputError(f"head config: embedding_std is {self.embedding_std!r}, expected a positive number")
            if self.predicts == "next":
                raise InputError("head config: an embedding is of a drawn token, but predicts is 'next'")

    def _check_signals(self) -> None:
        for name in ("signals", "signal_mean", "signal_std"):
            if not isinstance(getattr(self, name), list | tuple):
                raise InputError(f"head config: {name} is {getattr(self, name)!r}, expected a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON gives lists
        if unknown := [signal for signal in self.signals if signal not in SIGNALS]:
            raise InputError(f"head config: signal {unknown[0]!r} is unknown, expected some of {SIGNALS}")
        if len(set(self.signals)) < len(self.signals):
            raise InputError(f"head config: signals is {list(self.signals)}, in which one is named twice")
        for name in ("signal_mean", "signal_std"):
            values = getattr(self, name)
            if len(values) != self.inputs or not all(is_number(value) for value in values):
                each = "function of the signals" if self.base else "signal"
                raise InputError(f"head config: {name} is {values}, expected one finite number a {each}")
        if not all(value > 0 for value in self.signal_std):
            raise InputError(f"head config: signal_std is {self.signal_std}, expected positive numbers")
        if self.signals and self.predicts == "next":
            raise InputError("head config: signals describe a drawn token, but predicts is 'next'")

    def _check_base(self) -> None:
        for name in ("base", "standardised", "residual"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"head config: {name} is {getattr(self, name)!r}, expected true or false")
        if self.base and not self.signals:
            raise InputError("head config: base is true, but signals, which it is a function of, is empty")
        if self.standardised and self.width is None:
            raise InputError("head config: standardised is true, but width, the number of components, is null")
        if self.residual:
            return
        if not self.base:
            raise InputError("head config: base and residual are false, so that nothing is left of the head")
        if self.depth or self.width or self.embedding_std is not None or self.reads != "before":
            raise InputError(
                "head config: residual is false, expected depth 0, reads before, and neither width nor embedding_std: "
                "a base reads the signals only"
            )

    @property
    def inputs(self) -> int:
        """How many numbers the head reads from a token's signals."""
        return len(places_of(self.signals)) if self.base else len(self.signals)

    @property
    def channels(self) -> int:
        """Width of the residual blocks."""
        return self.width or self.hidden_size

    @property
    def reads_embedding(self) -> bool:
        return self.embedding_std is not None

    @property
    def sees_drawn(self) -> bool:
        """Whether the head reads which token was drawn from an input other than the state."""
        return bool(self.signals) or self.reads_embedding

    @property
    def looks_ahead(self) -> bool:
        """Whether the head predicts the acceptance of Y_{i+1} once Y_i is drawn.

        If neither the state nor another input depends on Y_i, the second logit is a prediction for Y_i itself.
        """
        return self.predicts == "both" and (self.reads == "drawn" or self.sees_drawn)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The predictions in the order of the head's logits."""
        return ("token", "next") if self.predicts == "both" else (self.predicts,)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every weight in a `model.safetensors` of this head."""
        layers: dict[str, tuple[int, int, bool]] = {}  # name → outputs, inputs, whether there is a bias
        channels, predictions = self.channels, len(self.predictions)
        if self.base:
            layers["base"] = (predictions, self.inputs, True)
        if self.residual:
            layers |= {f"blocks.{block}.linear": (channels, channels, True) for block in range(self.depth)}
            layers["output"] = (predictions, channels, True)
            if self.signals:
                layers["signal_input"] = (channels, self.inputs, False)
            if self.reads_embedding:
                layers["embedding_input"] = (channels, self.hidden_size, False)
            if self.width is not None:
                layers["state_input"] = (channels, self.hidden_size, self.standardised)
        weights = {f"{name}.weight": (outputs, inputs) for name, (outputs, inputs, _) in layers.items()}
        return weights | {f"{name}.bias": (outputs,) for name, (outputs, _, biased) in layers.items() if biased}

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "head config") -> HeadConfig:
        """Make a config from JSON values. Raises InputError naming `source` and the unknown or missing field."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(f"{source}: unknown field {unknown[0]!r}, expected {sorted(known)}")
        if "hidden_size" not in values:
            raise InputError(f"{source}: field 'hidden_size' is missing")
        return cls(**values)
