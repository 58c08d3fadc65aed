"""Import of an acceptance head of the SpecDec++ research code.

A checkpoint is a folder, or a repository on the Hub, with `config.json` (hidden_size, num_layers) and
`model.safetensors`. Their head is

    z(e) = V·B(B(…B(e)…)) + c,   B(e) = e + SiLU(W e + b),   P̂(accepted) = softmax(z)₁

with the same block B applied `num_layers` times and stored once. Class 1 is "accepted", so P̂ = sigmoid(z₁ − z₀). The
difference z₁ − z₀ is linear in the last B's output. It becomes the one logit of our head, with the same probability.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, sha256, write_json
from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig
from accept_head.hub.card import CardFacts, model_card
from accept_head.hub.folder import TRAINING_NAME, WEIGHTS_NAME, head_folder
from accept_head.hub.stored import read_weights
from accept_head.version import VERSION

PICKLE_NAME = "pytorch_model.bin"
CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    f"s.save_file({{k: v.clone() for k, v in torch.load('{PICKLE_NAME}', weights_only=True).items()}}, "
    f"'{WEIGHTS_NAME}')\""
)


def read_checkpoint(name: str | Path) -> AcceptanceHead:
    """Read their head from a local folder or the Hub. Returns an AcceptanceHead with the same probabilities.

    Raises InputError naming the file, field or tensor. Weights in a pickle are an error too; it is not opened.
    """
    folder = _local(name)
    config = _head_config(folder / "config.json")
    weights = _weights(folder / WEIGHTS_NAME, config)  # before anything of that size is made
    head = AcceptanceHead(config)
    head.load_state_dict(weights)
    return head.eval()


def save_imported(head: AcceptanceHead, folder: Path, checkpoint: str | Path) -> None:
    """Write a head folder atomically: model.safetensors, config.json, training_config.json, README.md.

    The checkpoint records neither target and sampling settings nor quality. So there is no trace_config.json and no
    metrics.json. Raises InputError when the folder already holds something other than a head.
    """
    if folder.exists() and not (folder / WEIGHTS_NAME).is_file():
        raise InputError(f"--out {folder}: exists and is not a head; choose another folder")
    weights = _local(checkpoint) / WEIGHTS_NAME
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        card = model_card(CardFacts(config=head.config))
        (temporary / "README.md").write_text(str(card), encoding="utf-8")
        head.save_pretrained(temporary)
        origin = {"accept_head": VERSION, "imported": "SpecDec_pp", "checkpoint": str(checkpoint)}
        write_json(temporary / TRAINING_NAME, {**origin, "checkpoint_sha256": sha256(weights.read_bytes())})


def _local(name: str | Path) -> Path:
    """The checkpoint's folder, fetched from the Hub if necessary."""
    folder = head_folder(name)
    if not (folder / WEIGHTS_NAME).is_file():
        if (folder / PICKLE_NAME).exists():
            raise InputError(
                f"{folder / PICKLE_NAME}: is a pickle, which can run code when it is opened, so it is not; if you "
                f"trust it, convert it in its folder with `{CONVERT}`"
            )
        raise InputError(f"--checkpoint {name}: no {WEIGHTS_NAME} in it")
    return folder


def _head_config(path: Path) -> HeadConfig:
    values = read_json(path)
    if "hidden_size" not in values:
        raise InputError(f"{path}: field 'hidden_size' is missing; expected the config of a SpecDec++ head")
    try:
        return HeadConfig(hidden_size=values["hidden_size"], depth=values.get("num_layers", 0))
    except InputError as error:
        raise InputError(f"{path}: {error} (their num_layers is our depth)") from None


def _weights(path: Path, config: HeadConfig) -> dict[str, Tensor]:
    """The state dict of an AcceptanceHead, from their file, which must hold exactly the tensors of such a head.

    The difference of the two classes is in float64 and rounded once.
    """
    size, depth = config.hidden_size, config.depth
    parts = {"linear.weight": (size, size), "linear.bias": (size,)}
    output = {f"model.{depth}.weight": (2, size), f"model.{depth}.bias": (2,)}

    def expected(names: Set[str]) -> dict[str, tuple[int, ...]]:
        stored = [place for place in range(depth) if any(f"model.{place}.{part}" in names for part in parts)]
        # The shared block is stored once, under the name of one layer.
        places = stored if len(stored) == 1 else range(depth)
        return output | {f"model.{place}.{part}": shape for place in places for part, shape in parts.items()}

    theirs = read_weights(path, expected)
    state: dict[str, Tensor] = {}
    for part in parts:
        stored = [theirs[name] for place in range(depth) if (name := f"model.{place}.{part}") in theirs]
        blocks = stored * depth if len(stored) == 1 else stored
        state |= {f"blocks.{place}.{part}": block.float() for place, block in enumerate(blocks)}
    for part in ("weight", "bias"):
        rejected, accepted = theirs[f"model.{depth}.{part}"].double()
        state[f"output.{part}"] = (accepted - rejected).unsqueeze(0).float()
    return state
