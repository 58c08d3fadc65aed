"""The prompts of a fit: a file of the user's or the shipped mix, split once into train, dev and test."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from accept_head.errors import InputError
from accept_head.files import atomic_path
from accept_head.prompts import Prompt, load_prompts

SPLITS = ("train", "dev", "test")
MIX = "mix.jsonl.gz"  # five domains: code, mathematics, instructions, tool calls, texts to continue


def read_all(
    source: str | None, tokenizer: PreTrainedTokenizerBase, *, field: str, room: int, folder: Path
) -> tuple[list[Prompt], int]:
    """All different prompts that fit, and how many are too long. source: as for `collect`; None for the shipped mix.
    room: tokens that a prompt may have. Raises InputError when none fits."""
    if source is None:
        source, field = str(_unpacked_mix(folder, tokenizer)), "prompt"
    loaded = load_prompts(source, tokenizer, field=field)
    different = list({prompt.ids: prompt for prompt in loaded}.values())
    fitting = [prompt for prompt in different if len(prompt.ids) <= room]
    if not fitting:
        shortest = min(len(prompt.ids) for prompt in different)
        raise InputError(
            f"{source}: no prompt fits: the shortest has {shortest} tokens, but the models' context leaves room for "
            f"{room} before the response; lower --max_new_tokens"
        )
    return fitting, len(different) - len(fitting)


def _unpacked_mix(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The mix in a folder; as plain texts for a tokenizer without a chat template."""
    lines = gzip.decompress((files("accept_head.fit") / MIX).read_bytes()).decode().splitlines()
    records = [json.loads(line) for line in lines]
    if tokenizer.chat_template is None:
        records = [record | {"prompt": record["prompt"][-1]["content"]} for record in records]
    return _write(folder / "mix.jsonl", records)


def write_splits(prompts: Sequence[Prompt], sizes: dict[str, int], folder: Path, seed: int) -> None:
    """FOLDER/train.jsonl, dev.jsonl and test.jsonl with so many prompts each, of all domains alike."""
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in random.Random(seed).sample(list(prompts), len(prompts)):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    ranked = sorted(
        (place / len(group), domain, place) for domain, group in by_domain.items() for place in range(len(group))
    )
    in_turn = [by_domain[domain][place] for _, domain, place in ranked]
    for split in ("test", "dev", "train"):  # the smallest ones first, so that they have all domains
        mine, in_turn = in_turn[: sizes[split]], in_turn[sizes[split] :]
        _write(folder / f"{split}.jsonl", [_record(prompt) for prompt in mine])


def _record(prompt: Prompt) -> dict[str, Any]:
    given = {"id": prompt.id, "domain": prompt.domain, "tenant": prompt.tenant}
    return {name: value for name, value in given.items() if value} | {"prompt": prompt.value}


def _write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return path
