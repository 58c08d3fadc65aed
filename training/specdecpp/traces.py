"""Their data as traces. The columns that the data lack are computed by the models that made the data.

The data hold the target's responses, the tokens that the draft drew along them, and the acceptance probability of each.
The draft signals need a forward of the draft. The overlap, the target's log-probability and the divergence need a
forward of both models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.acceptance import acceptance_probability, divergence, overlap
from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.console import Progress
from accept_head.errors import InputError
from accept_head.files import sha256
from accept_head.pair import (
    check_same_vocabulary,
    context_tokens,
    end_ids,
    hub_revision,
    load_model,
    load_pair,
    load_tokenizer,
    output_size,
    vocabulary_fingerprint,
)
from accept_head.prompts import Prompt, prompts_fingerprint
from accept_head.sampling import Sampling
from accept_head.signals import SIGNALS, draft_signals
from accept_head.trace.config import IMPORTED, UNSCORED, TraceConfig
from accept_head.trace.shards import missing_shards, write_shard
from accept_head.training.collect.collector import prepare_folder
from accept_head.training.specdecpp.records import Record, read_records

OF_TARGET = ("overlap", "target_logprob", "divergence")
CHUNK = 256  # positions whose probabilities are computed at once
CHECKED_RECORDS = 8  # compared with the models before anything is written
# Largest mean difference between the file and these models, over positions. Half-precision forwards differ by about a
# tenth of either, other models by several times as much.
FAR_PROBABILITY, FAR_LOGPROB = 0.1, 0.5


def import_records(data: Path, pair: DataPair, sampling: Sampling, out: Path, *, shard_size: int) -> TraceConfig:
    """Write the traces of a data file to a folder, or continue an interrupted import.

    Raises InputError when the data come from another pair or sampling, or when the folder holds other traces.
    """
    records = read_records(data, pair.vocab_size)
    pair.check_lengths(records, str(data))
    config = pair.trace_config(records, sampling, shard_size, sha256(data.read_bytes()))
    pair.check_made_by(records[:CHECKED_RECORDS], sampling, str(data))
    folder = prepare_folder(out, config)
    progress = Progress(unit="record", desc="import", smoothing=0.1)
    for shard in missing_shards(folder, config):
        first = shard * shard_size
        rows = []
        for index in range(first, first + config.shard_rows(shard)):
            rows.append(_trace(records[index], index, pair.columns(records[index], sampling), config))
            progress.update()
        write_shard(folder, shard, rows)
    progress.close()
    return config


@dataclass(frozen=True)
class DataPair:
    """The pair that made the data. target: None when it is not used. vocab_size: number of ids that are scored."""

    names: tuple[str, str]  # target, draft
    target: PreTrainedModel | None
    draft: PreTrainedModel
    tokenizer: Any
    vocab_size: int

    @classmethod
    def load(
        cls, target: str, draft: str, score: bool, dtype: str, device_map: str | None, trust_remote_code: bool
    ) -> DataPair:
        if score:
            pair = load_pair(target, draft, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
            return cls((target, draft), pair.target, pair.draft, pair.tokenizer, pair.vocab_size)
        tokenizers = [load_tokenizer(target, "--target", trust_remote_code)]
        tokenizers.append(load_tokenizer(draft, "--draft", trust_remote_code))
        check_same_vocabulary(*tokenizers)
        model = load_model(draft, "--draft", dtype=dtype, trust_remote_code=trust_remote_code)
        return cls((target, draft), None, model, tokenizers[0], output_size(model))

    def check_lengths(self, records: Sequence[Record], source: str) -> None:
        """Raises InputError naming the first record that is longer than a model's context."""
        room = min(context_tokens(model) for model in (self.draft, self.target) if model is not None)
        for place, record in enumerate(records):
            if (length := len(record.prompt_ids) + len(record.response_ids)) > room:
                raise InputError(f"{source}, record {place}: has {length} tokens, but the models' context has {room}")

    def trace_config(self, records: Sequence[Record], sampling: Sampling, shard_size: int, digest: str) -> TraceConfig:
        """The config of the imported traces. digest: SHA-256 of the data."""
        target, draft = self.names
        prompts = [Prompt(place, record.id, "", tuple(record.prompt_ids)) for place, record in enumerate(records)]
        return TraceConfig(
            target=target,
            target_fingerprint=checkpoint_fingerprint(target),
            draft=draft,
            draft_fingerprint=checkpoint_fingerprint(draft),
            vocabulary_fingerprint=vocabulary_fingerprint(self.tokenizer),
            prompts_fingerprint=prompts_fingerprint(prompts),
            vocab_size=self.vocab_size,
            end_token_ids=tuple(end_ids(self.target or self.draft, self.tokenizer)),
            num_prompts=len(records),
            sampling=sampling,
            max_new_tokens=max(len(record.response_ids) for record in records),
            seed=0,
            batch_size=1,
            shard_size=shard_size,
            responses=(UNSCORED if self.target is None else IMPORTED) + digest,
            target_revision=hub_revision(target),
            draft_revision=hub_revision(draft),
            dtype=str(self.draft.dtype).removeprefix("torch."),
        )

    def check_made_by(self, records: Sequence[Record], sampling: Sampling, source: str) -> None:
        """Raises InputError when the data's probabilities differ from those of these models."""
        logprobs: dict[str, list[Tensor]] = {}
        apart: list[Tensor] = []
        for record in records:
            logits = self._logits(self.draft, record)
            drawn = torch.tensor(record.draft_ids, device=logits.device)
            said = logits.log_softmax(-1).gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
            for name, values in record.logprobs.items():
                logprobs.setdefault(name, []).append((said.cpu() - torch.tensor(values)).abs())
            if self.target is not None:
                p, q = (sampling.probabilities(each) for each in (self._logits(self.target, record), logits))
                acceptance = acceptance_probability(p.to(q.device), q, drawn).cpu()
                apart.append((acceptance - torch.tensor(record.acceptance)).abs())
        nearest = min((float(torch.cat(parts).mean()) for parts in logprobs.values()), default=0.0)
        if nearest > FAR_LOGPROB:
            raise InputError(
                f"{source}: none of {', '.join(sorted(logprobs))} is what --draft gives its tokens (the nearest is off "
                f"by {nearest:.2f} nats on average); --draft must be the draft that the data were made with"
            )
        if apart and (off := float(torch.cat(apart).mean())) > FAR_PROBABILITY:
            raise InputError(
                f"{source}: p_acc is not what --target and --draft give (off by {off:.2f} on average); they must be "
                "the pair that the data were made with, under the same sampling settings"
            )

    def columns(self, record: Record, sampling: Sampling) -> dict[str, list[float]]:
        """The columns that the data lack. Those that need the target are NaN without it."""
        parts = []
        draft_logits = self._logits(self.draft, record)
        target_logits = self._logits(self.target, record) if self.target is not None else draft_logits
        for logits, target, drawn, said in zip(
            draft_logits.split(CHUNK), target_logits.split(CHUNK),
            torch.tensor(record.draft_ids).split(CHUNK), torch.tensor(record.response_ids).split(CHUNK), strict=True,
        ):  # fmt: skip
            q = sampling.probabilities(logits)
            signals = draft_signals(sampling.signal_probabilities(logits, q), drawn.to(q.device))
            more = dict.fromkeys(OF_TARGET, torch.full((len(drawn),), math.nan))
            if self.target is not None:
                more = _of_target(target.to(q.device), logits, q, said.to(q.device), sampling)
            parts.append({**dict(zip(SIGNALS, signals.unbind(-1), strict=True)), **more})
        return {name: torch.cat([part[name] for part in parts]).tolist() for name in parts[0]}

    @torch.no_grad()
    def _logits(self, model: PreTrainedModel, record: Record) -> Tensor:
        """(positions, vocab): the logits that predict each response token."""
        ids = torch.tensor([[*record.prompt_ids, *record.response_ids]], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits[0, len(record.prompt_ids) - 1 : -1, : self.vocab_size].float()


def _of_target(p_logits: Tensor, q_logits: Tensor, q: Tensor, said: Tensor, sampling: Sampling) -> dict[str, Tensor]:
    """The columns OF_TARGET at each position. Logits, q: (positions, vocab). said: (positions,), X."""
    p = sampling.probabilities(p_logits)
    temperature = sampling.temperature or 1.0
    return {
        "overlap": overlap(p, q),
        "target_logprob": p.gather(-1, said.unsqueeze(-1)).squeeze(-1).clamp(min=torch.finfo(p.dtype).tiny).log(),
        "divergence": divergence(p_logits / temperature, q_logits / temperature),
    }


def _trace(record: Record, index: int, columns: dict[str, list[float]], config: TraceConfig) -> dict[str, Any]:
    return {
        "index": index,
        "id": record.id,
        "domain": "",
        "finished": record.response_ids[-1] in config.end_token_ids,
        "prompt_ids": record.prompt_ids,
        "response_ids": record.response_ids,
        "draft_ids": record.draft_ids,
        # Y was drawn independently of X, without an acceptance test. Where Y = X, the text continues as if accepted.
        "accepted": [x == y for x, y in zip(record.response_ids, record.draft_ids, strict=True)],
        "acceptance": record.acceptance,
        **columns,
    }
