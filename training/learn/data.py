"""Traces as batches. An optimizer step has the same traces for any number of processes and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from datasets import Dataset as TraceDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from accept_head.errors import InputError
from accept_head.randomness import TraceStream, uniforms
from accept_head.training.learn.batches import DraftBatch, Packed, StateBatch, collate
from accept_head.training.learn.depth_states import DepthStates
from accept_head.training.learn.feature_cache import FeatureCache
from accept_head.training.learn.mixing import Packing, pack_fixed, pack_mixed
from accept_head.training.learn.trace_tensors import TraceTensors
from accept_head.training.threads import ReadAhead, Threads


class PackedTraces(Dataset):
    """Traces as draft inputs. An item is (epoch, row), because token mixing draws a new mask in each epoch."""

    def __init__(self, traces: TraceDataset, packing: Packing, *, r: float, seed: int, alternatives: int = 0):
        self.traces, self.records = traces, TraceTensors(traces)
        self.packing, self.r, self.seed, self.alternatives = packing, r, seed, alternatives

    def __len__(self) -> int:
        return len(self.traces)

    def __getitem__(self, item: tuple[int, int]) -> Packed:
        epoch, row = item
        trace = self.records[row]
        if self.packing != "mixing":
            return pack_fixed(trace, self.packing, self.alternatives)
        steps = torch.arange(len(trace["response_ids"]))
        return pack_mixed(trace, uniforms(self.seed, trace["index"], steps, TraceStream.MIXING, epoch), self.r)


class CachedTraces(Dataset):
    """Traces with the draft's states, from files. Items as in PackedTraces, the same in every epoch."""

    def __init__(self, traces: TraceDataset, cache: FeatureCache | DepthStates):
        columns = traces.with_format("numpy")
        self.places = np.stack([columns[name][:] for name in ("folder", "index")], axis=-1).tolist()
        self.cache = cache

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, item: tuple[int, int]) -> StateBatch:
        _, row = item
        folder, index = self.places[row]
        return self.cache.folders[folder].trace(index)


def labelled_places(
    traces: TraceDataset,
    packing: Packing,
    axes: Sequence[int],
    *,
    alternatives: int = 0,
    states: DepthStates | None = None,
) -> Iterator[StateBatch]:
    """The places of one trace after the other where one of LABELS[axes] counts. Without `states`, they have none."""
    if states is not None:
        stored = CachedTraces(traces, states)
        yield from (stored[0, row] for row in range(len(stored)))
        return
    packed = PackedTraces(traces, packing, r=0, seed=0, alternatives=alternatives)
    for row in range(len(packed)):
        batch = collate([packed[0, row]])
        yield batch.at(torch.zeros(*batch.input_ids.shape, 0), axes)


class StepSampler(Sampler[list[tuple[int, int]]]):
    """Yields this rank's micro-batches of every optimizer step from `first_step` on, over all epochs.

    Step s of an epoch is a slice of `batch_size` traces of that epoch's permutation. Rank r takes every world-th of it.
    So a step has the same traces for any number of processes.
    """

    def __init__(
        self, traces: int, *, epochs: int, batch_size: int, micro_batch_size: int, seed: int, rank: int, world: int
    ):
        self.traces, self.epochs, self.batch_size = traces, epochs, batch_size
        self.micro_batch_size = max(1, min(micro_batch_size, batch_size // world))
        self.seed, self.rank, self.world = seed, rank, world
        self.first_step = 0
        if batch_size % world or batch_size // world % self.micro_batch_size:
            raise InputError(
                f"batch_size is {batch_size}, expected a multiple of {world} (processes) x {self.micro_batch_size} "
                "(micro_batch_size)"
            )
        if traces < batch_size:
            raise InputError(f"batch_size is {batch_size}, but there are only {traces} traces to train on")

    @property
    def accumulate(self) -> int:
        """Micro-batches of this rank in one optimizer step."""
        return self.batch_size // (self.world * self.micro_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return self.traces // self.batch_size

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def __len__(self) -> int:
        return self.total_steps * self.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first_step, self.total_steps):
            epoch, place = divmod(step, self.steps_per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(self.traces, generator=generator)
            chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
            mine = [(epoch, int(row)) for row in chosen[self.rank :: self.world]]
            for start in range(0, len(mine), self.micro_batch_size):
                yield mine[start : start + self.micro_batch_size]


class TraceData(L.LightningDataModule):
    """Training batches by StepSampler, and dev batches, which have each trace on one rank and never use token mixing.

    With a cache, the draft runs only in `setup`, on traces that the cache lacks, and batches are StateBatches. Without
    a cache but with several threads, one thread runs the draft a batch ahead, and training batches are StateBatches.
    Traces with depths have their states beside them; these take the place of the cache.
    """

    def __init__(
        self,
        train: TraceDataset,
        dev: TraceDataset,
        *,
        packing: Packing,
        r: float,
        epochs: int,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        alternatives: int = 0,
        workers: int = 0,
        cache: FeatureCache | DepthStates | None = None,
        threads: Threads | None = None,
    ):
        super().__init__()
        self.cache, self.threads = cache, threads or Threads()
        self.train = PackedTraces(train, packing, r=r, seed=seed, alternatives=alternatives)
        self.dev = PackedTraces(dev, "prefix" if packing == "prefix" else "exact", r=r, seed=seed)
        self.sampler_options: dict[str, Any] = {
            "epochs": epochs,
            "batch_size": batch_size,
            "micro_batch_size": micro_batch_size,
            "seed": seed,
        }
        self.micro_batch_size, self.workers = micro_batch_size, workers
        self.first_step = 0

    def setup(self, stage: str) -> None:
        """Complete the cache: each rank checks its share of the existing shards, and writes its share of the rest."""
        if self.cache is None:
            return
        assert self.trainer is not None
        self.cache.complete(
            lambda batch: self._read(batch).to(torch.device("cpu")),
            traces_at_once=self.micro_batch_size,
            rank=self.trainer.global_rank,
            world=self.trainer.world_size,
        )
        self.trainer.strategy.barrier("features")

    def some_states(self, most: int) -> Iterator[Tensor]:
        """The states, (n, hidden_size) each, of at most `most` training traces, spread over all of them."""
        rows = [(0, row) for row in range(0, len(self.train), -(-len(self.train) // most))]
        for batch in self._loader(self.train, sampler=rows, batch_size=self.micro_batch_size):
            yield self._read(batch).hidden

    def _read(self, batch: DraftBatch | StateBatch) -> StateBatch:
        """The batch with the draft's states. May run in any thread."""
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        with self.trainer.precision_plugin.forward_context():
            states: StateBatch = module.read(batch.to(self.trainer.strategy.root_device))
        return states

    def sampler(self, rank: int, world: int) -> StepSampler:
        return StepSampler(len(self.train), **self.sampler_options, rank=rank, world=world)

    def train_dataloader(self) -> DataLoader | ReadAhead:
        assert self.trainer is not None
        sampler = self.sampler(self.trainer.global_rank, self.trainer.world_size)
        sampler.first_step = self.first_step
        loader = self._loader(self.train, batch_sampler=sampler)
        reads_ahead = self.threads.count > 1 and self.cache is None
        return ReadAhead(loader, self._read, self.threads) if reads_ahead else loader

    def val_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        rows = [(0, row) for row in range(self.trainer.global_rank, len(self.dev), self.trainer.world_size)]
        return self._loader(self.dev, sampler=rows, batch_size=self.micro_batch_size)

    def _loader(self, packed: PackedTraces, **order: Any) -> DataLoader:
        if self.cache is None:
            return DataLoader(packed, collate_fn=collate, num_workers=self.workers, **order)
        cached = CachedTraces(packed.traces, self.cache)
        return DataLoader(cached, collate_fn=StateBatch.joined, num_workers=self.workers, **order)

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"first_step": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first_step = state_dict["first_step"]

    def transfer_batch_to_device(
        self, batch: DraftBatch | StateBatch, device: torch.device, dataloader_idx: int
    ) -> DraftBatch | StateBatch:
        return batch.to(device)
