"""The draft's states at the training positions, computed once and kept on disk.

The draft is frozen, and exact and prefix packing feed it the same tokens in every epoch: what heads read never changes.
One pass over the traces writes it down; after that, no epoch of any head runs the draft. Token mixing draws its masks
anew each epoch, so there it cannot be done.

The features of a folder of traces are a folder, named by a fingerprint of all that decides them, with a file for every
shard of the traces. Which shards there must be is derived from the traces; a shard is there whole or not at all, so any
number of kills, reruns and processes ends with the same files. They are safetensors, mapped into memory: what is read
of them lives in the page cache of the system, once for all processes and their workers.

A state is that of an uncached run up to rounding: there the same trace stands in another batch, with other padding,
each time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from accept_head.checksum import read_tensors, save_tensors
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, readable_size, sha256, writable_folder, write_json
from accept_head.pair import hidden_size
from accept_head.signals import SIGNALS
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.training.learn.batches import LABELS, DraftBatch, StateBatch, collate
from accept_head.training.learn.mixing import Packing, pack_fixed
from accept_head.training.learn.splits import Part
from accept_head.training.learn.trace_tensors import READ_COLUMNS, TraceTensors

CACHE_VERSION = 2  # of what a packing says of a trace, and of the files
FOLDER_NAME, CONFIG_NAME = "features", "feature_config.json"
LABEL_BYTES = 4 * len(LABELS) + len(LABELS) + 4 * len(SIGNALS) + 8  # a position's labels, mask, signals and drawn id
ALTERNATIVE_BYTES = 8 + 2 * 4  # id, and log q and a


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """What decides the features of a folder of traces.

    traces: fingerprint of their config. draft_fingerprint, dtype, hidden_size: of the draft as it runs. precision: of
    the run. packing: exact or prefix. places: the labels whose positions are kept, some of token and next; what is said
    `after` a token stands where its token label does. alternatives: kept of each position.
    """

    traces: str
    draft_fingerprint: str
    dtype: str
    hidden_size: int
    precision: str
    packing: Packing
    places: list[str]
    alternatives: int = 0
    version: int = CACHE_VERSION

    def fingerprint(self) -> str:
        return sha256(json.dumps(asdict(self), sort_keys=True))

    @property
    def position_bytes(self) -> int:
        """Bytes on disk of each position of a response."""
        places = len(self.places) if self.packing == "exact" else 1  # prefix: at one place stands all that is asked
        state = self.hidden_size * getattr(torch, self.dtype).itemsize
        return places * (state + LABEL_BYTES + ALTERNATIVE_BYTES * self.alternatives)


class FeatureCache:
    """The features of all folders of traces of a run."""

    def __init__(
        self,
        parts: Sequence[Part],
        where: Path | None,
        draft: PreTrainedModel,
        *,
        packing: Packing,
        axes: Sequence[int],
        precision: str,
        alternatives: int = 0,
    ):
        """parts: Splits.parts. where: a folder for all of them; None = beside the traces, in each folder of `parts`.
        axes: the LABELS that heads are trained on. alternatives: that they learn of; a folder of dev traces may have
        fewer. Raises InputError for token mixing."""
        check_cacheable(packing)
        self.folders = [
            FeatureFolder(
                where or part.folder / FOLDER_NAME,
                FeatureConfig(
                    traces=part.config.fingerprint(),
                    draft_fingerprint=part.config.draft_fingerprint,
                    dtype=str(draft.dtype).removeprefix("torch."),
                    hidden_size=hidden_size(draft),
                    precision=precision,
                    packing=packing,
                    places=sorted({LABELS[axis] for axis in axes} - {"after"}, key=LABELS.index),
                    alternatives=min(alternatives, part.config.alternatives or 0),
                ),
                part,
            )
            for part in parts
        ]

    def complete(
        self, states_of: Callable[[DraftBatch], StateBatch], *, traces_at_once: int, rank: int = 0, world: int = 1
    ) -> None:
        """Check this rank's share of the shards that are there, then write its share of those that are missing.

        states_of: runs the draft; gives its StateBatch on the CPU. Raises InputError, before anything is written, when
        a shard is damaged or holds other traces, when there is not enough room, or the folder cannot be written to.
        """
        shards = [(folder, shard) for folder in self.folders for shard in range(folder.count)]
        missing = {(folder, shard) for folder, shard in shards if not folder.file(shard).exists()}
        mine = shards[rank::world]  # by number, not by place among the missing: others may be writing while we look
        for folder, shard in mine:
            if (folder, shard) not in missing:
                folder.map(shard)
        self._prepare(missing, say=rank == 0)
        todo = [each for each in mine if each in missing]
        for folder, shard in tqdm(todo, unit="shard", desc="draft states", disable=rank != 0 or not todo):
            folder.write(shard, states_of, traces_at_once)

    def trace(self, folder: int, index: int) -> StateBatch:
        """That of one trace. folder: place in Splits.parts. index: the trace's. Raises InputError for a shard that is
        not there."""
        return self.folders[folder].trace(index)

    def _prepare(self, missing: Iterable[tuple[FeatureFolder, int]], *, say: bool) -> None:
        """Print what will be written, and make the folders for it if there is room."""
        needed: dict[FeatureFolder, int] = {}
        for folder, shard in missing:
            needed[folder] = needed.get(folder, 0) + folder.size(shard)
        disks: dict[int, list[FeatureFolder]] = {}
        for folder in needed:
            disks.setdefault(_existing(folder.path).stat().st_dev, []).append(folder)
        for folders in disks.values():
            size, free = sum(needed[folder] for folder in folders), shutil.disk_usage(_existing(folders[0].path)).free
            if size > free:
                raise InputError(
                    f"--cache {folders[0].path}: {readable_size(size)} of draft states are to be written, but only "
                    f"{readable_size(free)} are free there; give --cache a folder on another disk, or leave it out"
                )
        for folder in needed:
            folder.prepare()
        if say and needed:
            positions = sum(folder.positions(shard) for folder, shard in missing)
            places = ", ".join(str(folder.path) for folder in needed)
            print(f"draft states of {positions:,} positions, {readable_size(sum(needed.values()))}, go to {places}")


class FeatureFolder:
    """The features of one folder of traces."""

    def __init__(self, parent: Path, config: FeatureConfig, part: Part):
        self.path = parent / config.fingerprint()[:16]
        self.config, self.part, self.count = config, part, part.config.num_shards
        self.lengths = pc.list_value_length(part.traces.data.column("response_ids")).to_numpy()
        self.mapped: dict[int, tuple[StateBatch, list[int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps: a worker process that is not a fork makes its own, instead of being sent their content."""
        return {**vars(self), "mapped": {}}

    def file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05d}.safetensors"

    def positions(self, shard: int) -> int:
        """Of the responses in it."""
        return int(self.lengths[self._rows(shard)].sum())

    def size(self, shard: int) -> int:
        """Bytes that it takes on disk, but for a few hundred of the file's header."""
        return self.positions(shard) * self.config.position_bytes + 16 * self.part.config.shard_rows(shard)

    def prepare(self) -> None:
        """Make the folder. Raises InputError when that fails, or when something else is there."""
        writable_folder(self.path, "--cache")
        path = self.path / CONFIG_NAME
        if not path.exists():
            write_json(path, asdict(self.config))
        elif read_json(path) != asdict(self.config):
            raise InputError(f"--cache {self.path}: its {CONFIG_NAME} is of other features; remove that folder")

    def write(self, shard: int, states_of: Callable[[DraftBatch], StateBatch], traces_at_once: int) -> None:
        rows = range(*self._rows(shard).indices(len(self.lengths)))
        traces, done = TraceTensors(self.part.traces), []
        for start in range(0, len(rows), traces_at_once):
            some = list(rows[start : start + traces_at_once])
            packed = [pack_fixed(traces[row], self.config.packing, self.config.alternatives) for row in some]
            done.append(states_of(collate(packed, some)))
        tensors = {name: tensor.contiguous() for name, tensor in vars(StateBatch.joined(done)).items()}
        with atomic_path(self.file(shard)) as temporary:
            save_tensors({**tensors, "traces": self._digest_of_traces(shard)}, temporary)

    def map(self, shard: int) -> tuple[StateBatch, list[int]]:
        """Its tensors, which are pages of the file, and where each trace begins and the last ends. What is read first
        by this process is checked. Raises InputError naming a shard that is missing, damaged or of other traces."""
        if shard not in self.mapped:
            path = self.file(shard)
            tensors = read_tensors(path, [*(field.name for field in fields(StateBatch)), "traces"])
            if not torch.equal(tensors.pop("traces"), self._digest_of_traces(shard)):
                raise InputError(
                    f"{path}: made from other traces than those in {self.part.folder}; remove it to have it made again"
                )
            whole = StateBatch(**tensors)
            self.mapped[shard] = whole, [0, *whole.counts.cumsum(0).tolist()]
        return self.mapped[shard]

    def trace(self, index: int) -> StateBatch:
        shard, place = divmod(index, self.part.config.shard_size)
        whole, starts = self.map(shard)
        positions, trace = slice(starts[place], starts[place + 1]), slice(place, place + 1)
        of_trace = ("counts", "indices")
        return StateBatch(
            **{name: value[trace if name in of_trace else positions] for name, value in vars(whole).items()}
        )

    def _rows(self, shard: int) -> slice:
        size = self.part.config.shard_size
        return slice(shard * size, (shard + 1) * size)

    def _digest_of_traces(self, shard: int) -> Tensor:
        """SHA-256 of the records themselves, (32,) uint8: under the same settings another machine may say others."""
        records = self.part.traces.with_format("numpy")[self._rows(shard)]
        names = READ_COLUMNS + (tuple(ALTERNATIVE_COLUMNS) if self.config.alternatives else ())
        parts = [np.ascontiguousarray(values) for name in names for values in records[name]]
        digest = sha256(b"".join(value.tobytes() for part in parts for value in (np.int64(len(part)), part)))
        return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


def check_cacheable(packing: Packing) -> None:
    """Raises InputError for token mixing."""
    if packing == "mixing":
        raise InputError(
            "--cache: token mixing draws its masks anew each epoch, so no draft state comes twice; leave --cache out, "
            "or take --packing exact"
        )


def _existing(path: Path) -> Path:
    """It, or what there is of the way to it."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
