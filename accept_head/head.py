"""The acceptance prediction head: a small network on the draft's last hidden state (SpecDec++ §4.1, eq. 4.1).

    P̂(Y_i accepted | x, Y₁..Y_i) = sigmoid(f_θ(e_i))        e_i: the draft's hidden state, after the final norm, at Y_i

Ours may read e_{i−1} instead, the state that Y_i was drawn from, together with what says which token was drawn: the
draft signals of Y_i and the draft's input embedding of it. It judges one draft forward earlier.

f_θ is `depth` residual blocks e ← e + SiLU(W e + b), each with weights of its own (the research code shares one matrix
among all of them), and a linear layer with one logit per prediction. Before them, what a head reads is brought to its
width and added up.

A head with a base (base.py) adds to the base's logit what f_θ knows beyond it, from state and embedding; or is the base
alone, and reads neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from accept_head.base import BASE_FUNCTIONS, base_functions, places_of
from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.head_folder import HEAD_CONFIG_NAME, WEIGHTS_NAME, head_folder
from accept_head.signals import SIGNALS

Predicts = Literal["token", "next", "both"]
Prediction = Literal["token", "next"]
Reads = Literal["drawn", "before"]

Score = Callable[..., Tensor]
Product = Callable[..., Tensor]  # (x, matrix, offset) → x·matrix + offset

MAX_DEPTH = 4
MAX_CHANNELS = 1 << 20
SMALL_MATRIX = 1 << 16  # elements
TABLE_BYTES = 1 << 28  # largest table of projected embeddings that serving keeps


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head is; the whole content of its `config.json`.

    hidden_size: channels of the draft's last hidden state.
    depth: residual blocks, 0 (a linear probe) to 4.
    predicts: `token`, the acceptance probability a(Y_i) of the token fed at this position (SpecDec++); `next`, the
        expected acceptance β_{i+1} of the token to be drawn after it; or `both`, one logit each. Of a head that is told
        which token was drawn (signals or embedding), `both` are two statements about Y_i: a(Y_i), and β_{i+1} given
        that Y_i is accepted; it needs not have been fed. Of one that is not, `next` is a function of the state alone.
    reads: which hidden state judges Y_i: `drawn`, the one at Y_i (SpecDec++), or `before`, the one Y_i was drawn from.
    signals: draft signals (signals.SIGNALS) of Y_i that the head also reads; not for `next` alone.
    signal_mean, signal_std: what each signal is normalised with, inside the head; with a base, each function of them.
    base: the logits have a part that is linear in functions of the signals (base.py), and the residual reads these
        functions, too, in place of the signals.
    standardised: the state goes in through a matrix with an offset, which were made to give its standardised principal
        components; `width` is how many.
    residual: whether there is more to the head than its base: blocks, and what they read.
    embedding_std: the head also reads the draft's input embedding of Y_i, divided by this, the root mean square of the
        draft's embedding matrix; None = it does not. Not for `next` alone.
    width: channels inside the head; None = hidden_size, and the state goes in as it is, as in the paper.
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
        if not _is_int(self.hidden_size) or not 1 <= self.hidden_size <= MAX_CHANNELS:
            raise InputError(f"head config: hidden_size is {self.hidden_size!r}, expected 1 to {MAX_CHANNELS}")
        if self.width is not None and (not _is_int(self.width) or not 1 <= self.width <= MAX_CHANNELS):
            raise InputError(f"head config: width is {self.width!r}, expected 1 to {MAX_CHANNELS}, or null")
        if not _is_int(self.depth) or not 0 <= self.depth <= MAX_DEPTH:
            raise InputError(f"head config: depth is {self.depth!r}, expected an integer from 0 to {MAX_DEPTH}")
        if self.predicts not in get_args(Predicts):
            raise InputError(f"head config: predicts is {self.predicts!r}, expected one of {get_args(Predicts)}")

        if self.reads not in get_args(Reads):
            raise InputError(f"head config: reads is {self.reads!r}, expected one of {get_args(Reads)}")
        self._check_signals()
        self._check_base()
        if self.embedding_std is not None:
            if not _is_finite(self.embedding_std) or not self.embedding_std > 0:
                raise InputError(f"head config: embedding_std is {self.embedding_std!r}, expected a positive number")
            if self.predicts == "next":
                raise InputError("head config: an embedding is of a drawn token, but predicts is 'next'")

    def _check_signals(self) -> None:
        for name in ("signals", "signal_mean", "signal_std"):
            if not isinstance(getattr(self, name), list | tuple):
                raise InputError(f"head config: {name} is {getattr(self, name)!r}, expected a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list when it comes from JSON
        if unknown := [signal for signal in self.signals if signal not in SIGNALS]:
            raise InputError(f"head config: signal {unknown[0]!r} is unknown, expected some of {SIGNALS}")
        if len(set(self.signals)) < len(self.signals):
            raise InputError(f"head config: signals is {list(self.signals)}, in which one is named twice")
        for name in ("signal_mean", "signal_std"):
            values = getattr(self, name)
            if len(values) != self.inputs or not all(_is_finite(value) for value in values):
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
        """Numbers that the head is told of a token's signals."""
        return len(places_of(self.signals)) if self.base else len(self.signals)

    @property
    def channels(self) -> int:
        """Inside the head."""
        return self.width or self.hidden_size

    @property
    def reads_embedding(self) -> bool:
        return self.embedding_std is not None

    @property
    def sees_drawn(self) -> bool:
        """Whether it is told which token was drawn, and not by the state at it alone."""
        return bool(self.signals) or self.reads_embedding

    @property
    def looks_ahead(self) -> bool:
        """Whether, once Y_i is drawn, it says how likely Y_{i+1} will be accepted: a second logit of a state that has
        not seen Y_i, from a head that has not either, speaks of Y_i itself."""
        return self.predicts == "both" and (self.reads == "drawn" or self.sees_drawn)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The predictions in the order of the head's logits."""
        return ("token", "next") if self.predicts == "both" else (self.predicts,)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "head config") -> HeadConfig:
        """Strict: an unknown or missing field is an InputError that names it and `source`."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(f"{source}: unknown field {unknown[0]!r}, expected {sorted(known)}")
        if "hidden_size" not in values:
            raise InputError(f"{source}: field 'hidden_size' is missing")
        return cls(**values)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). W starts at zero, so that a deep head starts as a linear probe."""

    def __init__(self, channels: int):
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class AcceptanceHead(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="accept-head",
    tags=["speculative-decoding", "acceptance-prediction"],
):
    """Acceptance prediction head. Saved as, and loaded from, `model.safetensors` and `config.json` only."""

    signal_places: Tensor
    signal_mean: Tensor
    signal_std: Tensor

    def __init__(self, config: HeadConfig | dict[str, Any]):
        super().__init__()
        self.config = HeadConfig.from_dict(config) if isinstance(config, dict) else config
        channels, predictions = self.config.channels, len(self.config.predictions)
        if self.config.signals:
            # Of the config, so not among the weights; as buffers they are where the head is.
            places = places_of(self.config.signals) if self.config.base else map(SIGNALS.index, self.config.signals)
            self.register_buffer("signal_places", torch.tensor([*places]), persistent=False)
            for name in ("signal_mean", "signal_std"):
                self.register_buffer(name, torch.tensor(getattr(self.config, name)), persistent=False)
        if self.config.base:
            self.base = nn.Linear(self.config.inputs, predictions)
        if self.config.residual:
            self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(self.config.depth))
            self.output = nn.Linear(channels, predictions)
            if self.config.signals:
                self.signal_input = nn.Linear(self.config.inputs, channels, bias=False)
            if self.config.reads_embedding:
                self.embedding_input = nn.Linear(self.config.hidden_size, channels, bias=False)
            if self.config.width is not None:
                self.state_input = nn.Linear(self.config.hidden_size, channels, bias=self.config.standardised)
        if self.config.base and self.config.residual:
            nn.init.zeros_(self.output.weight)  # the head starts as its base
            nn.init.zeros_(self.output.bias)
        self.embeddings: Tensor | None = None  # the draft's; see `attach`
        self.folder: Path | None = None  # that it was loaded from

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def attach(self, embeddings: Tensor | None) -> AcceptanceHead:
        """Look up drawn tokens in the draft's input embedding matrix, (vocab, hidden_size) of any float dtype, which is
        not copied; a head that reads no embedding ignores it. Returns self. Raises InputError when it does not fit."""
        if self.config.reads_embedding:
            if embeddings is None or embeddings.dim() != 2 or embeddings.shape[1] != self.config.hidden_size:
                got = "none" if embeddings is None else f"one of shape {tuple(embeddings.shape)}"
                raise InputError(
                    "this head reads the draft's embedding of the drawn token: expected an embedding matrix (vocab, "
                    f"{self.config.hidden_size}), got {got}"
                )
            self.embeddings = embeddings.detach()
        return self

    def forward(self, hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        """Logits (..., predictions), in the head's dtype.

        hidden: (..., hidden_size), any float dtype. signals: (..., 3) as `draft_signals` gives them; needed, and used,
        only when the config names signals. token_ids: (...) int, Y; only when the head reads its embedding.
        """
        if not self.config.residual:
            return self.base_logits(signals)
        hidden = hidden.to(self.dtype)
        x = self.state_input(hidden) if self.config.width is not None else hidden
        if self.config.signals:
            x = x + self.signal_input(self.normalised(_given(signals, "the draft signals", self.config.signals)))
        if self.config.reads_embedding:
            x = x + self.embedding_input(self.embedded(_given(token_ids, "the embedding of", "the drawn token")))
        for block in self.blocks:
            x = block(x)
        return self.output(x) + self.base_logits(signals) if self.config.base else self.output(x)

    def base_logits(self, signals: Tensor | None) -> Tensor:
        """The base's part of the logits. signals: (..., 3) → (..., predictions)."""
        return self.base(self.normalised(_given(signals, "the draft signals", self.config.signals)))

    def embedded(self, token_ids: Tensor) -> Tensor:
        """(...) ids → (..., hidden_size), with root mean square about 1. Raises InputError before `attach`."""
        return self._embeddings()[token_ids].to(self.dtype) / (self.config.embedding_std or 1.0)

    def _embeddings(self) -> Tensor:
        if self.embeddings is None:
            raise InputError("this head reads the draft's embedding of the drawn token: attach(embeddings) comes first")
        return self.embeddings

    def normalised(self, signals: Tensor) -> Tensor:
        """What it is told of the signals, with mean 0 and deviation 1 on the training traces.

        signals: (..., 3) → (..., inputs).
        """
        return (self.told(signals) - self.signal_mean) / self.signal_std

    def told(self, signals: Tensor) -> Tensor:
        """Those signals of the config, or the functions of them that a base reads. (..., 3) → (..., inputs)."""
        every = self._every(signals)
        return every if every.shape[-1] == self.config.inputs else every[..., self.signal_places]

    def _every(self, signals: Tensor) -> Tensor:
        """Signals, or functions of them, those that are not of the config too. (..., 3) → (..., 3), or (..., 9)."""
        return base_functions(signals.to(self.dtype)) if self.config.base else signals.to(self.dtype)

    def probability(
        self,
        hidden: Tensor,
        prediction: Prediction = "token",
        signals: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """P̂ of one prediction. hidden: (..., hidden_size) → (...). Raises InputError if this head does not make it."""
        return self(hidden, signals, token_ids)[..., self.index_of(prediction)].sigmoid()

    @torch.no_grad()
    def scorer(
        self,
        prediction: Predicts = "token",
        beside: Callable[[Tensor], Tensor] | None = None,
        *,
        fusible: bool = False,
        table: bool = True,
    ) -> Score:
        """`probability` for serving, with a third of the host's work a call: (hidden, signals, token_ids) → P̂, on the
        weights as they are now; what is the same for all tokens is folded into them. `both`: P̂ and β̂ in one pass,
        (..., 2). beside: of the state that the last layer reads, (n, channels) → (n, m); what it gives stands behind
        what is predicted, (..., 1 + m) or (..., 2 + m). fusible: with products of small matrices as sums, which a
        compiler joins with what is around them; to be compiled, and for few rows. table: whether every token's
        embedding may be projected beforehand; not of weights that are about to change. Raises InputError as
        `probability` does, or when the embeddings are not attached."""
        config = self.config
        product = _as_sums if fusible else _as_product
        base = self._base_of_scorer(prediction, product) if config.base else None
        if not config.residual:
            assert base is not None
            if beside is not None:
                raise InputError("a head without a residual has no state of its own")
            return self._score_of_base(base)
        blocks = [(block.linear.weight.detach().t(), block.linear.bias.detach()) for block in self._blocks()]
        last = self._last_of_scorer(prediction, product)
        dtype = self.dtype
        state = self.state_input.weight.detach().t() if config.width is not None else None
        offset = self.state_input.bias.detach() if config.standardised else None
        if config.signals:
            scale, shift = self._as_they_come(self.signal_input.weight.detach())
        projected = self._embedding_table() if config.reads_embedding and table else None

        def score(hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
            x = hidden.to(dtype).reshape(-1, config.hidden_size)
            if state is not None:
                x = product(x, state, offset)
            if config.signals:
                every = self._every(_given(signals, "the draft signals", config.signals)).reshape(-1, len(scale))
                x = product(every, scale, x + shift)
            if config.reads_embedding:
                ids = _given(token_ids, "the embedding of", "the drawn token").reshape(-1)
                x = x + (self.embedding_input(self.embedded(ids)) if projected is None else projected[ids])
            for weight, bias in blocks:
                x = x + nn.functional.silu(product(x, weight, bias))
            logits = last(x)
            if base is not None:
                logits = logits + base(every).view(logits.shape)
            predicted = logits.sigmoid()
            if beside is not None:
                predicted = torch.cat([predicted.view(len(x), -1), beside(x)], dim=-1)
            return predicted.view((*hidden.shape[:-1], *predicted.shape[1:]))

        return score

    def _as_they_come(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A layer on what is normalised, (outputs, inputs) → the same on all signals, or functions, as they come:
        (3 or 9, outputs), and (outputs,) to add."""
        scaled = weight / self.signal_std
        count = len(BASE_FUNCTIONS) if self.config.base else len(SIGNALS)
        scale = torch.zeros(count, len(weight), dtype=weight.dtype, device=weight.device)
        scale[self.signal_places] = scaled.t()
        return scale, -(scaled @ self.signal_mean)

    def _base_of_scorer(self, prediction: Predicts, product: Product) -> Callable[[Tensor], Tensor]:
        """All functions (n, 9) → the base's logits, (n, 1), or (n, 2) of both."""
        weight, offset = self._as_they_come(self.base.weight.detach())
        offset = offset + self.base.bias.detach()
        if prediction != "both":
            place = self.index_of(prediction)
            weight, offset = weight[:, place : place + 1].clone(), offset[place : place + 1].clone()
        return lambda every: product(every, weight, offset)

    def _score_of_base(self, base: Callable[[Tensor], Tensor]) -> Score:
        """Of a base alone."""

        def score(hidden: Tensor, signals: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
            every = self._every(_given(signals, "the draft signals", self.config.signals))
            predicted = base(every.view(-1, len(BASE_FUNCTIONS))).sigmoid()
            return predicted.view((*every.shape[:-1], *([2] if predicted.shape[1] == 2 else [])))

        return score

    def _last_of_scorer(self, prediction: Predicts, product: Product) -> Callable[[Tensor], Tensor]:
        """(n, channels) → logits (n,), or (n, 2) of both."""
        if prediction == "both":
            for each in get_args(Prediction):
                self.index_of(each)
            both, offsets = self.output.weight.detach().t().clone(), self.output.bias.detach().clone()
            return lambda x: product(x, both, offsets)
        place = self.index_of(prediction)
        output, bias = self.output.weight[place].clone(), self.output.bias[place].clone()
        if product is _as_sums:
            return lambda x: (x * output).sum(-1) + bias
        return lambda x: torch.addmv(bias.expand(len(x)), x, output)

    def _embedding_table(self) -> Tensor | None:
        """(vocab, channels) what each token's embedding adds, worked out once; None where that would take much memory,
        or where the table is not here."""
        embeddings, weight = self._embeddings(), self.embedding_input.weight.detach()
        if len(embeddings) * len(weight) * weight.element_size() > TABLE_BYTES or embeddings.device != weight.device:
            return None
        return (embeddings.to(weight.dtype) / (self.config.embedding_std or 1.0)) @ weight.t()

    def _blocks(self) -> list[ResidualBlock]:
        return [block for block in self.blocks if isinstance(block, ResidualBlock)]

    def index_of(self, prediction: Prediction) -> int:
        """Position of a prediction among the logits. Raises InputError if this head does not make it."""
        if prediction not in self.config.predictions:
            raise InputError(f"this head predicts {self.config.predicts!r}, but {prediction!r} was asked for")
        return self.config.predictions.index(prediction)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, map_location: str = "cpu", **hub: Any
    ) -> AcceptanceHead:
        """Load from a local folder or from the Hub (`user/name`, `user/name@revision`), from safetensors only.

        hub: revision, cache_dir, token, local_files_only and force_download, as in huggingface_hub.

        Raises InputError, naming the file, field or tensor, when the config or the weights are not those of a head,
        and naming the repository when it cannot be had.
        """
        folder = head_folder(pretrained_model_name_or_path, **hub)
        read_json(folder / HEAD_CONFIG_NAME)  # the mixin would fail on anything but an object
        try:
            return super().from_pretrained(folder, map_location=map_location)
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: not readable as a head ({' '.join(str(error).split())[:160]})") from None

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", config: Any = None, **_: Any
    ) -> AcceptanceHead:
        # The mixin's own version falls back to a pickle when there is no safetensors file; this one must not.
        folder = Path(model_id)
        source = str(folder / HEAD_CONFIG_NAME)
        if not isinstance(config, dict):
            raise InputError(f"{source}: expected a JSON object with the head's fields")
        checked = HeadConfig.from_dict(config, source)
        stored = _stored_exactly(folder / WEIGHTS_NAME, checked)
        head = cls(checked)
        head.load_state_dict(stored)
        head.folder = folder
        return head.to(map_location).eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        # The mixin's own version leaves a file that nobody but its owner may read.
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        (save_directory / WEIGHTS_NAME).write_bytes(save(tensors, metadata={"format": "pt"}))

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        branch: str | None = None,
        private: bool | None = None,
        commit_message: str | None = None,
        token: str | None = None,
        config: Any = None,
        model_card_kwargs: Any = None,
    ) -> str:
        """Publish the head in one commit, as `accept-head publish` does. Returns the commit's address.

        A head that was loaded and has its weights still takes along all that stands in its folder (threshold, metrics,
        what it was trained on). Of changed or new weights nothing of that is true: weights, config and card are all.

        branch: made when it is not there. config, model_card_kwargs: `save_pretrained(push_to_hub=True)` hands them
        over; they must be the head's own and empty. Raises InputError as `publish` does.
        """
        from accept_head.publish import push_folder

        if model_card_kwargs or config not in (None, self._hub_mixin_config):
            raise InputError("a head's config and card are its own: leave out config and model_card_kwargs")
        options: dict[str, Any] = {"revision": branch, "private": private, "message": commit_message, "token": token}
        if self.folder is not None and self._holds(self.folder):
            return push_folder(self.folder, repo_id, **options)
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "head"
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, **options)

    def _holds(self, folder: Path) -> bool:
        """Whether the weights are those of the folder, bit by bit."""
        path = folder / WEIGHTS_NAME
        stored = load_file(path) if path.is_file() else {}
        own = self.state_dict()
        return own.keys() == stored.keys() and all(torch.equal(own[name].cpu(), stored[name]) for name in own)


def _stored_exactly(path: Path, config: HeadConfig) -> dict[str, Tensor]:
    """The tensors of a safetensors file that must hold just those of such a head, finite, in their shapes.

    Only its header is read before all that is known: neither a config nor a file makes us take more memory than the
    other vouches for.
    """
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in AcceptanceHead(config).state_dict().items()}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            if missing := sorted(set(expected) - set(shapes)):
                raise InputError(f"{path}: tensor {missing[0]!r} is missing")
            if extra := sorted(set(shapes) - set(expected)):
                raise InputError(f"{path}: tensor {extra[0]!r} does not belong to a head of this config")
            for name, shape in shapes.items():
                if shape != expected[name]:
                    raise InputError(f"{path}: tensor {name!r} has shape {shape}, expected {expected[name]}")
            stored = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"{path}: not readable as safetensors ({reason})") from None
    for name, tensor in stored.items():
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise InputError(f"{path}: tensor {name!r} holds something else than finite floating-point numbers")
    return stored


def _as_product(x: Tensor, matrix: Tensor, offset: Tensor | None = None) -> Tensor:
    """x·matrix + offset. x: (n, inputs); matrix: (inputs, outputs); offset: (outputs,) or (n, outputs)."""
    return x @ matrix if offset is None else torch.addmm(offset, x, matrix)


def _as_sums(x: Tensor, matrix: Tensor, offset: Tensor | None = None) -> Tensor:
    """The same, but where the matrix is small without a library's routine, which costs more to call than it does."""
    if matrix.numel() > SMALL_MATRIX:
        return _as_product(x, matrix, offset)
    products = (x[:, None, :] * matrix.t()).sum(-1)
    return products if offset is None else products + offset


def _given(value: Tensor | None, what: str, which: object) -> Tensor:
    if value is None:
        raise InputError(f"this head reads {what} {which}, but none were given")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
