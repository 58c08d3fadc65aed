"""Strict reading of a stored head: `config.json`, and `model.safetensors` with exactly the weights of this config."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from accept_head.errors import InputError, one_line
from accept_head.files import read_json
from accept_head.head_config import HeadConfig
from accept_head.hub.folder import HEAD_CONFIG_NAME, WEIGHTS_NAME


def read_stored(folder: Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the weights of the head in a folder. Raises InputError naming the file, field or tensor."""
    path = folder / HEAD_CONFIG_NAME
    config = HeadConfig.from_dict(read_json(path), str(path))
    return config, read_weights(folder / WEIGHTS_NAME, lambda _: config.tensor_shapes())


def read_weights(path: Path, expected_of: Callable[[Set[str]], dict[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The tensors of a file that must hold exactly the expected ones, with finite numbers.

    expected_of: from the names of tensors in the file, the names and shapes that it must hold.

    Names and shapes are checked in the file's header, before any tensor is read. So memory use is bounded by both the
    file's size and the config.
    """
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            expected = expected_of(shapes.keys())
            if missing := sorted(set(expected) - set(shapes)):
                raise InputError(f"{path}: tensor {missing[0]!r} is missing")
            if extra := sorted(set(shapes) - set(expected)):
                raise InputError(f"{path}: tensor {extra[0]!r} does not belong to a head of this config")
            for name, shape in shapes.items():
                if shape != expected[name]:
                    raise InputError(f"{path}: tensor {name!r} has shape {shape}, expected {expected[name]}")
            stored = {name: file.get_tensor(name) for name in shapes}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not readable as safetensors ({one_line(error)})") from None
    for name, tensor in stored.items():
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise InputError(f"{path}: tensor {name!r} holds something else than finite floating-point numbers")
    return stored
