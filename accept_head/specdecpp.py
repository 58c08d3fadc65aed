"""Files of the SpecDec++ research code (Kaffaljidhmah2/SpecDec_pp), read: its acceptance head and its training data.

A checkpoint is a folder, or a repository on the Hub, with `config.json` (hidden_size, num_layers) and
`model.safetensors`. Their head is

    z(e) = V·B(B(…B(e)…)) + c,   B(e) = e + SiLU(W e + b),   P̂(accepted) = softmax(z)₁

with one and the same block B `num_layers` times: it is stored once. Class 1 is "accepted", so P̂ = sigmoid(z₁ − z₀), and
z₁ − z₀ is again linear in the last B's output: one logit of ours, and the same probability.

Their data are one JSON file, a list of records. Their lists are mostly texts, like "[1, 2]", which their code
evaluates; here they are parsed as JSON, and nothing is ever evaluated or unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import atomic_path, parse_json, read_json, sha256, write_json
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


# --- the head ---------------------------------------------------------------------------------------------------------


def read_checkpoint(name: str | Path) -> AcceptanceHead:
    """Their head, a local folder or a Hub name, as one of ours with the same probabilities.

    Raises InputError naming the file, field or tensor; also when the weights are a pickle, which is not opened.
    """
    folder = _local(name)
    config = _head_config(folder / "config.json")
    tensors = _tensors(folder / WEIGHTS_NAME, config)
    head = AcceptanceHead(config)
    head.load_state_dict(_ours(tensors, config.depth))
    return head.eval()


def save_imported(head: AcceptanceHead, folder: Path, checkpoint: str | Path) -> None:
    """Write a head folder, atomically: model.safetensors, config.json, training_config.json, README.md.

    The checkpoint does not say which target and sampling settings it was trained for, nor how good it is, so there is
    neither a trace_config.json nor a metrics.json. Raises InputError when something else than a head is there already.
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
    """Its folder, fetched from the Hub if need be."""
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
    """Their tensors by their names, which must be just those of such a head. Shapes are checked before any is read."""
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
    if len(blocks) == 1:  # the shared block, under the name of one of its places
        for part in (part for part in block if f"model.{blocks[0]}.{part}" in stored):
            stored |= {f"model.{i}.{part}": stored[f"model.{blocks[0]}.{part}"] for i in range(depth)}
    if missing := sorted(set(expected) - set(stored)):
        raise InputError(f"{path}: tensor {missing[0]!r} is missing")
    return stored


def _ours(theirs: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """State of an AcceptanceHead. The difference of the two classes is taken in float64 and rounded once."""
    state = {
        f"blocks.{i}.linear.{part}": theirs[f"model.{i}.linear.{part}"].float()
        for i in range(depth)
        for part in ("weight", "bias")
    }
    for part in ("weight", "bias"):
        rejected, accepted = theirs[f"model.{depth}.{part}"].double()
        state[f"output.{part}"] = (accepted - rejected).unsqueeze(0).float()
    return state


# --- the data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One record of their data; positions are those of the target's response.

    prompt_ids: their `prefix`. response_ids: `tokens`, X, said by the target. draft_ids: `draft`, Y_i ∼ q given the
    prompt and X_<i, drawn without regard to X_i. acceptance: `p_acc`, a(Y_i). logprobs: each `log_p_NAME`, log Q(Y_i)
    of one model Q.
    """

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    draft_ids: list[int]
    acceptance: list[float]
    logprobs: dict[str, list[float]]


def read_records(path: Path, vocab_size: int) -> list[Record]:
    """Read their JSON file. Raises InputError naming the record and the field.

    Holds the whole file in memory, and its records. vocab_size: ids are below it.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({' '.join(str(error).split())[:160]})") from None
    if not isinstance(values, list) or not values:
        raise InputError(f"{path}: expected a JSON list of at least one record, found {_kind(values)}")
    return [_record(f"{path}, record {place}", value, place, vocab_size) for place, value in enumerate(values)]


def _record(where: str, value: Any, place: int, vocab_size: int) -> Record:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, found {_kind(value)}")
    ids = {name: _ids(where, name, _numbers(where, value, name), vocab_size) for name in ("prefix", "tokens", "draft")}
    numbers = {name: _numbers(where, value, name) for name in value if name == "p_acc" or name.startswith("log_p_")}
    if "p_acc" not in numbers:
        raise InputError(f"{where}: field 'p_acc' is missing")
    for name, column in {"draft": ids["draft"], **numbers}.items():
        if len(column) != len(ids["tokens"]):
            raise InputError(f"{where}: field {name!r} has {len(column)} values, but 'tokens' has {len(ids['tokens'])}")
    if outside := [p for p in numbers["p_acc"] if not 0 <= p <= 1]:
        raise InputError(f"{where}: field 'p_acc' has {outside[0]!r} in it, expected probabilities")
    named = value.get("id", place)
    if not isinstance(named, str | int):
        raise InputError(f"{where}: field 'id' is {_kind(named)}, expected text or a number")
    logprobs = {name: column for name, column in numbers.items() if name != "p_acc"}
    return Record(str(named), ids["prefix"], ids["tokens"], ids["draft"], numbers["p_acc"], logprobs)


def _numbers(where: str, record: dict[str, Any], name: str) -> list[Any]:
    """A list of numbers, or the text of one."""
    if name not in record:
        raise InputError(f"{where}: field {name!r} is missing")
    value = record[name]
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: field {name!r} is a text that is no JSON list of numbers") from None
    if not isinstance(value, list) or not all(type(number) in (int, float) for number in value):
        raise InputError(f"{where}: field {name!r} is not a list of numbers")
    return value


def _ids(where: str, name: str, values: Sequence[Any], vocab_size: int) -> list[int]:
    if not values:
        raise InputError(f"{where}: field {name!r} is empty")
    if wrong := [v for v in values if not isinstance(v, int) or not 0 <= v < vocab_size]:
        raise InputError(f"{where}: field {name!r} has {wrong[0]} in it, expected ids from 0 to {vocab_size - 1}")
    return list(values)


def _kind(value: Any) -> str:
    return f"an empty {type(value).__name__}" if value in ([], {}, "") else type(value).__name__
