"""Prompts from JSONL files or `datasets` names, as raw text or chat messages, to token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from accept_head.errors import InputError, one_line
from accept_head.files import HALF_PAIR, has_half_pairs, sha256


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    index: its place among the prompts used. id, domain, tenant: from the record, "" when it has none. value: the
    content of the record's field, text or messages. k_max: from the record, the most tokens to draft in a round, 0 =
    no drafts; None when it has none.
    """

    index: int
    id: str
    domain: str
    ids: tuple[int, ...]
    value: Any = None
    tenant: str = ""
    k_max: int | None = None


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str = "prompt",
    split: str = "train",
    max_prompts: int | None = None,
    max_prompt_tokens: int | None = None,
) -> list[Prompt]:
    """Read and tokenize prompts.

    source: a JSONL file, or a name or folder that `datasets.load_dataset` knows. field: holds a string (raw text) or a
    list of {"role", "content"} messages, which go through the tokenizer's chat template. max_prompt_tokens: longest
    prompt that leaves room for the response.

    Raises InputError naming the file and line or field.
    """
    if max_prompts is not None and max_prompts < 1:
        raise InputError(f"max_prompts is {max_prompts}, expected a positive integer")
    prompts: list[Prompt] = []
    for where, record in _records(source, split):
        ids = _encode(record, field, where, tokenizer)
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens, but the models' context leaves room for "
                f"{max_prompt_tokens} before the response; shorten it or lower --max_new_tokens"
            )
        identifier = str(record.get("id", len(prompts)))
        # In a data set, a field that only other records have is None.
        domain, tenant = ("" if (each := record.get(name)) is None else str(each) for name in ("domain", "tenant"))
        k_max = check_k_max(record.get("k_max"), where)
        prompts.append(Prompt(len(prompts), identifier, domain, tuple(ids), record[field], tenant, k_max))
        if len(prompts) == max_prompts:
            break
    if not prompts:
        raise InputError(f"{source}: there are no prompts in it")
    return prompts


def check_k_max(value: Any, where: str) -> int | None:
    """The value itself. Raises InputError unless it is None or a number of tokens. where: what it was read from."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InputError(f"{where}: k_max is {value!r}, expected the most tokens to draft in a round, 0 for none")
    return value


def prompts_fingerprint(prompts: Iterable[Prompt]) -> str:
    """SHA-256 of the prompts' ids, domains and tokens."""
    return sha256(json.dumps([[p.id, p.domain, p.ids] for p in prompts]))


def _records(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(source)
    if path.is_file():
        yield from _jsonl_records(path)
    elif path.suffix in (".jsonl", ".json"):
        raise InputError(f"{source}: no such prompts file")
    else:
        yield from _dataset_records(source, split)


def _jsonl_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text ({error})") from None
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: not JSON; a prompts file holds one JSON object a line") from None
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected a JSON object, found {type(record).__name__}")
        if has_half_pairs(line, record):
            raise InputError(f"{where}: {HALF_PAIR}")
        yield where, record


def _dataset_records(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(source, split=split)
    except Exception as error:  # datasets raises many kinds of errors for a wrong name, split, or no network
        raise InputError(f"{source}: neither a file nor a data set ({one_line(error)})") from None
    for number, record in enumerate(dataset):
        yield f"{source}, record {number}", record


def _encode(record: dict[str, Any], field: str, where: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if field not in record:
        raise InputError(f"{where}: no field {field!r} (it has {', '.join(sorted(record)) or 'none'})")
    value = record[field]
    if isinstance(value, str):
        ids = tokenizer(value)["input_ids"]
    elif isinstance(value, list) and value and all(_is_message(message) for message in value):
        if tokenizer.chat_template is None:
            raise InputError(f"{where}: field {field!r} holds chat messages, but the tokenizer has no chat template")
        try:
            text = tokenizer.apply_chat_template(value, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # jinja2 has many kinds of errors, and templates raise their own
            raise InputError(f"{where}: the tokenizer's chat template refuses field {field!r} ({error})") from None
        # The template already writes the special tokens.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        raise InputError(
            f"{where}: field {field!r} is {type(value).__name__}, expected text or a list of messages "
            "with 'role' and 'content'"
        )
    if not ids:
        raise InputError(f"{where}: field {field!r} has no tokens")
    return list(ids)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
