"""The draft's states at the training positions, computed once and kept on disk.

The draft is frozen, and exact and prefix packing feed it the same tokens in every epoch. So the states that heads read
never change. One pass over the traces writes them to disk, and no later epoch of any head runs the draft. Token mixing
draws new masks in each epoch, so its states cannot be cached.

The features of a folder of traces are a folder too, named by a fingerprint of everything that decides them. It has one
file for every shard of the traces. Files are written atomically, so kills, reruns and several processes all end with
the same files. They are safetensors, mapped into memory: the system's page cache holds them once for all processes and
their workers.

A cached state equals the state of an uncached run up to rounding: without a cache, a trace is in another batch with
other padding each time.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.checksum import read_tensors, save_tensors
from accept_head.console import Progress
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, readable_size, sha256, writable_folder, write_json
from accept_head.pair import hidden_size
from accept_head.signals import SIGNALS
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.training.learn.batches import LABELS, DraftBatch, StateBatch, collate
from accept_head.training.learn.mixing import Packing, pack_fixed
from accept_head.training.learn.splits import Part
from accept_head.training.learn.trace_tensors import READ_COLUMNS, TraceTensors

CACHE_VERSION = 3  # changes with the packings or the file format
FOLDER_NAME, CONFIG_NAME = "features", "feature_config.json"
LABEL_BYTES = 8 * len(LABELS) + 4 * len(SIGNALS) + 8  # a position's labels, weights, signals and drawn id
ALTERNATIVE_BYTES = 8 + 2 * 4  # id, and log q and a


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """Everything that decides the features of a folder of traces.

    traces: fingerprint of their config. draft_fingerprint, dtype, hidden_size: of the draft when it runs. precision: of
    the run. packing: exact or prefix. places: the labels whose positions are kept, some of token and next. The label
    `after` is at the place of the token label. alternatives: number kept at each position.
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
        places = len(self.places) if self.packing == "exact" else 1  # prefix: all labels are at the same place
        state = self.hidden_size * getattr(torch, self.dtype).itemsize
        return places * (state + LABEL_BYTES + ALTERNATIVE_BYTES * self.alternatives)


class FeatureCache:
    """The features of all folders of traces of a run. folders: in the order of Splits.parts."""

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
        """Describe the cache; nothing is read or written yet. Raises InputError for token mixing.

        parts: Splits.parts. where: a folder for all features; None = beside the traces, in each folder of `parts`.
        axes: the LABELS that heads are trained on. alternatives: number that heads learn from at each position. A
        folder of dev traces may have fewer.
        """
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
        """Check this rank's share of the existing shards, then write its share of the missing ones.

        states_of: runs the draft and returns its StateBatch on the CPU. Raises InputError, before anything is written,
        when a shard is damaged or holds other traces, when there is not enough room, or when the folder cannot be
        written to.
        """
        shards = [(folder, shard) for folder in self.folders for shard in range(folder.count)]
        missing = {(folder, shard) for folder, shard in shards if not folder.file(shard).exists()}
        mine = shards[rank::world]  # not a share of the missing shards: other ranks may be writing already
        for folder, shard in mine:
            if (folder, shard) not in missing:
                folder.map(shard)
        self._prepare(missing, say=rank == 0)
        todo = [each for each in mine if each in missing]
        for folder, shard in Progress(todo, unit="shard", desc="draft states", disable=rank != 0 or not todo):
            folder.write(shard, states_of, traces_at_once)

    def _prepare(self, missing: Iterable[tuple[FeatureFolder, int]], *, say: bool) -> None:
        """Print what will be written, and make the folders if there is room."""
        needed, of_disk = Counter[FeatureFolder](), Counter[int]()
        for folder, shard in missing:
            needed[folder] += folder.size(shard)
        for folder, size in needed.items():
            there = _existing(folder.path)
            disk, free = there.stat().st_dev, shutil.disk_usage(there).free
            of_disk[disk] += size
            if of_disk[disk] > free:
                raise InputError(
                    f"--cache {folder.path}: {readable_size(of_disk[disk])} of draft states are to be written, but "
                    f"only {readable_size(free)} are free there; give --cache a folder on another disk, or leave it out"
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
        """Leave out the maps: a worker that is not a fork maps the files itself instead of receiving their content."""
        return {**vars(self), "mapped": {}}

    def file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05d}.safetensors"

    def positions(self, shard: int) -> int:
        """How many positions the responses of a shard have."""
        return int(self.lengths[self._rows(shard)].sum())

    def size(self, shard: int) -> int:
        """Bytes of a shard on disk, except a few hundred of the file's header."""
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
            some = rows[start : start + traces_at_once]
            packed = [pack_fixed(traces[row], self.config.packing, self.config.alternatives) for row in some]
            done.append(states_of(collate(packed)))
        tensors = {name: tensor.contiguous() for name, tensor in vars(StateBatch.joined(done)).items()}
        with atomic_path(self.file(shard)) as temporary:
            save_tensors({**tensors, "traces": self._digest_of_traces(shard)}, temporary)

    def map(self, shard: int) -> tuple[StateBatch, list[int]]:
        """The shard's tensors, mapped from the file, and where each trace begins and the last ends.

        The first read in this process checks the shard. Raises InputError naming a shard that is missing, damaged or of
        other traces.
        """
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
        """The features of one trace. Raises InputError for a missing shard."""
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
        """SHA-256 of the records, (32,) uint8. Another machine may generate other records under the same settings."""
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
    """The path, or its nearest parent that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
