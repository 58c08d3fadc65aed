"""Trains a pair in minutes: the target on text, the draft on the target's distribution, as the embedded pair was.

The recipe's language model (Muon and AdamW, bf16) under a cosine of the clock: it ends when its seconds are over,
however fast the machine is. All tokens lie on the device, so nothing is waited for.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from cells import Cell
from language_model import LanguageModel, build_model
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, PreTrainedModel

from accept_head.pair import default_device, load_model

# 197 M and 12.6 M parameters, embeddings of 16,384 tokens included.
TARGET_SHAPE = dict(hidden_size=1024, num_hidden_layers=16, intermediate_size=2816, num_key_value_heads=4)
DRAFT_SHAPE = dict(hidden_size=384, num_hidden_layers=4, intermediate_size=1024, num_key_value_heads=2)
TINY_TARGET = dict(hidden_size=128, num_hidden_layers=2, intermediate_size=128, num_key_value_heads=1)
TINY_DRAFT = dict(hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=1)
CONTEXT_TOKENS, BATCH_ROWS = 512, 48
WARM_UP, LOWEST = 0.03, 0.01  # shares of the time, of the rate
TARGET_LR, DRAFT_LR = 1.5e-3, 4e-3


class TimedLanguageModel(LanguageModel):
    """Its learning rate follows the clock."""

    def __init__(self, model: PreTrainedModel, *, seconds: float, lr: float, teacher: PreTrainedModel | None = None):
        super().__init__(model, total_steps=1, lr=lr, teacher=teacher)
        self.seconds, self.begin = seconds, 0.0
        self.tokens = 0

    @property
    def share(self) -> float:
        """Of the time that is over."""
        return (time.monotonic() - self.begin) / self.seconds if self.begin else 0.0

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        rate = lambda _: rate_at(self.share)  # noqa: E731
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]

    def on_train_start(self) -> None:
        self.begin = time.monotonic()

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_index: int) -> None:
        self.tokens += batch.numel()
        if self.share >= 1:
            self.trainer.should_stop = True


def rate_at(share: float) -> float:
    """Share of the largest learning rate: up in a line, then down a cosine, never quite to zero."""
    if share < WARM_UP:
        return max(share / WARM_UP, LOWEST)
    done = min((share - WARM_UP) / (1 - WARM_UP), 1.0)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done))


class Windows(Dataset[torch.Tensor]):
    """Batches (rows, context) of consecutive tokens, without end; each pass cuts the text elsewhere."""

    def __init__(self, tokens: torch.Tensor, rows: int, context: int):
        self.tokens, self.rows, self.context = tokens, rows, context
        self.per_pass = max(1, len(tokens) // (rows * context) - 1)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        number, place = divmod(index, self.per_pass)
        start = (number * 131) % self.context + place * self.rows * self.context
        return self.tokens[start : start + self.rows * self.context].long().view(self.rows, self.context)


def packed(text: Path, seed: int) -> torch.Tensor:
    """All documents, each as often as it says, in a random order, as one array on the device."""
    with np.load(text / "text.npz", allow_pickle=False) as arrays:
        ids, lengths, repeats = arrays["train"], arrays["train_lengths"], arrays["repeats"]
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    order = np.repeat(np.arange(len(documents)), repeats)
    np.random.default_rng(seed).shuffle(order)
    return torch.from_numpy(np.concatenate([documents[index] for index in order]).astype(np.int32)).to(default_device())


def train_target(text: Path, out: Path, *, seconds: float, tiny: bool) -> Cell:
    shape = TINY_TARGET if tiny else TARGET_SHAPE
    return _train(text, out, None, shape, seconds=seconds, lr=TARGET_LR, seed=0, tiny=tiny)


def train_draft(text: Path, out: Path, target: Path, *, seconds: float, tiny: bool) -> Cell:
    """By distillation, which raises acceptance more than the same time on text."""
    shape = TINY_DRAFT if tiny else DRAFT_SHAPE
    return _train(text, out, target, shape, seconds=seconds, lr=DRAFT_LR, seed=1, tiny=tiny)


def _train(
    text: Path,
    out: Path,
    teacher: Path | None,
    shape: dict[str, int],
    *,
    seconds: float,
    lr: float,
    seed: int,
    tiny: bool,
) -> Cell:
    """Train for so many seconds and save in bf16, with the tokenizer."""
    L.seed_everything(seed, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(text / "tokenizer")
    model = build_model(shape, tokenizer)
    model.set_attn_implementation("sdpa")
    teaching = load_model(teacher, "--target", dtype="bfloat16") if teacher else None
    rows, context = (2, 64) if tiny else (BATCH_ROWS, CONTEXT_TOKENS)
    module = TimedLanguageModel(model, seconds=seconds, lr=lr, teacher=teaching)
    trainer = L.Trainer(
        max_steps=-1,
        max_epochs=-1,
        precision="bf16-mixed",
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(Windows(packed(text, seed), rows, context), batch_size=None))
    spent = time.monotonic() - module.begin
    module.model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    trained = load_model(out, "--out", dtype="bfloat16")  # anew: the angles of the rotary table must not be bf16
    return {
        "parameters": trained.num_parameters(),
        "steps": trainer.global_step // 2,  # two optimizers
        "tokens": module.tokens,
        "train_seconds": spent,
        "tokens_per_second": module.tokens / spent,
        "held_out_loss": held_out_loss(trained, text, rows, context),
        "saved": str(out),
    }


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, text: Path, rows: int, context: int) -> float:
    """Nats a token."""
    with np.load(text / "text.npz", allow_pickle=False) as arrays:
        ids = torch.from_numpy(arrays["held_out"].astype(np.int64)).to(model.device)
    windows = ids[: len(ids) // context * context].view(-1, context)[: 4 * rows]
    losses = [
        F.cross_entropy(model(part).logits[:, :-1].float().flatten(0, 1), part[:, 1:].flatten())
        for part in windows.split(rows)
    ]
    return float(torch.stack(losses).mean())
