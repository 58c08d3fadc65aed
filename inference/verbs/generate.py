"""`accept-head generate`: a file of prompts in, a file of responses and their statistics out.

Finished responses are kept in a hidden file beside the output, so that an interrupted run goes on where it was; random
numbers belong to prompts, so the result is the same. The output itself is written at the end, at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from accept_head.cost import DecodeCounts
from accept_head.errors import InputError
from accept_head.files import atomic_path, sha256, writable_file, write_json
from accept_head.inference.decode.chunks import Chunk
from accept_head.inference.decode.generate import check_tenants, content_ids, make_decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import DecodeStats, Finished, Request
from accept_head.inference.decode.stopping import Stopping, stop_strings_criteria
from accept_head.inference.engine.backends import Attention
from accept_head.inference.engine.cache import Compile
from accept_head.inference.policies import make_policy
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policy import Verifier, check_lossless
from accept_head.inference.verbs.options import explained
from accept_head.inference.verbs.terminal import Terminal
from accept_head.pair import checkpoint_fingerprint, context_tokens, end_ids, load_pair
from accept_head.prompts import Prompt, load_prompts, prompts_fingerprint
from accept_head.sampling import Sampling


@explained
def generate_file(
    target: str,
    draft: str,
    prompts: str,
    out: str,
    policy: str = "fixed:4",
    field: str = "prompt",
    max_prompts: int | None = None,
    batch_size: int = 8,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] | None = None,
    seed: int = 0,
    verifier: Verifier = "ratio",
    allow_lossy: bool = False,
    dtype: str = "auto",
    compile: Compile = "none",
    attention: Attention = "auto",
    chunk: Chunk = "auto",
    stream: bool | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Decode prompts speculatively: one JSON object a response, and a summary of the rates.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's tokenizer.
        prompts: JSONL file, or a data set's name.
        out: JSONL file to write; FILE.stats.json beside it holds the summary.
        policy: How many tokens to draft; `accept-head --list-policies` prints what there is.
        field: Field of a prompt record: text, or a list of chat messages.
        max_prompts: Use the first so many prompts.
        batch_size: Prompts decoded together; the next one takes the place of one that is finished.
        max_new_tokens: Longest response, in tokens.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Most likely tokens kept when sampling; 0 keeps all.
        top_p: Probability mass kept when sampling; 1 keeps all.
        min_p: Least probability kept, as a share of the most likely token's; 0 keeps all.
        repetition_penalty: Above 1, tokens that stand in the text already become less likely.
        stop: Texts that end a response.
        seed: Seed; a prompt's response depends on it and on nothing around it.
        verifier: How candidates are tested when sampling: ratio, with probability min(1, p/q), or match, if a token
            drawn from the target is the same.
        allow_lossy: Let a policy run whose sampled output is not distributed as the target's.
        dtype: float32, bfloat16, float16, or auto.
        compile: {compile}
        attention: {attention}
        chunk: {chunk}
        stream: Show responses as they come (with batch_size 1) or progress; only on a terminal when left out.
        trust_remote_code: Run model code that comes with the checkpoint.
    """
    path = writable_file(Path(out))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    pair = load_pair(target, draft, dtype=dtype, trust_remote_code=trust_remote_code)
    room = min(context_tokens(pair.target), context_tokens(pair.draft)) - max_new_tokens
    loaded = load_prompts(prompts, pair.tokenizer, field=field, max_prompts=max_prompts, max_prompt_tokens=max(room, 0))
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected a positive integer")
    chosen = make_policy(policy, pair)
    check_lossless(chosen, verifier, greedy=sampling.greedy, allow_lossy=allow_lossy)
    tenants = [prompt.tenant for prompt in loaded]
    check_tenants(chosen, tenants)
    settings = {
        "policy": policy,
        "policy_content": content_hash(chosen),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "sampling": sampling.to_dict(),
        "repetition_penalty": repetition_penalty,
        "stop": stop or [],
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "verifier": verifier,
        "prompts": prompts_fingerprint(loaded),
        "target": checkpoint_fingerprint(target),
        "draft": checkpoint_fingerprint(draft),
        "tenants": sha256(json.dumps(tenants)) if chosen.by_tenant else None,
    }
    processing = Processing(sampling, pair.vocab_size, repetition_penalty=repetition_penalty)
    criteria = stop_strings_criteria(stop or [], pair.tokenizer)
    stopping = Stopping(end_ids(pair.target, pair.tokenizer), criteria, pair.target.device)
    kept = Kept(path, settings)
    keys = content_ids([prompt.ids for prompt in loaded])
    requests = [
        Request(prompt.index, prompt.ids, max_new_tokens, key, tenant=prompt.tenant)
        for prompt, key in zip(loaded, keys, strict=True)
        if prompt.index not in kept.records
    ]
    if kept.records:
        print(f"going on: {len(kept.records)} of {len(loaded)} responses are there")
    begin, memory = time.perf_counter(), None
    if requests:
        decoder = make_decoder(
            pair.target,
            pair.draft,
            requests,
            chosen,
            batch_size=batch_size,
            greedy=sampling.greedy,
            compile=compile,
            attention=attention,
            chunk=chunk,
        )
        print(memory := str(decoder.memory))
        shown = Terminal(pair.tokenizer, len(requests), one_row=decoder.batch == 1, wanted=stream)
        with kept, shown:
            for done in decoder.run(
                requests,
                policy=chosen,
                processing=processing,
                stopping=stopping,
                seed=seed,
                verifier=verifier,
                allow_lossy=allow_lossy,
                watch=shown.watch,
            ):
                kept.add(_record(loaded[done.request.index], done, pair.tokenizer))
                shown.finished(done)
    kept.finish(len(loaded))
    summary = {**_rates(kept.records.values()), "seconds": time.perf_counter() - begin, "memory": memory, **settings}
    write_json(path.with_name(path.name.removesuffix(".jsonl") + ".stats.json"), summary)
    _report(summary, path)


class Kept:
    """Responses that are finished, by prompt index, in a hidden file until all are there."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.hidden = path, path.with_name(f".{path.name}.unfinished")
        self.first_line = json.dumps({"settings": sha256(json.dumps(settings, sort_keys=True))})
        self.records: dict[int, dict[str, Any]] = {}
        if self.hidden.is_file():
            first, *lines = self.hidden.read_text(encoding="utf-8").split("\n")
            if first == self.first_line:  # else it belongs to a run with other settings
                self._read(lines)

    def _read(self, lines: Sequence[str]) -> None:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # the line that a killed run was writing
                continue
            self.records[record["index"]] = record

    def __enter__(self) -> Kept:
        with atomic_path(self.hidden) as temporary:
            lines = [self.first_line, *(json.dumps(record) for record in self.records.values())]
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.file = self.hidden.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, record: dict[str, Any]) -> None:
        self.records[record["index"]] = record
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def finish(self, expected: int) -> None:
        """Write the output, in the order of the prompts, and forget the hidden file."""
        assert len(self.records) == expected
        with atomic_path(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for index in range(expected):
                file.write(json.dumps(self.records[index], ensure_ascii=False) + "\n")
        self.hidden.unlink(missing_ok=True)


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


def _rates(records: Any) -> dict[str, Any]:
    fields = DecodeStats.__dataclass_fields__
    stats = [DecodeStats(**{name: record[name] for name in fields if name in record}) for record in records]
    total = DecodeCounts.total(row.counts for row in stats)
    return {
        "responses": len(stats),
        "generated": int(total.generated),
        "drafted": sum(row.drafted for row in stats),
        "submitted": sum(row.submitted for row in stats),
        "accepted": sum(row.accepted for row in stats),
        "wasted": sum(row.wasted for row in stats),
        "discard_rate": total.discard_rate,
        "verification_rate": total.verification_rate,
        "block_efficiency": total.block_efficiency,
    }


def _report(summary: dict[str, Any], path: Path) -> None:
    print(
        f"{summary['responses']} responses, {summary['generated']} tokens in {summary['seconds']:.1f} s; "
        f"drafted {summary['drafted']}, accepted {summary['accepted']}; discard rate {summary['discard_rate']:.3f}, "
        f"verification rate {summary['verification_rate']:.3f}, "
        f"block efficiency {summary['block_efficiency']:.2f} tokens a target forward"
    )
    print(f"wrote {path}")
