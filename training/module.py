"""The training step: a frozen draft makes hidden states, the head learns from them."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from accept_head.calibration import Quality, quality
from accept_head.errors import InputError
from accept_head.head import AcceptanceHead
from accept_head.objective import weighted_bce
from accept_head.pair import attention_mask_for, base_model
from accept_head.training.mixing import DraftBatch

AXIS = {"token": 0, "next": 1}  # of DraftBatch.labels and .mask


class HeadTraining(L.LightningModule):
    """Trains `head` on `draft`'s hidden states.

    The loss of a step is one ratio of sums over all its traces. Micro-batches and processes add numerators' gradients;
    the denominator is summed over both and divided out once, just before the optimizer steps. The result does not
    depend on how a step was divided.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        draft: PreTrainedModel,
        *,
        lr: float,
        total_steps: int,
        warmup_share: float,
        w_acc: float,
        w_rej: float,
    ):
        super().__init__()
        self.head = head
        self.draft = (draft,)  # in a tuple: not a submodule, so checkpoints hold the head only and DDP wraps only it
        self.lr, self.total_steps, self.warmup_share = lr, total_steps, warmup_share
        self.w_acc, self.w_rej = w_acc, w_rej
        self.step_sums = torch.zeros(2)  # of this rank's micro-batches in this step: loss, weight
        self.dev_outputs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.dev_quality: dict[str, Quality] = {}

    def head_logits(self, batch: DraftBatch) -> Tensor:
        """(batch, seq, predictions)."""
        (draft,) = self.draft
        with torch.no_grad():
            hidden = base_model(draft)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=attention_mask_for(draft, batch.allowed),
                use_cache=False,
            )[0]
        return self.head(hidden, batch.signals)

    def training_step(self, batch: DraftBatch, batch_index: int) -> Tensor:
        logits = self.head_logits(batch)
        value = torch.zeros((), device=logits.device)
        weight = torch.zeros((), device=logits.device)
        for index, prediction in enumerate(self.head.config.predictions):
            axis = AXIS[prediction]
            part = weighted_bce(
                logits[..., index], batch.labels[..., axis], batch.mask[..., axis], w_acc=self.w_acc, w_rej=self.w_rej
            )
            value, weight = value + part.value, weight + part.weight
        # One host sync a micro-batch, next to a whole draft forward: a loss that is not finite must not reach the head.
        if not torch.isfinite(value):
            traces = batch.indices.tolist()
            raise InputError(
                f"the loss is {value.item()} at step {self.global_step}, batch of traces {traces}; nothing was saved "
                "since the last checkpoint; look at these traces, or lower --lr"
            )
        self.step_sums = self.step_sums.to(value.device) + torch.stack([value, weight]).detach()
        return value

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        loss, weight = self.trainer.strategy.reduce(self.step_sums, reduce_op="sum").unbind()
        # Lightning divided by the number of micro-batches, DDP by the number of processes: multiply both back.
        scale = self.trainer.accumulate_grad_batches * self.trainer.world_size / weight.clamp(min=1e-12)
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.log("train_loss", loss / weight.clamp(min=1e-12), prog_bar=True, rank_zero_only=True)
        self.step_sums = torch.zeros_like(self.step_sums)

    def validation_step(self, batch: DraftBatch, batch_index: int) -> None:
        logits = self.head_logits(batch).float()
        for index, prediction in enumerate(self.head.config.predictions):
            mask = batch.mask[..., AXIS[prediction]]
            pair = logits[..., index][mask].cpu(), batch.labels[..., AXIS[prediction]][mask].cpu()
            self.dev_outputs.setdefault(prediction, []).append(pair)

    def on_validation_epoch_end(self) -> None:
        outputs, self.dev_outputs = self.dev_outputs, {}
        for prediction in self.head.config.predictions:
            pairs = _gather_all(outputs.get(prediction, []))
            logits = torch.cat([logits for logits, _ in pairs])
            labels = torch.cat([labels for _, labels in pairs])
            self.dev_quality[prediction] = quality(logits, labels)
            for name, value in self.dev_quality[prediction].to_dict().items():
                self.log(f"dev_{prediction}_{name}", float(value), prog_bar=name == "binary_kl", rank_zero_only=True)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue at the start of an optimizer step, under however many micro-batches that step is divided into now.

        Lightning counts micro-batches; the data starts at the step. After a resume it may also save in mid-step.
        """
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        for part in ("total", "current"):
            progress[part] |= dict.fromkeys(("ready", "started", "processed", "completed"), batches)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.head.parameters(), lr=self.lr)
        warmup = math.ceil(self.warmup_share * self.total_steps)
        schedule = get_cosine_schedule_with_warmup(optimizer, warmup, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _gather_all(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Every rank's list, in rank order."""
    if not torch.distributed.is_initialized():
        return pairs
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, pairs)
    return [pair for rank_pairs in everyone for pair in rank_pairs]
