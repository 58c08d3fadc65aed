"""Collecting as a Lightning predict run: one step makes all records of one shard.

Shard s belongs to rank s mod world size. The content of a shard depends only on the settings, so any number of
processes, kills and reruns gives the same records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader
from tqdm import tqdm

from accept_head.errors import InputError
from accept_head.files import writable_folder
from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.sampling import Sampling
from accept_head.trace.config import CONFIG_NAME, TraceConfig
from accept_head.trace.shards import check_shard, missing_shards, write_shard
from accept_head.training.collect.score import score, scoring_halving
from accept_head.training.halving import Halving
from accept_head.training.respond.request import check_said_by_target
from accept_head.training.respond.responder import Batch, Responder

DEFAULTS = {"backend": "transformers"}  # values of fields that a config leaves out


def write_shards(
    options: dict[str, Any],
    pair: Pair,
    prompts: Sequence[Prompt],
    config: TraceConfig,
    folder: Path,
    responder: Responder,
    *,
    repair: bool = False,
) -> None:
    """Make this process's share of the shards that the folder lacks.

    options: for the Trainer. repair: whether to make damaged shards again.

    Raises InputError when the folder holds other traces.
    """
    prepare_folder(folder, config)
    trainer = L.Trainer(
        **options,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[TraceWriter(folder)],
    )
    try:
        trainer.predict(Collector(pair, prompts, config, folder, responder, repair), return_predictions=False)
    finally:
        responder.close()
    trainer.strategy.barrier("collected")
    if trainer.is_global_zero:
        print(f"{folder}: {config.num_prompts} traces in {config.num_shards} shards")


def prepare_folder(folder: Path, config: TraceConfig) -> Path:
    """Make the folder and record its config, or check that it already has the same config."""
    writable_folder(folder)
    if (folder / CONFIG_NAME).exists():
        before, now = TraceConfig.load(folder).content(), config.content()
        if changed := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
            was, is_now = (content.get(changed[0], DEFAULTS.get(changed[0])) for content in (before, now))
            raise InputError(
                f"--out {folder}: holds traces made with another {changed[0]} ({was}, now {is_now}); choose another "
                "folder or remove it"
            )
    elif any(folder.glob("*.parquet")):
        raise InputError(f"--out {folder}: holds parquet files but no {CONFIG_NAME}; choose another folder")
    else:
        config.save(folder)
    return folder


class Collector(L.LightningModule):
    """predict_step makes all records of one shard."""

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        config: TraceConfig,
        folder: Path,
        responder: Responder,
        repair: bool = False,
    ):
        super().__init__()
        self.parts = (pair, prompts)  # in a tuple: the models are not submodules, so nothing moves or wraps them
        self.trace_config = config
        self.folder = folder
        self.responder = responder
        self.scoring = scoring_halving()
        self.repair = repair

    def predict_dataloader(self) -> DataLoader:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        # By shard number, not by place in the list of missing shards: other ranks may be writing already.
        ours = range(rank, self.trace_config.num_shards, world)
        missing = set(missing_shards(self.folder, self.trace_config))
        mine = [shard for shard in ours if shard in missing or (self.repair and self._is_damaged(shard))]
        total = sum(map(self.trace_config.shard_rows, mine))
        self.progress = tqdm(total=total, unit="prompt", desc="collect", disable=rank != 0, smoothing=0.1)
        self.tokens = 0
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]

    def _is_damaged(self, shard: int) -> bool:
        """Whether a shard is damaged; then prints why. The file stays until a new one replaces it."""
        try:
            check_shard(self.folder, self.trace_config, shard)
        except InputError as error:
            print(f"collected again: {error}", file=sys.stderr)
            return True
        return False

    def predict_step(self, shard: int) -> list[dict[str, Any]]:
        pair, prompts = self.parts
        config = self.trace_config
        first = shard * config.shard_size
        mine = prompts[first : first + config.shard_rows(shard)]
        records: list[dict[str, Any]] = []
        for batch in self.responder.batches(shard, mine):
            drawn_with = self.responder.drawn_with
            records += score_responses(pair, batch, config, drawn_with=drawn_with, halving=self.scoring)
            self.tokens += sum(map(len, batch.responses))
            self.progress.update(len(batch.prompts))
            elapsed = self.progress.format_dict["elapsed"] or 1e-9
            self.progress.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s")
        if config.backend is not None:
            check_said_by_target(records, f"--backend {config.backend}")
        return records

    def on_predict_end(self) -> None:
        self.progress.close()


def score_responses(
    pair: Pair,
    batch: Batch,
    config: TraceConfig,
    *,
    drawn_with: Sampling,
    halving: Halving | None = None,
) -> list[dict[str, Any]]:
    """Trace records of these responses under `config.sampling`. drawn_with: the settings that they were drawn with."""
    scored = score(
        pair,
        [prompt.ids for prompt in batch.prompts],
        batch.responses,
        config.sampling,
        seed=config.seed,
        indices=[prompt.index for prompt in batch.prompts],
        target_logits=batch.logits,
        drawn_with=drawn_with,
        alternatives=config.alternatives or 0,
        halving=halving,
    )
    return [
        {
            "index": prompt.index,
            "id": prompt.id,
            "domain": prompt.domain,
            "finished": response[-1] in config.end_token_ids,
            "prompt_ids": list(prompt.ids),
            **columns,
        }
        for prompt, response, columns in zip(batch.prompts, batch.responses, scored, strict=True)
    ]


class TraceWriter(BasePredictionWriter):
    """Writes each finished shard of this rank, atomically."""

    def __init__(self, folder: Path):
        super().__init__(write_interval="batch")
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: int, *_: Any
    ) -> None:
        write_shard(self.folder, batch, prediction)
