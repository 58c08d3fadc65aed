"""The true acceptance and overlap of every token that a round could draft, for the informed bound.

The traces have them for the responses. For the tokens of the rollouts they come from one teacher-forced pass of both
models over the rollouts; an EAGLE-3 drafter's states there are stored, so that its language-model head is enough. The
result is stored beside the rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.acceptance import acceptance_probability, overlap
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.checksum import read_tensors, save_tensors
from accept_head.console import Progress
from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, writable_folder, write_json
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.proof import check_served
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.rollouts import RESPONSES, ROLLOUTS, feed_responses
from accept_head.pair import load_model
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import finished_config, read_shard

INFORMED_VERSION = 1
FOLDER_NAME, CONFIG_NAME = "informed", "informed_config.json"
CHUNK_ELEMENTS = 1 << 24  # logits of one forward: bounds memory, whatever the vocabulary


@dataclass(frozen=True, kw_only=True)
class InformedTables:
    """The truth for every token that a round could draft, in the order of `CoupledTraces.ids`: M tokens.

    acceptance: (M,) a(Y) = min(1, p(Y)/q(Y)). overlap: (M,) β = Σ min(p, q) of the distributions at Y. Both are 0
    beyond a rollout's length, and in rollouts from a token with a(Y) = 0, which an informed policy never drafts.
    """

    acceptance: Tensor
    overlap: Tensor


def informed_tables(
    traces: CoupledTraces, draft: PreTrainedModel, load_target: Callable[[], PreTrainedModel] | None = None
) -> InformedTables | None:
    """The tables of these traces. Missing ones are made with the target, which is loaded only then; None if some are
    missing and there is no target.

    Raises InputError when the folder cannot be written to, a file is damaged, or the decode loop does not support a
    model.
    """
    place = traces.shards[0][0].parents[1] / FOLDER_NAME
    rollouts = [read_tensors(path, ("position", "ids")) for path, *_ in traces.shards]
    wanted = {
        "traces": traces.config.fingerprint(),
        "target_fingerprint": traces.config.target_fingerprint,
        "draft_fingerprint": traces.config.draft_fingerprint,
        "k_max": rollouts[0]["ids"].shape[1] + 1,
        "version": INFORMED_VERSION,
    }
    paths = [place / path.name for path, *_ in traces.shards]
    usable = (place / CONFIG_NAME).is_file() and read_json(place / CONFIG_NAME) == wanted
    missing = [
        shard
        for shard, (path, part) in enumerate(zip(paths, rollouts, strict=True))
        if not usable or not _is_of(path, part["ids"])
    ]
    if missing and load_target is None:
        return None
    if missing and load_target is not None:
        writable_folder(place, "--traces")
        models = (load_target(), draft)
        check_served(models[0])
        if not isinstance(draft, Eagle3Drafter):  # of such a drafter the stored states are read: it runs no forward
            check_served(draft)
        if not usable:
            for old in place.glob("*.safetensors"):
                old.unlink()
            write_json(place / CONFIG_NAME, wanted)
        for shard in Progress(missing, unit="shard", desc="informed bound"):
            asked = rollouts[shard]
            if isinstance(draft, Eagle3Drafter):
                asked = asked | read_tensors(traces.shards[shard][0], ("hidden",))
            tables = ask_records(*models, _records(traces, shard), asked, traces.config)
            with atomic_path(paths[shard]) as temporary:
                save_tensors({**tables, "ids": rollouts[shard]["ids"]}, temporary)
    return _joined(traces, paths)


def target_loader(
    traces: Path, target: str | None, dtype: str = "auto", trust_remote_code: bool = False
) -> Callable[[], PreTrainedModel] | None:
    """A function that loads the target; None without a target. Raises InputError when the traces were made with another
    target."""
    if target is None:
        return None
    config = finished_config(traces)
    load: Callable[[], PreTrainedModel] = partial(
        load_model, target, "--target", dtype=dtype, trust_remote_code=trust_remote_code
    )
    if not Path(target).is_dir():  # a name on the Hub: its files are local only after loading
        model = load()
        load = lambda: model  # noqa: E731
    check_target(config, traces, checkpoint_fingerprint(target))
    return load


def check_target(config: TraceConfig, folder: Path, target_fingerprint: str) -> None:
    """Raises InputError when the traces were made with another target than the one with this fingerprint."""
    if config.target_fingerprint != target_fingerprint:
        raise InputError(
            f"{folder}: made by another pair (its target was {config.target}); --target must be that target"
        )


def _is_of(path: Path, ids: Tensor) -> bool:
    """Whether the file is a table of exactly these tokens. Rollouts made again on another machine can differ."""
    return path.is_file() and torch.equal(read_tensors(path, ("ids",))["ids"], ids)


def _records(traces: CoupledTraces, shard: int) -> dict[str, Any]:
    """All records of a shard, also unused ones, because its rollouts cover all of them."""
    config = traces.config
    return read_shard(traces.shards[shard][0].parents[1], config, shard).with_format("numpy")[:]


def _joined(traces: CoupledTraces, paths: list[Path]) -> InformedTables:
    records = traces.traces.with_format("numpy")
    whole = {}
    for name in ("acceptance", "overlap"):
        parts = [torch.from_numpy(np.concatenate(records[name][:]))]
        for path, (_, _, used) in zip(paths, traces.shards, strict=True):
            parts.append(read_tensors(path, (name,))[name][:used, : traces.k_max - 1].reshape(-1))
        whole[name] = torch.cat(parts)
    inside = torch.arange(traces.k_max - 1) < traces.rollout_lengths[:, None]
    known = torch.cat([torch.ones(traces.of_responses, dtype=torch.bool), inside.reshape(-1)])
    return InformedTables(**{name: torch.where(known, values, 0.0) for name, values in whole.items()})


@torch.no_grad()
def ask_records(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    records: dict[str, Any],
    rollouts: dict[str, Tensor],
    config: TraceConfig,
) -> dict[str, Tensor]:
    """a and β of the rollouts' tokens, {"acceptance", "overlap"}: (R, k_max − 1) each, on the CPU. Values beyond a
    rollout's length are arbitrary; those of rollouts from a token with a(Y) = 0 are 0. records: with the columns of
    accept_head.trace. rollouts: position and ids of these records, as in rollouts.py; of an EAGLE-3 drafter also
    hidden."""
    lengths = np.array([len(response) for response in records["response_ids"]])
    starts = np.cumsum([0, *lengths]) * (config.depths or 1)
    parts = []
    for first in range(0, len(lengths), RESPONSES):
        group = slice(first, first + RESPONSES)
        low, high = starts[first], starts[min(first + RESPONSES, len(lengths))]
        mine = (rollouts["position"] >= low) & (rollouts["position"] < high)
        part = {name: values[mine] for name, values in rollouts.items()}
        columns = {name: values[group] for name, values in records.items()}
        parts.append(_ask_group(target, draft, columns, part | {"position": part["position"] - low}, config))
    return dict(zip(("acceptance", "overlap"), torch.cat(parts, dim=1).contiguous(), strict=True))


def _ask_group(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    group: dict[str, Any],
    rollouts: dict[str, Tensor],
    config: TraceConfig,
) -> Tensor:
    """(2, rollouts, k_max − 1), a and β. A model is fed the responses once. Each rollout continues a copy of its row,
    with the rejected token first; its last token is not fed."""
    position, ids = rollouts["position"], rollouts["ids"].long()
    lengths = torch.tensor([len(response) for response in group["response_ids"]])
    step = torch.cat([torch.arange(n) for n in lengths.tolist()])[position // (config.depths or 1)]
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[position // (config.depths or 1)]
    places = torch.tensor([len(prompt) for prompt in group["prompt_ids"]])[row] + step
    rejected, acceptance = (torch.from_numpy(np.concatenate(group[n]))[position] for n in ("draft_ids", "acceptance"))
    fed = torch.cat([rejected.long()[:, None], ids[:, :-1]], dim=-1)
    truth = torch.zeros(2, *ids.shape)
    asked = torch.where(acceptance > 0)[0]
    if not len(asked):
        return truth
    of_target = feed_responses(target, group, ids.shape[1] + 1)[0]
    of_draft = None if isinstance(draft, Eagle3Drafter) else feed_responses(draft, group, ids.shape[1] + 1)[0]
    for chunk in asked.split(max(1, min(ROLLOUTS, CHUNK_ELEMENTS // (ids.shape[1] * config.vocab_size)))):
        p = _distributions(of_target, row[chunk], fed[chunk], places[chunk], config)
        if isinstance(draft, Eagle3Drafter):
            logits = draft.spread(draft.lm_head(rollouts["hidden"][chunk].to(draft.device, draft.dtype)))
            q = config.sampling.probabilities(logits[..., : config.vocab_size])
        else:
            assert of_draft is not None
            q = _distributions(of_draft, row[chunk], fed[chunk], places[chunk], config)
        truth[0, chunk] = acceptance_probability(p, q, ids[chunk].to(p.device)).cpu()
        truth[1, chunk] = overlap(p, q).cpu()
    return truth


def _distributions(trunk: CachedModel, row: Tensor, fed: Tensor, places: Tensor, config: TraceConfig) -> Tensor:
    """The distributions after each fed token, (rollouts, k_max − 1, vocab). row: (rollouts,) the trunk row that each
    continues. places: (rollouts,) the place of its first token."""
    device = trunk.model.device
    logits = trunk.copy(row.to(device)).forward(fed.to(device), places.to(device), int(places.max())).logits
    return config.sampling.probabilities(logits[..., : config.vocab_size])
