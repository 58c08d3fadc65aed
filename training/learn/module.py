"""The training step: a frozen draft computes hidden states, and one head or a sweep of heads learns from them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from accept_head.errors import InputError
from accept_head.pair import attention_mask_for, base_model
from accept_head.quality import Quality, quality
from accept_head.training.learn.batches import DraftBatch, StateBatch, label_axes, sent
from accept_head.training.learn.best import BestWeights
from accept_head.training.learn.candidates import Candidate, Outcome
from accept_head.training.learn.gradient import HeadLoss, KnownGradients, head_loss
from accept_head.training.learn.positions import Positions, positions_of
from accept_head.training.learn.recipe import Keep
from accept_head.training.learn.start import standardise
from accept_head.training.threads import Threads

LOG_EVERY = 10  # optimizer steps
MOMENT_TRACES = 512  # most traces that the state's principal components are computed from


class HeadTraining(L.LightningModule):
    """Trains heads that differ only in depth, w_rej and decay, all on the same hidden states of `draft`.

    For each head, the loss of a step is one ratio of sums over all its traces. The gradients of the numerator are added
    over micro-batches and processes. The denominator is summed over both and divided out once, just before the
    optimizer steps. The result does not depend on how a step is divided, nor on which heads are trained together.

    keep: `last`, each head's weights at the end; or `best`, its weights after its best epoch on dev traces. With
    `best`, a head stays its base alone when no epoch saves a share PAYS of the base's KL (best.py). Among candidates
    with one name, a later one is chosen if it saves a further share PAYS.
    """

    train_sums: Tensor
    w_rej: Tensor

    def __init__(
        self,
        candidates: Sequence[Candidate],
        draft: PreTrainedModel,
        *,
        lr: float,
        total_steps: int,
        steps_per_epoch: int,
        warmup_share: float,
        w_acc: float,
        keep: Keep = "last",
        threads: Threads | None = None,
    ):
        super().__init__()
        self.candidates = tuple(candidates)
        self.heads = nn.ModuleList(candidate.head for candidate in candidates)
        self.predictions = self.candidates[0].head.config.predictions
        config = self.candidates[0].head.config
        self.axes = label_axes(config.predicts, sees_drawn=config.sees_drawn)
        self.draft = (draft,)  # a tuple, so that it is no submodule: checkpoints and DDP then have only the heads
        self.steps_per_epoch = steps_per_epoch
        self.keep = keep
        self.lr, self.total_steps, self.warmup_share = lr, total_steps, warmup_share
        self.last_epoch = range(total_steps - steps_per_epoch, total_steps)  # optimizer steps
        self.w_acc = w_acc
        self.register_buffer("w_rej", torch.tensor([one.w_rej for one in self.candidates]), persistent=False)
        # A training batch may be read ahead during a dev batch, and a draft's rotary tables may change with the length.
        self.draft_in_use = threading.Lock()
        self.threads = threads or Threads()
        # Sums over this rank's micro-batches in this step, per head: loss, weight, KL and count of each prediction.
        self.step_sums = torch.zeros(len(self.candidates), 2 + 2 * len(self.predictions))
        # Sums of KL and count over the last epoch so far and over all ranks: (heads, 2 × predictions).
        sums = torch.zeros(len(self.candidates), 2 * len(self.predictions), dtype=torch.float64)
        self.register_buffer("train_sums", sums)
        self.dev_outputs: list[tuple[Tensor, Tensor, Tensor]] = []  # logits of every head, labels, weights
        self.dev_quality: list[dict[str, Quality]] = [{} for _ in self.candidates]
        self.judged_step = -1  # optimizer step at which dev_quality was measured
        self.best = BestWeights(self.candidates)

    def setup(self, stage: str) -> None:
        """Standardise the state. Every rank computes this from the same traces, so that all start alike."""
        trainer: Any = self.trainer
        if stage == "fit" and self.candidates[0].head.config.standardised and trainer.ckpt_path is None:
            standardise([one.head for one in self.candidates], trainer.datamodule.some_states(MOMENT_TRACES))

    def _learning(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.heads.parameters() if parameter.requires_grad]

    def hidden_states(self, batch: DraftBatch) -> Tensor:
        """The draft's last hidden states, (batch, seq, hidden_size)."""
        (draft,) = self.draft
        with torch.no_grad(), self.draft_in_use:
            return base_model(draft)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=attention_mask_for(draft, batch.allowed),
                use_cache=False,
            )[0]

    def read(self, batch: DraftBatch | StateBatch) -> StateBatch:
        """The inputs and labels of heads for a batch. The draft runs unless the batch already has its states."""
        return batch if isinstance(batch, StateBatch) else batch.at(self.hidden_states(batch), self.axes)

    def training_step(self, batch: DraftBatch | StateBatch, batch_index: int) -> Tensor:
        batch = self.read(batch)
        device = batch.hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        with torch.no_grad(), torch.autocast(device, enabled=False):  # the products get their dtype by hand
            positions = positions_of(batch, self.axes, self.candidates[0].head)  # all heads normalise alike
            losses = self.threads.map(
                lambda one: head_loss(one.head, positions, w_acc=self.w_acc, w_rej=one.w_rej, dtype=dtype),
                self.candidates,
            )
            values = torch.stack([loss.value for loss in losses])
            self._check_finite(values, batch)
            self.step_sums = self.step_sums.to(values.device) + self._sums(positions, values, losses)
        gradients = [gradient for loss in losses for gradient in loss.gradients]
        return KnownGradients.apply(values.sum(), gradients, *self._learning())

    def _sums(self, positions: Positions, values: Tensor, losses: Sequence[HeadLoss]) -> Tensor:
        """What one micro-batch adds to `step_sums`."""
        accept, reject = positions.accept, positions.reject
        weights = self.w_acc * accept.sum() + self.w_rej.to(values.dtype) * reject.sum()
        times = (accept + reject).clamp(min=1e-12)
        entropy = -(torch.xlogy(accept, accept / times) + torch.xlogy(reject, reject / times)).sum(0)
        kl = torch.stack([loss.cross_entropy for loss in losses]) - entropy
        count = (accept + reject).sum(0).expand_as(kl)
        return torch.cat([torch.stack([values, weights], -1), kl, count], -1)

    def _check_finite(self, values: Tensor, batch: StateBatch) -> None:
        """Raise InputError for the first head whose loss is not finite, before it can reach the weights.

        This costs one host sync per micro-batch, which is little beside a draft forward.
        """
        finite = values.isfinite()
        if finite.all():
            return
        index = int((~finite).nonzero()[0])
        name = self.candidates[index].name
        raise InputError(
            f"{f'head {name}: ' if name else ''}the loss is {values[index].item()} at step {self.global_step}, batch "
            f"of traces {batch.indices.tolist()}; nothing was saved since the last checkpoint; look at these traces, "
            "or lower --lr"
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        sums: Tensor = self.trainer.strategy.reduce(self.step_sums, reduce_op="sum")
        weights = sums[:, 1].clamp(min=1e-12)
        # Undo two divisions: by the number of micro-batches (Lightning) and by the number of processes (DDP).
        scales = self.trainer.accumulate_grad_batches * self.trainer.world_size / weights
        for candidate, scale in zip(self.candidates, scales, strict=True):
            gradients = [each.grad for each in candidate.head.parameters() if each.grad is not None]
            torch._foreach_mul_(gradients, scale)
        if self.global_step in self.last_epoch:
            self.train_sums += sums[:, 2:]
        self._log_losses(sums[:, 0] / weights)
        self.step_sums = torch.zeros_like(self.step_sums)

    def _log_losses(self, losses: Tensor) -> None:
        """Show the mean loss. A sweep also logs each head's loss every LOG_EVERY steps. losses: (heads,)."""
        self.log("train_loss", losses.mean(), prog_bar=True, rank_zero_only=True)
        if len(self.candidates) > 1 and (self.global_step + 1) % LOG_EVERY == 0:
            names = [f"train_loss/{candidate.label}" for candidate in self.candidates]
            for logger in self.loggers:
                logger.log_metrics(dict(zip(names, losses.tolist(), strict=True)), step=self.global_step)

    def train_quality(self, index: int) -> dict[str, dict[str, float]]:
        """For each prediction of one head: the mean binary KL on the last epoch's training positions, and their number.

        Alternatives count as positions. The KL has no loss weights. It is measured in the steps of that epoch, each
        before its own update.
        """
        kl, count = self.train_sums[index].view(2, -1).tolist()
        return {
            prediction: {"count": round(count[axis]), "binary_kl": kl[axis] / max(count[axis], 1)}
            for axis, prediction in enumerate(self.predictions)
        }

    def validation_step(self, batch: DraftBatch | StateBatch, batch_index: int) -> None:
        batch = self.read(batch)
        device = batch.hidden.device
        read = batch.hidden, sent(batch.signals, device), sent(batch.drawn_ids, device)
        logits = torch.stack([candidate.head(*read).float() for candidate in self.candidates])
        self.dev_outputs.append((logits.cpu(), batch.labels[:, self.axes], batch.weights[:, self.axes]))

    def on_validation_epoch_end(self) -> None:
        self._judge()
        for candidate, found in zip(self.candidates, self.dev_quality, strict=True):
            for prediction, quality_of in found.items():
                self._log_quality(candidate.label, prediction, quality_of)

    def _judge(self) -> None:
        """Measure all candidates on the dev batches since the last call."""
        outputs, self.dev_outputs = _gather_all(self.dev_outputs), []
        logits = torch.cat([logits for logits, _, _ in outputs], dim=1)
        labels, weights = (torch.cat([output[part] for output in outputs]) for part in (1, 2))
        for index in range(len(self.candidates)):
            for axis, prediction in enumerate(self.predictions):
                found = quality(logits[index, :, axis], labels[:, axis], weights[:, axis])
                self.dev_quality[index][prediction] = found
            if self.keep == "best":
                self.best.judge(index, self.dev_quality[index])
        self.judged_step = self.global_step

    def outcomes(self) -> list[Outcome]:
        """The outcome for each name: its chosen candidate, or the base when no residual paid."""
        return [self._outcome(place) for place in self.best.chosen()]

    def _outcome(self, index: int) -> Outcome:
        candidate, base = self.candidates[index], self.candidates[index].base
        if base is not None and self.keep == "best" and index not in self.best.weights:
            return base
        dev, train = self.dev_quality[index], self.train_quality(index)
        head, of_base = candidate.head.float().cpu(), base.dev if base is not None else None
        return Outcome(candidate.name, head, dev, train, of_base, candidate.decay)

    def _log_quality(self, name: str, prediction: str, found: Quality) -> None:
        values = {f"dev_{prediction}_{key}": float(value) for key, value in found.to_dict().items()}
        if name:  # for the many values of a sweep, Lightning's bookkeeping would cost more than the values themselves
            for logger in self.loggers:
                logger.log_metrics({f"{key}/{name}": value for key, value in values.items()}, step=self.global_step)
            return
        for key, value in values.items():
            self.log(key, value, prog_bar=key.endswith("binary_kl"), rank_zero_only=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {**self.best.state(), "judged_step": self.judged_step}

    def on_train_start(self) -> None:
        """Judge the candidates first when the run was killed between the end of an epoch and its dev evaluation."""
        ended = self.global_step > 0 and self.global_step % self.steps_per_epoch == 0
        if self.keep == "last" or not ended or self.judged_step == self.global_step:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        with self.trainer.precision_plugin.val_step_context(), torch.no_grad():
            for place, batch in enumerate(data.val_dataloader()):
                self.validation_step(batch.to(self.device), place)
        self._judge()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue at the start of an optimizer step, whatever number of micro-batches the step now has.

        Lightning counts micro-batches, and after a resume it may save in the middle of a step. The data starts at a
        step, so the counts are set to match.
        """
        kept = checkpoint.get("kept")  # older checkpoints have none
        if kept is not None:
            self.best.load(kept)
            self.judged_step = kept["judged_step"]
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        for part in ("total", "current"):
            progress[part] |= dict.fromkeys(("ready", "started", "processed", "completed"), batches)

    def configure_optimizers(self) -> Any:
        # Adam is elementwise, so one optimizer for all heads equals one for each. Fused: one pass over the weights.
        groups = []
        for one in self.candidates:
            learning = [parameter for parameter in one.head.parameters() if parameter.requires_grad]
            # Share of the weights that a step at the peak removes. AdamW multiplies weight_decay by the step's lr.
            share = 1 - math.exp(-one.decay / self.steps_per_epoch)
            groups.append({"params": learning, "weight_decay": share / self.lr})
        optimizer = torch.optim.AdamW(groups, lr=self.lr, fused=True)
        warmup = math.ceil(self.warmup_share * self.total_steps)
        schedule = get_cosine_schedule_with_warmup(optimizer, warmup, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _gather_all(outputs: list[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every rank's list, in rank order."""
    if not torch.distributed.is_initialized():
        return outputs
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, outputs)
    return [output for rank_outputs in everyone for output in rank_outputs]
