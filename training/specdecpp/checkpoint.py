"""Import of an acceptance head of the SpecDec++ research code.

A checkpoint is a folder, or a repository on the Hub, with `config.json` (hidden_size, num_layers) and
`model.safetensors`. Their head is

    z(e) = V·B(B(…B(e)…)) + c,   B(e) = e + SiLU(W e + b),   P̂(accepted) = softmax(z)₁

with the same block B applied `num_layers` times and stored once. Class 1 is "accepted", so P̂ = sigmoid(z₁ − z₀). The
difference z₁ − z₀ is linear in the last B's output. It becomes the one logit of our head, with the same probability.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, sha256, write_json
from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig
from accept_head.hub.card import CardFacts, model_card
from accept_head.hub.folder import TRAINING_NAME, WEIGHTS_NAME, head_folder
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
    tensors = _tensors(folder / WEIGHTS_NAME, config)
    head = AcceptanceHead(config)
    head.load_state_dict(_ours(tensors, config.depth))
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


def _tensors(path: Path, config: HeadConfig) -> dict[str, Tensor]:
    """Their tensors by name. Names and shapes must be exactly those of such a head; they are checked before reading."""
    size, depth = config.hidden_size, config.depth
    block = {"linear.weight": (size, size), "linear.bias": (size,)}
    expected = {f"model.{i}.{part}": shape for i in range(depth) for part, shape in block.items()}
    expected |= {f"model.{depth}.weight": (2, size), f"model.{depth}.bias": (2,)}
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            for name in names:
                shape = tuple(file.get_slice(name).get_shape())
                if expected.get(name) != shape:
                    what = f"shape {expected[name]}" if name in expected else "no such tensor"
                    raise InputError(
                        f"{path}: tensor {name!r} has shape {shape}, expected {what} in a SpecDec++ head of "
                        f"hidden_size {size} and {depth} layers"
                    )
            stored = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not readable as safetensors ({' '.join(str(error).split())[:160]})") from None
    for name, tensor in stored.items():
        if not tensor.is_floating_point() or not tensor.double().isfinite().all():
            raise InputError(f"{path}: tensor {name!r} holds something else than finite floating-point numbers")
    blocks = sorted({int(name.split(".")[1]) for name in stored if ".linear." in name})
    if len(blocks) == 1:  # the shared block, stored under the name of one layer
        for part in (part for part in block if f"model.{blocks[0]}.{part}" in stored):
            stored |= {f"model.{i}.{part}": stored[f"model.{blocks[0]}.{part}"] for i in range(depth)}
    if missing := sorted(set(expected) - set(stored)):
        raise InputError(f"{path}: tensor {missing[0]!r} is missing")
    return stored


def _ours(theirs: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The state dict of an AcceptanceHead. The difference of the two classes is in float64 and rounded once."""
    state = {
        f"blocks.{i}.linear.{part}": theirs[f"model.{i}.linear.{part}"].float()
        for i in range(depth)
        for part in ("weight", "bias")
    }
    for part in ("weight", "bias"):
        rejected, accepted = theirs[f"model.{depth}.{part}"].double()
        state[f"output.{part}"] = (accepted - rejected).unsqueeze(0).float()
    return state
