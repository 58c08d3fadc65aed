"""Strict reading of a stored head: `config.json`, and `model.safetensors` with exactly the weights of this config."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.head_config import HeadConfig
from accept_head.hub.folder import HEAD_CONFIG_NAME, WEIGHTS_NAME


def read_stored(folder: Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the weights of the head in a folder. Raises InputError naming the file, field or tensor."""
    path = folder / HEAD_CONFIG_NAME
    config = HeadConfig.from_dict(read_json(path), str(path))
    return config, _read_weights(folder / WEIGHTS_NAME, config.tensor_shapes())


def _read_weights(path: Path, expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a file that must hold exactly the expected ones, with finite numbers.

    Names and shapes are checked in the file's header, before any tensor is read. So memory use is bounded by both the
    file's size and the config.
    """
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
