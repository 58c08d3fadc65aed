"""The pair that a benchmark by the clock measures: the embedded one, or the published one in runs/models/qwen."""

from __future__ import annotations

import argparse

from real_pair import DRAFT, TARGET, prompts_file
from record import TINY

from accept_head import load_pair
from accept_head.pair import Pair
from accept_head.prompts import Prompt, load_prompts


def add_options(parser: argparse.ArgumentParser, prompts: int) -> None:
    parser.add_argument("--real", action="store_true", help="the published pair in place of the embedded one")
    parser.add_argument("--dtype", default="auto", help="of the published pair: bfloat16 when left out")
    parser.add_argument("--prompts", type=int, default=prompts, help="unseen ones")


def loaded(options: argparse.Namespace) -> tuple[Pair, list[Prompt]]:
    """The pair and its prompts. Those of the published pair are sorted by length in parts, so every so manyth is
    taken."""
    if not options.real:
        pair = load_pair(TINY / "target", TINY / "draft")
        return pair, load_prompts(str(TINY / "prompts" / "test.jsonl"), pair.tokenizer, max_prompts=options.prompts)
    pair = load_pair(TARGET, DRAFT, dtype="bfloat16" if options.dtype == "auto" else options.dtype)
    prompts = load_prompts(str(prompts_file("test")), pair.tokenizer)
    return pair, prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]
