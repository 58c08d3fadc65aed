"""Coupled traces with their rollouts, as flat tables of every token that any round could draft, and every round's path.

A round that starts at position s drafts the accepted tokens Y_s, Y_{s+1}, …, then the first rejected one, then the
rollout from there. So the tokens of all rounds are the P positions of all responses and the tokens of the R rollouts,
and a round is a path through them. A drafter that reads the target's states says something else at each depth of a
round, so each of its positions has `depths` tokens: the path of a round goes from depth to depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.checksum import read_tensors
from accept_head.errors import InputError
from accept_head.inference.replay.depths import leading_accepted
from accept_head.inference.replay.rollouts import collected_rollouts, roll_out
from accept_head.pair import context_tokens
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.trace.config import TraceConfig, check_coupled, check_made_by
from accept_head.trace.shards import read_traces
from accept_head.trace.values import check_context

LONGEST = 20  # default k_max of the rollouts
SMALL = ("position", "length", "ids", "logprob", "entropy", "max_prob")  # tensors of a rollout shard kept in memory


@dataclass(frozen=True, kw_only=True)
class CoupledTraces:
    """n responses with P positions in all, R rollouts, rounds of at most k_max, M = P·depths + R·(k_max − 1) tokens.

    depths: 1 for a draft model. Token i·depths + d is Y at position i, at depth d + 1 of a round; those after P·depths
    belong to the rollouts, one rollout after the other. All tensors are on the CPU.

    lengths, starts: (n,) number of tokens of each response, and its first position.
    path: (P, k_max) the token that a round from this position drafts at each depth; M where there is none.
    drafts: (P,) the most tokens that a round from here can draft: up to the response's budget or an end token.
    leading: (P,) how many of them are accepted before the first rejection.
    ids, logprob, entropy, max_prob: (M,) of each token. rejected: (R,) the token that each rollout follows.
    rollout_lengths: (R,) number of tokens of each rollout.
    shards: files of hidden states, with the number of positions' tokens and of rollouts used from each.
    """

    config: TraceConfig
    traces: Any  # the records, a data set of length n
    k_max: int
    lengths: Tensor
    starts: Tensor
    path: Tensor
    drafts: Tensor
    leading: Tensor
    ids: Tensor
    logprob: Tensor
    entropy: Tensor
    max_prob: Tensor
    rejected: Tensor
    rollout_lengths: Tensor
    shards: tuple[tuple[Path, int, int], ...]

    @property
    def positions(self) -> int:
        return len(self.drafts)

    @property
    def depths(self) -> int:
        return self.config.depths or 1

    @property
    def of_responses(self) -> int:
        """Number of tokens before those of the rollouts."""
        return self.positions * self.depths

    @property
    def following(self) -> int:
        """From an accepted token to the next one of its round."""
        return 1 if self.depths == 1 else self.depths + 1

    def tokens_of(self, starts: Tensor, depth: Tensor) -> Tensor:
        """The tokens at a depth, 0 the first, of rounds from these positions, as long as all before are accepted."""
        return starts * self.depths + depth * self.following

    @property
    def domains(self) -> list[str]:
        """The domain of each response."""
        return list(self.traces["domain"])

    def hidden(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yields (tokens, rollouts, fed, hidden) of each shard. fed: (tokens, hidden) the state that each token of its
        positions was drawn from. hidden: (rollouts, k_max − 1, hidden) the same for each rollout's tokens."""
        position = rollout = 0
        for path, positions, rollouts in self.shards:
            tensors = read_tensors(path, ("fed_hidden", "hidden"))
            yield (
                slice(position, position + positions),
                slice(rollout, rollout + rollouts),
                tensors["fed_hidden"][:positions],
                tensors["hidden"][:rollouts, : self.k_max - 1],
            )
            position, rollout = position + positions, rollout + rollouts


def load_coupled(
    folder: Path,
    draft: PreTrainedModel,
    draft_fingerprint: str,
    *,
    k_max: int = LONGEST,
    max_prompts: int | None = None,
) -> CoupledTraces:
    """Read traces and their rollouts; missing rollouts are made. k_max: the longest round; of traces with depths it is
    their number. max_prompts: use only the first so many.

    Raises InputError when the traces are damaged, made with another draft, made of scored text (`collect --responses`),
    or have no response.
    """
    if k_max < 2:
        raise InputError(f"k_max is {k_max}, expected at least 2")
    config, traces = read_traces(folder)
    check_made_by(config, folder, draft_fingerprint=draft_fingerprint)
    check_coupled(config, folder)
    check_context(folder, traces, context_tokens(draft))
    count = min(max_prompts or len(traces), len(traces))
    shards = -(-count // config.shard_size)
    if config.depths is None:
        paths = roll_out(draft, folder, config, traces, k_max=k_max, shards=shards)
    else:
        paths, k_max = collected_rollouts(folder, config, shards), config.depths
    return couple(config, traces.select(range(count)), paths, k_max)


def couple(config: TraceConfig, traces: Any, paths: list[Path], k_max: int) -> CoupledTraces:
    """The tables of `traces`, the first records of a folder. paths: the rollouts of its first shards."""
    read = [name for name in traces.column_names if name not in ALTERNATIVE_COLUMNS]  # only training reads those
    records = traces.select_columns(read).with_format("numpy")[:]
    lengths = np.array([len(ids) for ids in records["response_ids"]])
    starts = np.cumsum([0, *lengths[:-1]])
    flat = {name: np.concatenate(records[name]) for name in ("accepted", "draft_ids")}
    flat |= {name: np.concatenate(records[f"draft_{name}"]) for name in ("logprob", "entropy", "max_prob")}
    rollouts, shards = _read_shards(paths, config, lengths, k_max)
    off = {name: rollouts[name].reshape(-1) for name in ("ids", "logprob", "entropy", "max_prob")}
    path, drafts, leading = _paths(flat["accepted"], starts, lengths, rollouts, config, k_max)
    return CoupledTraces(
        config=config,
        traces=traces,
        k_max=k_max,
        lengths=torch.from_numpy(lengths),
        starts=torch.from_numpy(starts),
        path=torch.from_numpy(path),
        drafts=torch.from_numpy(drafts),
        leading=torch.from_numpy(leading),
        ids=torch.cat([torch.from_numpy(flat["draft_ids"]).int(), off["ids"]]),
        logprob=torch.cat([torch.from_numpy(flat["logprob"]), off["logprob"]]),
        entropy=torch.cat([torch.from_numpy(flat["entropy"]), off["entropy"]]),
        max_prob=torch.cat([torch.from_numpy(flat["max_prob"]), off["max_prob"]]),
        rejected=rollouts["position"],
        rollout_lengths=rollouts["length"],
        shards=shards,
    )


def _read_shards(
    paths: list[Path], config: TraceConfig, lengths: np.ndarray, k_max: int
) -> tuple[dict[str, Tensor], tuple[tuple[Path, int, int], ...]]:
    """The small tables of all rollouts, with `position` counted over all shards, and the used part of each shard."""
    parts, shards, first = [], [], 0
    for number, path in enumerate(paths):
        mine = lengths[number * config.shard_size : (number + 1) * config.shard_size]
        positions = int(mine.sum()) * (config.depths or 1)
        part = read_tensors(path, SMALL)
        used = int((part["position"] < positions).sum())  # they are in order
        part = {name: tensor[:used] for name, tensor in part.items()}
        part |= {name: part[name][:, : k_max - 1] for name in ("ids", "logprob", "entropy", "max_prob")}
        part["position"] = part["position"] + first
        part["length"] = part["length"].clamp(max=k_max - 1)
        parts.append(part)
        shards.append((path, positions, used))
        first += positions
    return {name: torch.cat([part[name] for part in parts]) for name in SMALL}, tuple(shards)


def _paths(
    accepted: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    rollouts: dict[str, Tensor],
    config: TraceConfig,
    k_max: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(path, drafts, leading) as CoupledTraces has them. accepted: (P·depths,)"""
    depths = config.depths or 1
    count = len(accepted) // depths
    here, depth = np.arange(count), np.arange(k_max)
    # The last position that a round can draft is the response's last. But the last token of the budget is the target's.
    last = np.repeat(starts + np.minimum(lengths, config.max_new_tokens - 1) - 1, lengths)
    leading, rejects = _leading(accepted, last) if depths == 1 else _leading_by_depth(accepted, last, depths)
    following = 1 if depths == 1 else depths + 1
    # The token after the accepted ones, which is rejected where the round has one.
    inside = np.minimum(here * depths + leading * following, len(accepted) - 1)
    rollout = np.zeros(len(accepted), dtype=np.int64)  # of each rejected token
    position, length = rollouts["position"].numpy(), rollouts["length"].numpy()
    rollout[position] = np.arange(len(position))
    beyond = np.zeros(len(accepted), dtype=np.int64)
    beyond[position] = length + 1  # the rejected token itself, and its rollout
    drafts = np.minimum(leading + np.where(rejects, beyond[inside], 0), k_max)

    off = depth - leading[:, None] - 1  # place in the rollout
    path = np.where(
        off < 0,
        here[:, None] * depths + depth * following,
        len(accepted) + rollout[inside][:, None] * (k_max - 1) + off,
    )
    tokens = len(accepted) + len(position) * (k_max - 1)
    return np.where(depth < drafts[:, None], path, tokens), drafts, leading


def _leading(accepted: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P,) how many tokens of a round are accepted before the first rejection, and whether there is one."""
    count = len(accepted)
    here = np.arange(count)
    rejected = np.where(accepted, count, here)
    stop = np.minimum.accumulate(rejected[::-1])[::-1]  # the next rejected position, maybe of a later response
    rejects = stop <= last
    return np.where(rejects, stop, last + 1) - here, rejects


def _leading_by_depth(accepted: np.ndarray, last: np.ndarray, depths: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of rounds of at most `depths` tokens."""
    by_depth = torch.from_numpy(accepted).view(-1, depths)
    leading = leading_accepted(by_depth, torch.from_numpy(last)).numpy()
    return leading, leading < np.minimum(last - np.arange(len(leading)) + 1, depths)
