"""What heads learn of a drafter that reads the target's states: from traces with depths, whose states are beside them.

Each position of a response is there once for every depth, of the round that began so many tokens before. A round gets
to a depth only if the tokens before were accepted, so a label counts with the chance of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accept_head.checksum import read_tensors
from accept_head.errors import InputError
from accept_head.inference.replay.rollouts import collected_rollouts
from accept_head.signals import SIGNALS
from accept_head.training.learn.batches import DraftBatch, Places, StateBatch
from accept_head.training.learn.splits import Part
from accept_head.training.learn.trace_tensors import TraceTensors


class DepthStates:
    """The places of all folders of traces with depths, as FeatureCache: but nothing has to be computed."""

    def __init__(self, parts: Sequence[Part]):
        """parts: Splits.parts. Raises InputError naming a file of states that is missing."""
        self.folders = [FolderStates(part) for part in parts]

    def complete(
        self, states_of: Callable[[DraftBatch], StateBatch], *, traces_at_once: int, rank: int = 0, world: int = 1
    ) -> None:
        """Nothing to do: `collect` wrote the states."""


class FolderStates:
    """The places of one folder of traces."""

    def __init__(self, part: Part):
        assert part.config.depths is not None
        self.depths, self.shard_size = part.config.depths, part.config.shard_size
        self.paths = collected_rollouts(part.folder, part.config, part.config.num_shards)
        self.records = TraceTensors(part.traces)
        lengths = torch.tensor([len(ids) for ids in part.traces["response_ids"]])
        self.starts = [[0, *(some * self.depths).cumsum(0).tolist()] for some in lengths.split(self.shard_size)]
        self.read: dict[int, Tensor] = {}  # shard → the states of its places

    def trace(self, index: int) -> StateBatch:
        """The places of one trace that a round can reach. Raises InputError for a damaged file."""
        shard, place = divmod(index, self.shard_size)
        first, last = self.starts[shard][place : place + 2]
        places = places_by_depth(self.records[index], self.depths)
        used = (places.weights > 0).any(-1)
        return StateBatch(
            **{name: value[used] for name, value in vars(places).items()},
            hidden=self._states(shard)[first:last][used],
            counts=used.sum()[None],
            indices=torch.tensor([index]),
        )

    def _states(self, shard: int) -> Tensor:
        if shard not in self.read:
            states = read_tensors(self.paths[shard], ["fed_hidden"])["fed_hidden"]
            if len(states) != self.starts[shard][-1]:
                raise InputError(f"{self.paths[shard]}: was not made with the traces beside it; collect them again")
            self.read[shard] = states
        return self.read[shard]


def places_by_depth(trace: dict[str, Tensor], depths: int) -> Places:
    """The places of a trace with depths, (n × depths, …): position after position, with all depths of each.

    The label `after` is of the same round's next depth. Rounds are taken to begin at all positions equally often.
    """
    acceptance, overlap, accepted = (trace[name].view(-1, depths) for name in ("acceptance", "overlap", "accepted"))
    reached = chance_of_reaching(overlap)
    after, goes_on = torch.zeros_like(overlap), torch.zeros_like(accepted)
    after[:-1, :-1] = overlap[1:, 1:]
    goes_on[:-1, :-1] = (accepted & (acceptance > 0))[:-1, :-1]
    labels = torch.stack([acceptance, overlap, after], dim=-1)
    weights = torch.stack([reached, reached, reached * goes_on], dim=-1)
    count = acceptance.numel()
    return Places(
        labels=labels.flatten(0, 1),
        weights=weights.flatten(0, 1),
        signals=torch.stack([trace[name] for name in SIGNALS], dim=-1),
        drawn_ids=trace["draft_ids"],
        alternative_ids=torch.zeros(count, 0, dtype=torch.long),
        alternatives=torch.zeros(count, 0, 2),
    )


def chance_of_reaching(overlap: Tensor) -> Tensor:
    """(n, depths): the chance that a round accepts all tokens before this depth, Π overlap; 0 where no round begins.

    overlap: (n, depths). Depth d at position i is of the round that began at position i − d + 1.
    """
    chance = torch.zeros_like(overlap)
    chance[:, 0] = 1
    for depth in range(1, overlap.shape[1]):
        chance[1:, depth] = chance[:-1, depth - 1] * overlap[:-1, depth - 1]
    return chance
