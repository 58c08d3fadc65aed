"""The files of a model's checkpoint: where they are, what kind of drafter they hold, and their fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accept_head.errors import InputError, one_line
from accept_head.files import read_json, sha256

EAGLE3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"}  # architectures in a config.json


def checkpoint_folder(name: str | Path) -> Path:
    """A local folder, or that of a Hub name in the local cache, where loading has put its files; else the name."""
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    for file in ("model.safetensors.index.json", "model.safetensors", "config.json"):
        try:
            found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
        except OSError:  # there is no such name; who loads it says so
            break
        if found:
            return Path(found).parent
    return Path(name)


def reads_target(name: str | Path) -> bool:
    """Whether it is a drafter that reads the target's states (EAGLE-3), by its config.json. False when that cannot be
    read: who loads the model says why."""
    try:
        named = read_json(checkpoint_folder(name) / "config.json").get("architectures")
    except InputError:
        return False
    return isinstance(named, list) and not EAGLE3.isdisjoint(map(str, named))


def check_model(name: str | Path, option: str) -> None:
    """Raises InputError for an EAGLE-3 drafter, which stands for no model of its own."""
    if reads_target(name):
        raise InputError(f"{option} {name}: is an EAGLE-3 drafter, expected a model")


def checkpoint_fingerprint(name: str | Path) -> str:
    """SHA-256 of a checkpoint's tensor names, shapes and some rows of each, read from its safetensors files.

    It does not depend on the dtype and devices of a loaded model. Raises InputError when there are no such files.
    """
    from safetensors import SafetensorError, safe_open

    parts = []
    for path in weight_files(name):
        try:
            with safe_open(path, framework="pt") as file:
                parts += [_describe(key, file.get_slice(key)) for key in file.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not readable as safetensors ({one_line(error)})") from None
    return sha256("\n".join(sorted(parts)))


def _describe(key: str, tensor: Any) -> str:
    shape = tensor.get_shape()
    rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else []
    digests = [sha256(tensor[row : row + 1].contiguous().view(torch.uint8).numpy().tobytes()) for row in rows]
    return f"{key} {tensor.get_dtype()} {shape} {digests}"


def weight_files(name: str | Path) -> list[Path]:
    """A checkpoint's safetensors files. Raises InputError when there are none."""
    files = sorted(checkpoint_folder(name).glob("*.safetensors"))
    if not files:
        raise InputError(f"{name}: there are no safetensors files in it")
    return files
