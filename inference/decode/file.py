"""Decodes prompts into a file with one response a line, and a summary of the rates.

Random numbers depend on the prompt, so a resumed run writes the same file as an uninterrupted one. The output file is
written at once, at the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from transformers import PreTrainedTokenizerBase

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.cost import DecodeCounts
from accept_head.files import atomic_path, sha256
from accept_head.inference.decode.generate import content_ids, make_decoder
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import DecodeStats, Finished, Request
from accept_head.inference.decode.stopping import Stopping, stop_strings_criteria
from accept_head.inference.decode.unfinished import Unfinished
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import Pair, end_ids
from accept_head.prompts import Prompt, prompts_fingerprint
from accept_head.sampling import Sampling


class Shown(Protocol):
    """Progress shown to a person while responses are decoded."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def watch(self, round_: Round) -> None: ...

    def finished(self, done: Finished) -> None: ...


@dataclass(frozen=True, kw_only=True)
class FileJob:
    """What to decode, and all settings that responses depend on. target, draft: names of the models. spec: of the
    policy."""

    target: str
    draft: str
    pair: Pair
    prompts: Sequence[Prompt]
    spec: str
    policy: DraftPolicy
    sampling: Sampling
    repetition_penalty: float
    stop: list[str]
    max_new_tokens: int
    seed: int
    verifier: Verifier
    allow_lossy: bool

    def settings(self) -> dict[str, Any]:
        """The settings as written to the summary. A run with equal settings resumes an interrupted one."""
        tenants, most = [prompt.tenant for prompt in self.prompts], [prompt.k_max for prompt in self.prompts]
        return {
            "policy": self.spec,
            "policy_content": content_hash(self.policy),
            "dtype": str(self.pair.target.dtype).removeprefix("torch."),
            "sampling": self.sampling.to_dict(),
            "repetition_penalty": self.repetition_penalty,
            "stop": self.stop,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "verifier": self.verifier,
            "prompts": prompts_fingerprint(self.prompts),
            "target": checkpoint_fingerprint(self.target),
            "draft": checkpoint_fingerprint(self.draft),
            "tenants": sha256(json.dumps(tenants)) if getattr(self.policy, "by_tenant", False) else None,
            "k_max": None if set(most) == {None} else sha256(json.dumps(most)),
        }

    def decode(
        self, unfinished: Unfinished, show: Callable[[Decoder, int], Shown], *, batch_size: int, **options: Any
    ) -> dict[str, Any]:
        """Decode the prompts that `unfinished` has no record of, write the file, and return the rates of all responses.
        show: makes the progress display from the decoder and the number of responses. options: for `make_decoder`."""
        begin, memory = time.perf_counter(), None
        processing = Processing(self.sampling, self.pair.vocab_size, repetition_penalty=self.repetition_penalty)
        criteria = stop_strings_criteria(self.stop, self.pair.tokenizer)
        stopping = Stopping(end_ids(self.pair.target, self.pair.tokenizer), criteria, self.pair.target.device)
        if requests := self._requests(unfinished.records):
            greedy = self.sampling.greedy
            decoder = make_decoder(
                self.pair.target, self.pair.draft, requests, self.policy,
                batch_size=batch_size, greedy=greedy, **options,
            )  # fmt: skip
            memory = str(decoder.memory)
            with unfinished, show(decoder, len(requests)) as shown:
                for done in decoder.run(
                    requests,
                    policy=self.policy,
                    processing=processing,
                    stopping=stopping,
                    seed=self.seed,
                    verifier=self.verifier,
                    allow_lossy=self.allow_lossy,
                    watch=shown.watch,
                ):
                    unfinished.add(_record(self.prompts[done.request.index], done, self.pair.tokenizer))
                    shown.finished(done)
        records = [unfinished.records[index] for index in range(len(self.prompts))]
        with atomic_path(unfinished.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        unfinished.forget()
        return {**_rates(unfinished.records.values()), "seconds": time.perf_counter() - begin, "memory": memory}

    def _requests(self, done: dict[int, Any]) -> list[Request]:
        keys = content_ids([prompt.ids for prompt in self.prompts])
        return [
            Request(prompt.index, prompt.ids, self.max_new_tokens, key, tenant=prompt.tenant, k_max=prompt.k_max)
            for prompt, key in zip(self.prompts, keys, strict=True)
            if prompt.index not in done
        ]


def summary_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl") + ".stats.json")


def _record(prompt: Prompt, done: Finished, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "index": prompt.index,
        "id": prompt.id,
        "domain": prompt.domain,
        "prompt": prompt.value,
        "text": tokenizer.decode(done.token_ids, skip_special_tokens=True),
        "token_ids": done.token_ids,
        **asdict(done.stats),
        "discarded": done.stats.discarded,
        "forwards": done.stats.forwards,
    }


def _rates(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    fields = DecodeStats.__dataclass_fields__
    stats = [DecodeStats(**{name: record[name] for name in fields if name in record}) for record in records]
    total = DecodeCounts.total(row.counts for row in stats)
    return {
        "responses": len(stats),
        "generated": int(total.generated),
        "drafted": sum(row.drafted for row in stats),
        "submitted": sum(row.submitted for row in stats),
        "accepted": sum(row.accepted for row in stats),
        "discard_rate": total.discard_rate,
        "verification_rate": total.verification_rate,
        "block_efficiency": total.block_efficiency,
    }
