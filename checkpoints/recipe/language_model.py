"""Training one Llama-architecture language model of the pair: the target on text, the draft on the target.

The draft's loss is the cross-entropy against the target's distribution, not against the text: distillation is how draft
models are made in practice, and it raises acceptance more than the same compute on text.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

CONTEXT_TOKENS = 512
BATCH_TOKENS = 8192
TARGET_SHAPE = dict(hidden_size=256, num_hidden_layers=10, intermediate_size=512, num_key_value_heads=2)
DRAFT_SHAPE = dict(hidden_size=128, num_hidden_layers=2, intermediate_size=320, num_key_value_heads=2)


def build_model(shape: dict[str, int], tokenizer) -> LlamaForCausalLM:
    """A Llama with tied embeddings and heads of 64 channels. Eager attention is faster than SDPA in bf16 on a CPU."""
    config = LlamaConfig(
        **shape,
        num_attention_heads=shape["hidden_size"] // 64,
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


class PackedBatches(Dataset):
    """Batches of BATCH_TOKENS consecutive tokens: windows of 256 tokens at first, full windows for the last 30 %.

    Attention is half of a CPU step at 512 tokens; most of what is learned early needs less context than that.
    """

    def __init__(self, tokens: np.ndarray, short_share: float = 0.7):
        self.tokens = tokens[: len(tokens) // BATCH_TOKENS * BATCH_TOKENS].reshape(-1, BATCH_TOKENS)
        self.short = int(len(self.tokens) * short_share)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        window = CONTEXT_TOKENS // 2 if index < self.short else CONTEXT_TOKENS
        return torch.from_numpy(self.tokens[index].astype(np.int64)).view(-1, window)  # (batch, window)


class LanguageModel(L.LightningModule):
    """Muon for the matrices inside the layers, AdamW for embeddings and norms, one cosine schedule for both."""

    def __init__(
        self, model: LlamaForCausalLM, *, total_steps: int, lr: float, teacher: LlamaForCausalLM | None = None
    ):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.total_steps, self.lr = model, total_steps, lr
        self.teacher = (
            [teacher.eval().requires_grad_(False)] if teacher is not None else []
        )  # a list: not in checkpoints

    def training_step(self, input_ids: torch.Tensor, batch_index: int) -> None:
        logits = self.model(input_ids).logits[:, :-1].float().flatten(0, 1)  # (positions, vocab)
        answer = input_ids[:, 1:].flatten()
        if self.teacher:
            with torch.no_grad():
                answer = self.teacher[0](input_ids).logits[:, :-1].float().flatten(0, 1).softmax(-1)
        loss = F.cross_entropy(logits, answer)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()
        self.log("loss", loss, prog_bar=True)

    def validation_step(self, input_ids: torch.Tensor, batch_index: int) -> None:
        loss = F.cross_entropy(self.model(input_ids).logits[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten())
        self.log("held_out_loss", loss, prog_bar=True, batch_size=len(input_ids))

    def configure_optimizers(self):
        layers = dict(self.model.model.layers.named_parameters())
        matrices = [p for p in layers.values() if p.ndim == 2]
        inside = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in inside]
        muon = torch.optim.Muon(matrices, lr=self.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.01)
        schedules = [
            get_cosine_schedule_with_warmup(optimizer, self.total_steps // 50 + 1, self.total_steps)
            for optimizer in (muon, adamw)
        ]
        return [muon, adamw], schedules


def quick_bf16() -> bool:
    """Whether bf16 is quicker here than fp32: a CPU without instructions for it is twenty times slower."""
    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def train_language_model(
    model: LlamaForCausalLM,
    train_tokens: np.ndarray,
    held_out_tokens: np.ndarray,
    *,
    work: Path,
    lr: float,
    teacher: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """Train once over `train_tokens`, resuming from `work/last.ckpt` when it is there."""
    batches = PackedBatches(train_tokens)
    steps = len(batches)
    module = LanguageModel(model, total_steps=steps, lr=lr, teacher=teacher)
    trainer = L.Trainer(
        # Two optimizers step per batch, and Lightning counts each: max_steps is therefore in optimizer steps.
        max_steps=2 * steps,
        precision="bf16-mixed" if quick_bf16() else "32-true",
        accelerator="auto",
        devices=1,
        logger=CSVLogger(work, name="", version=""),
        log_every_n_steps=20,
        val_check_interval=min(250, steps),
        callbacks=[ModelCheckpoint(work, save_last=True, save_top_k=0, every_n_train_steps=200)],
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    last = work / "last.ckpt"
    trainer.fit(
        module,
        DataLoader(batches, batch_size=None),
        DataLoader(PackedBatches(held_out_tokens, short_share=0), batch_size=None),
        ckpt_path=str(last) if last.exists() else None,
    )
    return module.model
