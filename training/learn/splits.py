"""The training traces and dev traces of a run: one folder or several, all of one pair and one sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets

from accept_head.errors import InputError
from accept_head.randomness import TraceStream, uniforms
from accept_head.trace.config import TraceConfig, check_coupled, check_made_by
from accept_head.trace.shards import read_traces


@dataclass(frozen=True)
class Part:
    """A whole folder of traces. The column `folder` of its traces is its place in `Splits.parts`."""

    folder: Path
    config: TraceConfig
    traces: Dataset


@dataclass(frozen=True)
class Splits:
    """The training traces and dev traces of a run.

    folders, configs: of the training traces, in the order given. train, dev: traces. parts: the folders that these come
    from, the folder of dev traces last.
    """

    folders: tuple[Path, ...]
    configs: tuple[TraceConfig, ...]
    train: Dataset
    dev: Dataset
    parts: tuple[Part, ...]

    def content(self) -> Any:
        """What decides the training traces: TraceConfig.content() of the folder, or a list of them for several."""
        contents = [config.content() for config in self.configs]
        return contents if len(contents) > 1 else contents[0]

    def record(self) -> dict[str, Any]:
        """The folders for the head's training_config.json. Empty for a single folder: trace_config.json records it."""
        if len(self.configs) == 1:
            return {}
        names = ("num_prompts", "seed", "prompts_fingerprint", "responses")
        return {
            "traces": [
                {
                    "folder": str(folder),
                    "fingerprint": config.fingerprint(),
                    "sampling": asdict(config.sampling),
                    **{name: getattr(config, name) for name in names},
                }
                for folder, config in zip(self.folders, self.configs, strict=True)
            ]
        }


def read_splits(folders: Sequence[Path], dev_folder: Path | None, *, draft_fingerprint: str, seed: int) -> Splits:
    """Read all folders. Without a folder of dev traces, a share of the prompts in every folder is held out.

    A prompt is held out by its index, so the same prompt is held out of all folders of the same prompts. Scored text
    (`collect --responses`) is never dev text, so its held-out part is not used.

    Raises InputError naming the folder that is damaged, given twice, or made by another pair or sampling.
    """
    if not folders:
        raise InputError("--traces is an empty list, expected at least one folder")
    parts = [_read_made_by(folder, place, draft_fingerprint) for place, folder in enumerate(folders)]
    configs = tuple(part.config for part in parts)
    fingerprints = [config.fingerprint() for config in configs]
    for place, (folder, config) in enumerate(zip(folders, configs, strict=True)):
        _check_alike(config, f"--traces {folder}", configs[0], folders[0])
        if (twin := fingerprints.index(fingerprints[place])) < place:
            raise InputError(f"--traces {folder}: holds the same traces as {folders[twin]}; give each folder once")
    columns = [name for name in parts[0].traces.column_names if all(name in part.traces.column_names for part in parts)]
    together = concatenate_datasets([part.traces.select_columns(columns) for part in parts])  # some lack alternatives
    if dev_folder is not None:
        dev = _read_made_by(dev_folder, len(parts), draft_fingerprint)
        _check_alike(dev.config, f"--dev_traces {dev_folder}", configs[0], folders[0])
        check_coupled(dev.config, dev_folder)
        return Splits(tuple(folders), configs, together, dev.traces, (*parts, dev))
    if all(config.responses is not None for config in configs):
        raise InputError(
            f"--traces {folders[0]}: its responses were scored with `collect --responses`, which can train a head but "
            "not judge it; give --dev_traces"
        )
    judges = np.repeat([config.responses is None for config in configs], [len(part.traces) for part in parts])
    train, held_out = split_dev(together, ", ".join(map(str, folders)), seed=seed, judges=judges)
    return Splits(tuple(folders), configs, train, held_out, tuple(parts))


def split_dev(
    traces: Dataset, folder: Path | str, *, seed: int, judges: np.ndarray | None = None
) -> tuple[Dataset, Dataset]:
    """(train, dev): each prompt is held out with probability 0.1, decided by its index alone.

    judges: (traces,) bool, which of the held-out traces may be dev traces; all when left out. folder: for the message.
    """
    indices = torch.tensor(traces["index"])
    held_out = uniforms(seed, indices, 0, TraceStream.DEV) < 0.1
    in_dev = held_out if judges is None else held_out & torch.from_numpy(judges)
    if held_out.all() or not in_dev.any():
        raise InputError(f"{folder}: {len(traces)} traces are too few to hold some out; give --dev_traces")
    return traces.select(torch.where(~held_out)[0].tolist()), traces.select(torch.where(in_dev)[0].tolist())


def _read_made_by(folder: Path, place: int, draft_fingerprint: str) -> Part:
    config, traces = read_traces(folder)
    check_made_by(config, folder, draft_fingerprint=draft_fingerprint)
    return Part(folder, config, traces.add_column("folder", np.full(len(traces), place)))


def _check_alike(config: TraceConfig, option: str, first: TraceConfig, folder: Path) -> None:
    """Raises InputError when `config` has another target or sampling than `first`, the config of `folder`."""
    if config.target_fingerprint != first.target_fingerprint:
        raise InputError(
            f"{option}: made by another pair (its target was {config.target}, that of --traces {folder} {first.target})"
        )
    if config.sampling != first.sampling:
        raise InputError(f"{option}: sampled with {config.sampling}, --traces {folder} with {first.sampling}")
