"""Files that contain their own checksum, so that every flipped bit is found.

Parquet checks its pages but not its metadata, and safetensors checks nothing. Both formats have room for a checksum
inside the file that other readers ignore. It is written, copied and lost together with the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accept_head.errors import InputError, one_line

if TYPE_CHECKING:
    from torch import Tensor

MARK = b"accept-head sha256:"  # between a parquet file's pages and its footer, which finds pages by their offsets
LENGTH = len(MARK) + 64
METADATA = "sha256"  # the one key of a safetensors file's metadata: {name: checksum}, as JSON


def seal_parquet(path: Path) -> None:
    """Add the SHA-256 of all bytes to a parquet file. It is changed in place, so nobody may be reading it."""
    data = path.read_bytes()
    footer = _footer_start(data)
    with path.open("r+b") as file:
        file.seek(footer)
        file.write(MARK + hashlib.sha256(data).hexdigest().encode() + data[footer:])


def check_parquet(path: Path) -> None:
    """Raises ValueError when a sealed file has changed.

    A file without a seal passes: it is older than seals, or another program wrote it.
    """
    if path.stat().st_size < LENGTH + 8:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = _seal_start(data)
        if start < 0:
            return
        digest = hashlib.sha256(data[:start])
        digest.update(data[start + LENGTH :])
        if data[start : start + LENGTH] != MARK + digest.hexdigest().encode():
            raise ValueError("its SHA-256 checksum does not match")


def _footer_start(data: bytes | mmap.mmap) -> int:
    """Where the footer starts. A parquet file ends with its footer, its length in four bytes, and four magic bytes."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def _seal_start(data: mmap.mmap) -> int:
    """Where the seal starts; −1 without one. It is found even if one bit of it or of the footer's length is flipped."""
    start = _footer_start(data) - LENGTH
    if start >= 0:
        found = data[start : start + len(MARK)]
        if sum(one == other for one, other in zip(found, MARK, strict=True)) >= len(MARK) - 1:
            return start
    return data.rfind(MARK)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file with a checksum of each tensor's name, type, shape and values."""
    from safetensors.torch import save

    checksums = {name: _checksum(name, tensor) for name, tensor in sorted(tensors.items())}
    # save_file first writes to a file of another name, which would stay after a kill.
    path.write_bytes(save(dict(tensors), metadata={METADATA: json.dumps(checksums)}))


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read some of a file's tensors, on the CPU. Raises InputError naming a damaged file, and the tensor.

    Older files have no checksums and are not checked.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata()
        if metadata is not None:
            checksums = json.loads(metadata[METADATA])
            for name, tensor in tensors.items():
                if checksums[name] != _checksum(name, tensor):
                    raise ValueError(f"the checksum of {name!r} does not match")
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        said = one_line(error)
        raise InputError(f"{path}: damaged or not such a file ({said}); remove it to have it made again") from None
    return tensors


def _checksum(name: str, tensor: Tensor) -> str:
    import torch

    digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
