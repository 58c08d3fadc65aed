"""Rollouts: the tokens that the draft would draw after each rejection, computed once and stored beside the traces.

A coupled trace has the tokens that a round drafts up to its first rejection. The tokens after it are discarded, but
they take time, and the policy's decision to stop depends on them. So the draft is rolled out from every rejected
position to the longest possible round. The hidden states of both parts are kept, so that any head can be replayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.checksum import save_tensors
from accept_head.console import Progress
from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, writable_folder, write_json
from accept_head.inference.engine.cache import CachedModel, Group
from accept_head.inference.engine.proof import check_served
from accept_head.pair import context_tokens, hidden_size
from accept_head.randomness import TraceStream, uniforms
from accept_head.sampling import Sampling, draw, likeliest
from accept_head.signals import SIGNALS, draft_signals
from accept_head.trace.config import TraceConfig

ROLLOUT_VERSION = 1
FOLDER_NAME, CONFIG_NAME = "rollouts", "rollout_config.json"
RESPONSES, ROLLOUTS = 16, 128  # batch sizes; as in collect, a rollout does not depend on the others in its batch


def roll_out(
    draft: PreTrainedModel, folder: Path, config: TraceConfig, traces: Any, *, k_max: int, shards: int
) -> list[Path]:
    """Make the missing rollouts of the first `shards` trace shards → their files, in order.

    traces: from `read_traces` of `folder`. Existing rollouts with at least this k_max are reused. Raises InputError
    when the folder cannot be written to, or when the decode loop does not support the draft.
    """
    check_served(draft)
    place = folder / FOLDER_NAME
    wanted = _config(config, str(draft.dtype).removeprefix("torch."), k_max)
    there = read_json(place / CONFIG_NAME) if (place / CONFIG_NAME).is_file() else {}
    longest: int = there.get("k_max", 0)
    usable = type(longest) is int and longest >= k_max and {**there, "k_max": k_max} == wanted
    paths = [rollout_path(folder, shard) for shard in range(shards)]
    missing = [shard for shard, path in enumerate(paths) if not usable or not path.is_file()]
    if missing:
        writable_folder(place, "--traces")
    if not usable:
        for old in place.glob("*.safetensors"):
            old.unlink()
        write_json(place / CONFIG_NAME, wanted)
        longest = k_max
    for shard in Progress(missing, unit="shard", desc="rollouts", disable=not missing):
        first = shard * config.shard_size
        records = traces.with_format("numpy")[first : first + config.shard_rows(shard)]
        with atomic_path(paths[shard]) as temporary:
            save_tensors(roll_out_records(draft, records, config, longest), temporary)
    return paths


def begin_rollouts(folder: Path, config: TraceConfig) -> None:
    """Record what the rollouts are of that are collected together with traces (`TraceConfig.depths`)."""
    assert config.depths is not None
    place = writable_folder(folder / FOLDER_NAME)
    write_json(place / CONFIG_NAME, _config(config, config.dtype or "", config.depths))


def collected_rollouts(folder: Path, config: TraceConfig, shards: int) -> list[Path]:
    """The rollouts that were collected with the first `shards` trace shards. Raises InputError naming a missing one."""
    paths = [rollout_path(folder, shard) for shard in range(shards)]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: is missing; its traces were collected with it, so collect them again")
    return paths


def rollout_path(folder: Path, shard: int) -> Path:
    return folder / FOLDER_NAME / f"shard-{shard:05d}.safetensors"


def _config(config: TraceConfig, dtype: str, k_max: int) -> dict[str, Any]:
    return {
        "traces": config.fingerprint(),
        "draft_fingerprint": config.draft_fingerprint,
        "dtype": dtype,
        "k_max": k_max,
        "version": ROLLOUT_VERSION,
    }


@torch.no_grad()
def roll_out_records(
    draft: PreTrainedModel, records: dict[str, Any], config: TraceConfig, k_max: int
) -> dict[str, Tensor]:
    """Rollouts of a table of traces with the columns of accept_head.trace, on the CPU. With P positions, R rejected:

    fed_hidden: (P, hidden), the state that Y_i was drawn from.
    position: (R,), which of the P positions a rollout follows. length: (R,), its number of tokens, at most k_max - 1;
        fewer at the end of the response's budget or after an end token.
    ids, logprob, entropy, max_prob: (R, k_max - 1), its tokens and their signals.
    hidden: (R, k_max - 1, hidden), the state that each of its tokens was drawn from.
    """
    count = len(records["prompt_ids"])
    groups = [
        {name: values[first : first + RESPONSES] for name, values in records.items()}
        for first in range(0, count, RESPONSES)
    ]
    parts = [_roll_out_group(draft, group, config, k_max) for group in groups]
    starts = np.cumsum([0, *(len(part["fed_hidden"]) for part in parts)])
    for part, start in zip(parts, starts[:-1], strict=True):
        part["position"] += int(start)
    return {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}


def feed_responses(model: PreTrainedModel, group: dict[str, Any], k_max: int) -> tuple[CachedModel, Tensor]:
    """A cache with one row a response, with its prompt, and room for a round after it. Also its hidden states.

    Rows with a spent budget are fed beside the others, but not beyond the model's context.
    """
    ids = [
        torch.from_numpy(np.concatenate(pair)) for pair in zip(group["prompt_ids"], group["response_ids"], strict=True)
    ]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).long().to(model.device)
    trunk = CachedModel(model, len(ids), min(padded.shape[1] + k_max, context_tokens(model)))
    spans = torch.tensor([(row, 0, padded.shape[1]) for row in range(len(ids))], device=model.device)
    return trunk, trunk.fill_group(padded, Group(spans, padded.shape[1], 0))


def _roll_out_group(
    draft: PreTrainedModel, group: dict[str, Any], config: TraceConfig, k_max: int
) -> dict[str, Tensor]:
    """Feed the prefixes once, one row a response. Each rollout then continues a copy of its row from the rejected
    position; a ragged cache needs no rewind for that."""
    device = draft.device
    prompts = torch.tensor([len(prompt) for prompt in group["prompt_ids"]])
    lengths = torch.tensor([len(response) for response in group["response_ids"]])
    trunk, states = feed_responses(draft, group, k_max)
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    step = torch.cat([torch.arange(n) for n in lengths.tolist()])
    fed = states[row, prompts[row] - 1 + step]

    # The target emits a response's last token itself, so position max_new_tokens - 1 is never drafted.
    accepted = torch.from_numpy(np.concatenate(group["accepted"]))
    position = torch.where(~accepted & (step < config.max_new_tokens - 1))[0]
    row, step = row[position], step[position]
    budget = (config.max_new_tokens - 2 - step).clamp(max=k_max - 1)
    drawn = torch.from_numpy(np.concatenate(group["draft_ids"])).long()[position]
    index = torch.from_numpy(np.asarray(group["index"]))[row]
    parts = [
        _continue(trunk.copy(r), i.to(device), p.to(device), b.to(device), n, s, config, k_max)
        for r, i, p, b, n, s in zip(
            *(t.split(ROLLOUTS) for t in (row, drawn, prompts[row] + step, budget, index, step)), strict=True
        )
    ]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}  # one empty part, if none
    return {"fed_hidden": fed.cpu(), "position": position, **joined}


def _continue(
    model: CachedModel,
    token_ids: Tensor,
    places: Tensor,
    budget: Tensor,
    index: Tensor,
    step: Tensor,
    config: TraceConfig,
    k_max: int,
) -> dict[str, Tensor]:
    """Feed each row's rejected token, (rows,), at its place and draw up to `budget` tokens. index, step: prompt and
    position of each row, which select its random numbers."""
    ends = torch.tensor(config.end_token_ids, dtype=torch.long, device=token_ids.device)
    rows, slots = len(token_ids), k_max - 1
    random = uniforms(config.seed, index[:, None], step[:, None], TraceStream.ROLLOUT, torch.arange(slots)).to(
        token_ids.device
    )
    draft = model.model
    ids = torch.zeros(rows, slots, dtype=torch.int32, device=token_ids.device)
    signals = torch.zeros(rows, slots, len(SIGNALS), device=token_ids.device)
    hidden = torch.zeros(rows, slots, hidden_size(draft), dtype=draft.dtype, device=token_ids.device)
    active, length = torch.ones_like(budget, dtype=torch.bool), torch.zeros_like(budget)
    longest, most = (int(places.max()), int(budget.max())) if rows else (0, 0)
    for slot in range(most):
        active = active & (slot < budget) & ~torch.isin(token_ids, ends)
        output = model.forward(token_ids[:, None], places + slot, longest + slot)
        hidden[:, slot] = output.hidden[:, 0]
        token_ids, signals[:, slot] = draw_with_signals(
            output.logits[:, 0, : config.vocab_size], random[:, slot], config.sampling
        )
        ids[:, slot] = token_ids
        length += active
    logprob, entropy, max_prob = signals.unbind(-1)
    tables = {"length": length, "ids": ids, "hidden": hidden}
    tables |= {"logprob": logprob, "entropy": entropy, "max_prob": max_prob}
    return {name: table.cpu() for name, table in tables.items()}


def draw_with_signals(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw as the decode loop does → ids (rows,) and draft signals (rows, 3). logits: (rows, vocab)."""
    if sampling.greedy:
        ids = likeliest(logits)
        return ids, draft_signals(logits.float().softmax(-1), ids)
    q = sampling.probabilities(logits)
    ids = draw(q, uniform)
    return ids, draft_signals(q, ids)
