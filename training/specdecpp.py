"""`accept-head import-specdecpp`: what the SpecDec++ research code leaves → a head, or traces that train one.

Their data hold the target's responses, the tokens that the draft drew along them, and the acceptance probability of
each. What a trace holds beyond that is a forward away: the draft signals are the draft's, and the overlap, the target's
log-probability and the divergence are of both models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from accept_head.acceptance import acceptance_probability, divergence, overlap
from accept_head.errors import InputError
from accept_head.files import sha256, writable_folder
from accept_head.pair import (
    check_same_vocabulary,
    checkpoint_fingerprint,
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
from accept_head.specdecpp import Record, read_checkpoint, read_records, save_imported
from accept_head.trace import IMPORTED, UNSCORED, TraceConfig, missing_shards, write_shard
from accept_head.training.collect.collector import prepare_folder

OF_TARGET = ("overlap", "target_logprob", "divergence")
CHUNK = 256  # positions whose probabilities are worked out at once
CHECKED_RECORDS = 8  # held against the models before anything is written
# How far the file may be from these models, on average over positions: half-precision forwards differ by about a tenth
# of either, other models by several times as much.
FAR_PROBABILITY, FAR_LOGPROB = 0.1, 0.5


def import_specdecpp(
    out: str,
    checkpoint: str | None = None,
    data: str | None = None,
    target: str | None = None,
    draft: str | None = None,
    score: bool = True,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    shard_size: int = 64,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Turn what the SpecDec++ research code leaves into a head (--checkpoint) or into traces (--data).

    Imported traces train heads. They are not dev traces, nor can they be replayed: the target did not say the text
    together with the drawn tokens.

    Args:
        out: Folder for the head, or for the traces.
        checkpoint: Their acceptance head: a folder or Hub name with config.json and model.safetensors.
        data: Their JSON file, with the fields prefix, tokens, draft and p_acc.
        target: Of `data`: the target that said the responses, a folder or Hub name.
        draft: Of `data`: the draft that drew the tokens.
        score: Let the target read the responses too, for what the data do not say: overlap, target_logprob and
            divergence. Without it they stay unknown, and the traces can only train heads that predict `token`.
        temperature: Of the distributions that p_acc was computed from; the research code's are plain softmaxes.
        top_k: Likewise; 0 keeps all.
        top_p: Likewise; 1 keeps all.
        min_p: Likewise; 0 keeps all.
        shard_size: Records in one shard.
        dtype: auto, float32, bfloat16 or float16; of the models.
        device_map: `auto` spreads the target over all devices.
        trust_remote_code: Run model code that comes with the models.
    """
    if (checkpoint is None) == (data is None):
        given = "neither of them is" if data is None else "both are"
        raise InputError(f"one of --checkpoint and --data says what to import, but {given} given")
    if shard_size < 1:
        raise InputError(f"shard_size is {shard_size}, expected a positive integer")
    if checkpoint is not None:
        if target is not None or draft is not None:
            raise InputError("--target and --draft are of --data: a checkpoint does not say which pair it is of")
        head = read_checkpoint(checkpoint)
        writable_folder(Path(out).parent)
        save_imported(head, Path(out), checkpoint)
        print(f"{out}: depth {head.config.depth}, hidden size {head.config.hidden_size}, predicts token")
        return
    if target is None or draft is None:
        raise InputError(
            f"--data takes --target and --draft, but --{'target' if target is None else 'draft'} is missing"
        )
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    models = _Models.load(target, draft, score, dtype, device_map, trust_remote_code)
    records = read_records(Path(str(data)), models.vocab_size)
    models.check_lengths(records, str(data))
    config = models.trace_config(records, sampling, shard_size, sha256(Path(str(data)).read_bytes()))
    models.check_made_by(records[:CHECKED_RECORDS], sampling, str(data))
    folder = prepare_folder(Path(out), config)
    progress = tqdm(unit="record", desc="import", smoothing=0.1)
    for shard in missing_shards(folder, config):
        first = shard * shard_size
        mine = range(first, first + config.shard_rows(shard))
        rows = []
        for index in mine:
            rows.append(_trace(records[index], index, models.columns(records[index], sampling), config))
            progress.update()
        write_shard(folder, shard, rows)
    progress.close()
    print(f"{folder}: {config.num_prompts} traces in {config.num_shards} shards")


@dataclass(frozen=True)
class _Models:
    """The pair of the data. target: None where it is not asked. vocab_size: ids that are scored."""

    names: tuple[str, str]  # target, draft
    target: PreTrainedModel | None
    draft: PreTrainedModel
    tokenizer: Any
    vocab_size: int

    @classmethod
    def load(
        cls, target: str, draft: str, score: bool, dtype: str, device_map: str | None, trust_remote_code: bool
    ) -> _Models:
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
        """digest: SHA-256 of the data."""
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
        """Raises InputError when the data's probabilities are not those of these models."""
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
        """What the data do not say, at each position: by the draft, and by the target or unknown (NaN)."""
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
        """(positions, vocab) of the distribution of each response token."""
        ids = torch.tensor([[*record.prompt_ids, *record.response_ids]], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits[0, len(record.prompt_ids) - 1 : -1, : self.vocab_size].float()


def _of_target(p_logits: Tensor, q_logits: Tensor, q: Tensor, said: Tensor, sampling: Sampling) -> dict[str, Tensor]:
    """OF_TARGET at each position. Logits, q: (positions, vocab); said: (positions,) X."""
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
        # Y was drawn without regard to X: no coin was tossed. Where they are the same the text goes on as if accepted.
        "accepted": [x == y for x, y in zip(record.response_ids, record.draft_ids, strict=True)],
        "acceptance": record.acceptance,
        **columns,
    }
