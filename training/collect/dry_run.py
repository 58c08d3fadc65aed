"""`collect --dry_run true`: resolve every name, load no weights, print what the run would cost.

It is a flag of the verb, so it checks the exact command and YAML that will run. A name that cannot be reached from here
is an error. With --model_shapes, stand-ins are allowed and reported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accept_head.errors import InputError
from accept_head.files import readable_size
from accept_head.pair import check_same_vocabulary, load_tokenizer
from accept_head.prompts import load_prompts
from accept_head.training.plan.estimate import DEVICES, CollectCost
from accept_head.training.plan.lines import ASSUMED_PROMPT_TOKENS, devices_text, shape_lines
from accept_head.training.plan.model_shape import ModelShape
from accept_head.training.respond.vllm import is_installed

NUMBER_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
VLLM_SEQUENCES = 256  # vLLM's default number of sequences that are generated together


def collect_plan(
    target: str,
    draft: str,
    *,
    out: Path,
    prompts: str,
    field: str,
    split: str,
    max_prompts: int | None,
    max_new_tokens: int,
    batch_size: int,
    alternatives: int,
    concurrency: int | None,
    dtype: str,
    backend: str,
    model_shapes: str | None,
    trust_remote_code: bool,
) -> str:
    """What `collect` would do and cost, as text. Raises InputError naming what cannot be resolved, as collect would."""
    if dtype not in NUMBER_BYTES:
        raise InputError(f"dtype is {dtype!r}, expected one of {', '.join(NUMBER_BYTES)}")
    shapes = [
        ModelShape.of(name, option, model_shapes=model_shapes, trust_remote_code=trust_remote_code)
        for name, option in ((target, "--target"), (draft, "--draft"))
    ]
    room = min(shape.context for shape in shapes) - max_new_tokens
    if room <= 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}, but the models' context has {room + max_new_tokens}")
    tokenizer, tokenizer_line = _tokenizer(target, draft, shapes, trust_remote_code)
    options: dict[str, Any] = {"field": field, "split": split, "max_prompts": max_prompts}
    count, tokens, prompts_line = _prompts(prompts, tokenizer, room, stand_ins=model_shapes is not None, **options)
    together = {"loop": batch_size, "vllm": VLLM_SEQUENCES}.get(backend, concurrency or 32)
    cost = CollectCost(
        target=shapes[0],
        draft=shapes[1],
        number=NUMBER_BYTES[dtype],
        prompts=count,
        prompt_tokens=tokens,
        new_tokens=max_new_tokens,
        batch_size=batch_size,
        generating=min(together, count),
        backend=backend,
        alternatives=alternatives,
    )
    lines = [
        "dry run of collect: no weights are loaded, nothing is written",
        *shape_lines(zip(("target", "draft"), shapes, strict=True)),
        f"  tokenizer  {tokenizer_line}",
        f"  prompts    {prompts_line}",
        f"  responses  at most {max_new_tokens} tokens each, {cost.positions:,} in all, by {_engine(backend)}",
        f"estimate, an upper bound for responses of full length, in {cost.number}-byte numbers (docs/scale.md):",
        f"  disk       {readable_size(cost.disk)} of traces in {out} ({_free(out)}); checkpoints "
        f"{readable_size(cost.number * sum(shape.parameters for shape in shapes))}",
        f"  memory     {readable_size(cost.memory)}: weights {readable_size(cost.weight_bytes)}, "
        f"KV cache {readable_size(cost.cache_bytes)} for {cost.generating} responses at a time, "
        f"logits {readable_size(cost.logit_bytes)} for {batch_size}",
    ]
    for device in DEVICES:
        generate, score = cost.generate_seconds(device) / 3600, cost.score_seconds(device) / 3600
        lines.append(
            f"  {device.name:11}{generate + score:9.1f} GPU-hours on {devices_text(cost.devices(device))}: "
            f"generating {generate:.1f}, scoring {score:.1f}"
        )
    return "\n".join(lines)


def _tokenizer(target: str, draft: str, shapes: list[ModelShape], trust_remote_code: bool) -> tuple[Any, str]:
    """(the target's tokenizer, or None when a model could not be reached; a line about it)."""
    if any(shape.unreached for shape in shapes):
        return None, "NOT CHECKED: of a model that could not be reached; both must have the same vocabulary"
    tokenizers = [
        load_tokenizer(name, option, trust_remote_code) for name, option in ((target, "--target"), (draft, "--draft"))
    ]
    check_same_vocabulary(*tokenizers)
    return tokenizers[0], f"the same {len(tokenizers[0].get_vocab()):,} tokens on both sides"


def _prompts(
    source: str, tokenizer: Any, room: int, *, stand_ins: bool, field: str, split: str, max_prompts: int | None
) -> tuple[int, int, str]:
    """(number of prompts, number of their tokens, a line about them)."""
    if tokenizer is not None:
        try:
            loaded = load_prompts(
                source, tokenizer, field=field, split=split, max_prompts=max_prompts, max_prompt_tokens=room
            )
        except InputError:
            if not stand_ins or Path(source).exists():
                raise
        else:
            tokens = sum(len(prompt.ids) for prompt in loaded)
            return len(loaded), tokens, f"{source}: {len(loaded):,}, of {tokens / len(loaded):.0f} tokens on average"
    count, why = _count_lines(source, field), "no tokenizer to read them with"
    if count is None:
        count, why = max_prompts, "not there, or not to be reached from here"
    if count is None:
        raise InputError(f"--prompts {source}: {why}; --max_prompts says how many to reckon with")
    count = min(count, max_prompts or count)
    said = f"{source}: NOT RESOLVED ({why}); reckoned with {count:,} of {ASSUMED_PROMPT_TOKENS} tokens"
    return count, count * ASSUMED_PROMPT_TOKENS, said


def _count_lines(source: str, field: str) -> int | None:
    """Number of prompts in a JSONL file whose records all have the field. None when there is no such file."""
    if not Path(source).is_file():
        return None
    count = 0
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            present = field in json.loads(line)
        except (ValueError, TypeError, RecursionError):
            present = False
        if not present:
            raise InputError(f"{source}, line {number}: expected a JSON object with the field {field!r}")
        count += 1
    if count == 0:
        raise InputError(f"{source}: there are no prompts in it")
    return count


def _engine(backend: str) -> str:
    return "vllm (NOT INSTALLED here)" if backend == "vllm" and not is_installed() else backend


def _free(out: Path) -> str:
    folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    return f"{readable_size(shutil.disk_usage(folder).free)} free there"
