"""The progress of `accept-head train`. Lightning sees one endless epoch, so the sampler's epochs are shown."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, RichProgressBar
from tqdm import tqdm

from accept_head.console import LINE_EVERY


def epoch_progress(*, steps_per_epoch: int, epochs: int) -> Callback:
    """A bar on a terminal, else lines."""
    kind = EpochProgress if sys.stderr.isatty() else EpochLines
    return kind(steps_per_epoch=steps_per_epoch, epochs=epochs)


class EpochLines(Callback):
    """A line at the start, at the end, and every LINE_EVERY seconds."""

    def __init__(self, *, steps_per_epoch: int, epochs: int):
        self.steps_per_epoch, self.epochs = steps_per_epoch, epochs

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first, self.begin = trainer.global_step, time.monotonic()
        self._print(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if time.monotonic() - self.printed >= LINE_EVERY:
            self._print(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print(trainer)

    def _print(self, trainer: L.Trainer) -> None:
        self.printed = time.monotonic()
        done, every = trainer.global_step, self.steps_per_epoch * self.epochs
        rate = (done - self.first) / max(self.printed - self.begin, 1e-9)
        left = tqdm.format_interval((every - done) / rate) if rate else "?"
        epoch = min(done // self.steps_per_epoch, self.epochs - 1) + 1
        if trainer.is_global_zero:
            text = f"train: epoch {epoch}/{self.epochs}, {done}/{every} steps, {left} left, {rate:.2f} steps/s"
            print(text, file=sys.stderr, flush=True)


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
