"""The progress bar of `accept-head train`. Lightning sees one endless epoch, so the bar shows the sampler's epochs."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class EpochProgress(RichProgressBar):
    """Lightning's bar with the step's epoch instead of Lightning's "Epoch 0/-2"."""

    def __init__(self, *, steps_per_epoch: int, epochs: int):
        super().__init__()
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.progress.update(self.train_progress_bar_id, description=self._get_train_description(0))

    def _get_train_description(self, current_epoch: int) -> str:
        epoch = min(self.trainer.global_step // self.steps_per_epoch, self.epochs - 1) + 1
        # As wide as the validation bar; otherwise both flicker.
        return f"{f'Epoch {epoch}/{self.epochs}':{len(self.validation_description)}}"
