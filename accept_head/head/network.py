"""The acceptance prediction head: a small network on the draft's last hidden state (SpecDec++ §4.1, eq. 4.1).

    P̂(Y_i accepted | x, Y₁..Y_i) = sigmoid(f_θ(e_i))        e_i: the draft's hidden state, after the final norm, at Y_i

Our heads may read e_{i−1} instead, the state that Y_i was drawn from. They then also read which token was drawn: its
draft signals, and the draft's input embedding of it. Such a head judges Y_i one draft forward earlier.

f_θ brings each of its inputs to the width of the head and adds them up. Then come `depth` residual blocks
e ← e + SiLU(W e + b), each with weights of its own (the research code shares one matrix among all of them). A linear
layer gives one logit per prediction.

The logit of a head with a base (base.py) is the base's plus f_θ. A head can also be its base alone, which reads neither
state nor embedding.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save
from torch import Tensor, nn

from accept_head.base import base_functions, places_of
from accept_head.errors import InputError
from accept_head.head_config import HeadConfig, Prediction
from accept_head.hub.folder import WEIGHTS_NAME, head_folder
from accept_head.hub.publish import push_folder
from accept_head.hub.stored import read_stored
from accept_head.signals import SIGNALS


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
    """Acceptance prediction head. It is saved to and loaded from `model.safetensors` and `config.json` only."""

    signal_places: Tensor
    signal_mean: Tensor
    signal_std: Tensor

    def __init__(self, config: HeadConfig | dict[str, Any]):
        super().__init__()
        self.config = HeadConfig.from_dict(config) if isinstance(config, dict) else config
        channels, predictions = self.config.channels, len(self.config.predictions)
        if self.config.signals:
            # Buffers, so that they move with the head. The config holds them, so they are not stored with the weights.
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
        self.folder: Path | None = None  # where it was loaded from

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def attach(self, embeddings: Tensor | None) -> AcceptanceHead:
        """Attach the draft's input embedding matrix, (vocab, hidden_size), any float dtype, to look up drawn tokens.

        The matrix is not copied. A head that reads no embedding ignores it. Returns self. Raises InputError when the
        matrix does not fit.
        """
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

        hidden: (..., hidden_size), any float dtype. signals: (..., 3) as `draft_signals` gives them; used only when
        the config names signals. token_ids: (...) int, Y; used only when the head reads its embedding.
        """
        if not self.config.residual:
            return self.base_logits(signals)
        hidden = hidden.to(self.dtype)
        x = self.state_input(hidden) if self.config.width is not None else hidden
        if self.config.signals:
            x = x + self.signal_input(self.normalised(given(signals, "the draft signals", self.config.signals)))
        if self.config.reads_embedding:
            x = x + self.embedding_input(self.embedded(given(token_ids, "the embedding of", "the drawn token")))
        for block in self.blocks:
            x = block(x)
        return self.output(x) + self.base_logits(signals) if self.config.base else self.output(x)

    def base_logits(self, signals: Tensor | None) -> Tensor:
        """The base's part of the logits. signals: (..., 3) → (..., predictions)."""
        return self.base(self.normalised(given(signals, "the draft signals", self.config.signals)))

    def embedded(self, token_ids: Tensor) -> Tensor:
        """(...) ids → (..., hidden_size), with root mean square about 1. Raises InputError before `attach`."""
        return self.attached_embeddings()[token_ids].to(self.dtype) / (self.config.embedding_std or 1.0)

    def attached_embeddings(self) -> Tensor:
        """The draft's input embedding matrix. Raises InputError before `attach`."""
        if self.embeddings is None:
            raise InputError("this head reads the draft's embedding of the drawn token: attach(embeddings) comes first")
        return self.embeddings

    def normalised(self, signals: Tensor) -> Tensor:
        """`signal_inputs` scaled to mean 0 and deviation 1 on the training traces. (..., 3) → (..., inputs)."""
        return (self.signal_inputs(signals) - self.signal_mean) / self.signal_std

    def signal_inputs(self, signals: Tensor) -> Tensor:
        """The signals that the head reads. With a base: the functions of the signals that it reads.

        (..., 3) → (..., inputs).
        """
        every = self.every_signal_input(signals)
        return every if every.shape[-1] == self.config.inputs else every[..., self.signal_places]

    def every_signal_input(self, signals: Tensor) -> Tensor:
        """All signals, read or not. With a base: all functions of the signals. (..., 3) → (..., 3), or (..., 9)."""
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

    def index_of(self, prediction: Prediction) -> int:
        """Position of a prediction among the logits. Raises InputError if this head does not make it."""
        if prediction not in self.config.predictions:
            raise InputError(f"this head predicts {self.config.predicts!r}, but {prediction!r} was asked for")
        return self.config.predictions.index(prediction)

    def residual_blocks(self) -> list[ResidualBlock]:
        return [block for block in self.blocks if isinstance(block, ResidualBlock)]

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, map_location: str = "cpu", **hub: Any
    ) -> AcceptanceHead:
        """Load from a local folder or from the Hub (`user/name`, `user/name@revision`), from safetensors only.

        hub: revision, cache_dir, token, local_files_only and force_download, as in huggingface_hub.

        Raises InputError, naming the file, field or tensor, when the config or the weights are not those of a head.
        Raises InputError naming the repository when the head cannot be downloaded.
        """
        # This replaces the mixin's version, which would open a pickle when there is no safetensors file.
        folder = head_folder(pretrained_model_name_or_path, **hub)
        config, weights = read_stored(folder)
        head = cls(config)
        head.load_state_dict(weights)
        head.folder = folder
        return head.to(map_location).eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        # This replaces the mixin's version, which writes a file that only its owner may read.
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

        A head that was loaded and has its weights unchanged is published with the rest of its folder: threshold,
        metrics, and what it was trained on. These files do not describe changed weights, so changed weights are
        published with config and card alone.

        branch: made when it does not exist. config, model_card_kwargs: `save_pretrained(push_to_hub=True)` passes them.
        config must be the head's own, and model_card_kwargs must be empty. Raises InputError as `publish` does.
        """
        if model_card_kwargs or config not in (None, self._hub_mixin_config):
            raise InputError("a head's config and card are its own: leave out config and model_card_kwargs")
        options: dict[str, Any] = {"revision": branch, "private": private, "message": commit_message, "token": token}
        if self.folder is not None and self._is_stored_in(self.folder):
            return push_folder(self.folder, repo_id, **options)
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "head"
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, **options)

    def _is_stored_in(self, folder: Path) -> bool:
        """Whether the folder's weights equal this head's, bit by bit."""
        path = folder / WEIGHTS_NAME
        stored = load_file(path) if path.is_file() else {}
        own = self.state_dict()
        return own.keys() == stored.keys() and all(torch.equal(own[name].cpu(), stored[name]) for name in own)


def given(value: Tensor | None, what: str, which: object) -> Tensor:
    """The value of an input that the head needs. Raises InputError when it is missing."""
    if value is None:
        raise InputError(f"this head reads {what} {which}, but none were given")
    return value
