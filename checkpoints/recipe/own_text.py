"""The target's own text: its answers to prompts, and prompts that it writes itself.

A model that was tuned on conversations has read what users say as well. So after the words with which a user's turn
begins, it goes on as a user (Magpie, arXiv:2406.08464). Such prompts are of all the kinds that it was tuned on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from accept_head.files import atomic_path
from accept_head.inference.verbs.generate import generate_file
from accept_head.pair import load_tokenizer
from accept_head.prompts import load_prompts

PROMPT_TOKENS = 100  # of a prompt that it writes; a longer one is left out
KEPT = 2048  # answers of vLLM between two writes
Answer = tuple[list[int], list[int]]  # ids of a prompt and of its answer


def answers(
    options: argparse.Namespace, prompts: str, path: Path, temperature: float, seed: int, new_tokens: int
) -> list[Answer]:
    """The target's own answers, which are kept in `path`."""
    asked = [list(prompt.ids) for prompt in load_prompts(prompts, load_tokenizer(options.target, "--target"))]
    if options.engine == "vllm":
        if not path.is_file():
            answered_by_vllm(options, asked, path, temperature, seed, new_tokens)
    elif not path.with_suffix(".stats.json").is_file():
        generate_file(
            options.target, options.target, prompts, str(path), policy="none", batch_size=at_once(), top_k=0, seed=seed,
            max_new_tokens=new_tokens, temperature=temperature, dtype=options.dtype, stream=False,
        )  # fmt: skip
    with path.open() as lines:
        answered = [json.loads(line)["token_ids"] for line in lines]
    return list(zip(asked, answered, strict=True))


def at_once() -> int:
    """Answers that our loop decodes together."""
    return 512 if torch.cuda.is_available() else 32


def answered_by_vllm(
    options: argparse.Namespace, asked: list[list[int]], path: Path, temperature: float, seed: int, new_tokens: int
) -> None:
    """One JSON object a prompt, in `path`. Parts are kept."""
    parts = {first: path.with_name(f"{path.stem}_{first}.jsonl") for first in range(0, len(asked), KEPT)}
    missing = [first for first, part in parts.items() if not part.is_file()]
    if missing:
        if not torch.cuda.is_available():
            # One process on all cores. By itself it leaves one of them to a process that mostly waits.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
        from vllm import LLM, SamplingParams, TokensPrompt

        llm = LLM(
            options.target, dtype=options.dtype, max_model_len=max(map(len, asked)) + new_tokens, max_num_seqs=256,
            seed=seed + missing[0], gpu_memory_utilization=0.4, generation_config="vllm",
            distributed_executor_backend="uni",
        )  # fmt: skip
        sampling = SamplingParams(temperature=temperature, max_tokens=new_tokens, detokenize=False)
        for first in missing:
            some = [TokensPrompt(prompt_token_ids=ids) for ids in asked[first : first + KEPT]]
            said = [list(each.outputs[0].token_ids) for each in llm.generate(some, sampling)]
            write(parts[first], ({"token_ids": ids} for ids in said))
        llm.llm_engine.engine_core.shutdown()  # its memory is needed for training
    with atomic_path(path) as unfinished:
        unfinished.write_text("".join(part.read_text() for part in parts.values()))


def own_prompts(options: argparse.Namespace, path: Path, count: int, seed: int) -> str:
    """Writes prompts of the target, at most so many, to `path`, and gives its name. Without those that it did not
    finish, and each once."""
    if not path.is_file():
        tokenizer = load_tokenizer(options.target, "--target")
        beginning, end = around_a_prompt(tokenizer)
        begun = path.with_name("begun.jsonl")
        write(begun, [{"prompt": beginning}] * count)
        said = [ids for _, ids in answers(options, str(begun), path.with_name("said.jsonl"), 1.0, seed, PROMPT_TOKENS)]
        texts = (tokenizer.decode(ids[: ids.index(end)]).strip() for ids in said if end in ids)
        once = filter(None, dict.fromkeys(texts))
        write(path, ({"prompt": [{"role": "user", "content": text}], "domain": "own"} for text in once))
    return str(path)


def around_a_prompt(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """What stands before a user's first word, and the token after the last one."""
    mark, begin = "a user's words", tokenizer.bos_token or ""
    messages = [{"role": "user", "content": mark}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    before, _, after = text.partition(mark)
    if tokenizer("")["input_ids"]:  # the tokenizer begins texts by itself
        before = before.removeprefix(begin)
    return before, tokenizer(after, add_special_tokens=False)["input_ids"][0]


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with atomic_path(path) as unfinished:
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
