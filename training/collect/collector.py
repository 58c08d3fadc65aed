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

from accept_head.checksum import save_tensors
from accept_head.console import Progress
from accept_head.errors import InputError
from accept_head.files import atomic_path, writable_folder
from accept_head.inference.replay.depths import joined
from accept_head.inference.replay.rollouts import begin_rollouts, rollout_path
from accept_head.prompts import Prompt
from accept_head.trace.config import CONFIG_NAME, TraceConfig
from accept_head.trace.shards import check_shard, missing_shards, write_shard
from accept_head.training.collect.depths import ROLLOUTS
from accept_head.training.collect.source import Columns, Source
from accept_head.training.launch import ending_on_sigterm
from accept_head.training.respond.request import check_said_by_target

DEFAULTS = {"backend": "transformers"}  # values of fields that an older config leaves out
OUTSIDE = {"vllm", "openai"}  # engines whose responses must be checked to be the target's


def write_shards(
    options: dict[str, Any],
    prompts: Sequence[Prompt],
    config: TraceConfig,
    folder: Path,
    source: Source,
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
        with ending_on_sigterm():
            trainer.predict(Collector(prompts, config, folder, source, repair), return_predictions=False)
    finally:
        source.close()
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
        if config.depths is not None:
            begin_rollouts(folder, config)
    return folder


class Collector(L.LightningModule):
    """predict_step makes all records of one shard."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: TraceConfig,
        folder: Path,
        source: Source,
        repair: bool = False,
    ):
        super().__init__()
        self.prompts, self.trace_config, self.folder, self.source = prompts, config, folder, source
        self.repair = repair
        # A rank may have no shard left to make.
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def predict_dataloader(self) -> DataLoader:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        # By shard number, not by place in the list of missing shards: other ranks may be writing already.
        ours = range(rank, self.trace_config.num_shards, world)
        missing = set(missing_shards(self.folder, self.trace_config))
        mine = [shard for shard in ours if shard in missing or (self.repair and self._is_damaged(shard))]
        total = sum(map(self.trace_config.shard_rows, mine))
        self.progress = Progress(
            total=total, unit="prompt", desc="collect", disable=rank != 0 or not total, smoothing=0.1
        )
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
        config = self.trace_config
        first = shard * config.shard_size
        records: list[dict[str, Any]] = []
        for prompt, columns in self.source.records(shard, self.prompts[first : first + config.shard_rows(shard)]):
            records.append(record_of(prompt, columns, config))
            self.tokens += len(columns["response_ids"])
            elapsed = self.progress.format_dict["elapsed"] or 1e-9
            self.progress.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s", refresh=False)
            self.progress.update(1)
        if config.backend in OUTSIDE:
            check_said_by_target(records, f"--backend {config.backend}")
        return sorted(records, key=lambda record: record["index"])

    def on_predict_end(self) -> None:
        self.progress.close()


def record_of(prompt: Prompt, columns: Columns, config: TraceConfig) -> dict[str, Any]:
    return {
        "index": prompt.index,
        "id": prompt.id,
        "domain": prompt.domain,
        "finished": columns["response_ids"][-1] in config.end_token_ids,
        "prompt_ids": list(prompt.ids),
        **columns,
    }


class TraceWriter(BasePredictionWriter):
    """Writes each finished shard of this rank, atomically."""

    def __init__(self, folder: Path):
        super().__init__(write_interval="batch")
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: int, *_: Any
    ) -> None:
        rollouts = [record.pop(ROLLOUTS) for record in prediction if ROLLOUTS in record]
        if rollouts:  # first, as a shard counts as finished when its traces are there
            with atomic_path(rollout_path(self.folder, batch)) as temporary:
                save_tensors(joined(rollouts), temporary)
        write_shard(self.folder, batch, prediction)
