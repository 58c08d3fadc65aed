"""Checkpoints that are written atomically."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from accept_head.files import atomic_path


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes checkpoints atomically, beside their destination.

    Lightning moves the file from the system's temporary folder. When that is on another disk, the move is a copy, and a
    kill or a full disk leaves half of the file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        data = io.BytesIO()  # torch.save to a file would not report a full disk as OSError; write_bytes does
        torch.save(checkpoint, data)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_bytes(data.getbuffer())
