"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from accept_head.files import atomic_path


class AtomicCheckpoints(TorchCheckpointIO):
    """Lightning writes to the system's temporary folder and moves the file from there. Where that is another disk, a
    move is a copy, of which a kill or a full disk leaves half."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        data = io.BytesIO()  # torch reports a full disk in words of its own, and as OSError only what this file does
        torch.save(checkpoint, data)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(data.getbuffer())
