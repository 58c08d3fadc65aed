"""Part (d). Question: how many tokens a second does `collect` make, and where does the time go?

Our loop answers and scores at once; the same responses are then scored by a pass of both models, as those of another
engine would be. In bf16: the pair trained in part (b) where it is there, on its own prompts, and the shapes of Llama 3
8B and Llama 3.2 1B with random weights, on random prompts: time does not depend on what the weights are.

python benchmarks/gpu/collect_speed.py [--batches 32 128] [--tiny]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from cells import TINY, Cell, open_cells, part_parser
from shapes import build_pair

from accept_head import Sampling, load_pair
from accept_head.inference.profile.device import finish
from accept_head.pair import Pair, end_ids
from accept_head.prompts import Prompt, load_prompts
from accept_head.training.collect.decoding import Decoding
from accept_head.training.collect.score import score

NEW_TOKENS, PROMPT_TOKENS = 96, 128
SAMPLING = Sampling(temperature=1.0, top_k=50)
CELL_SECONDS = 10  # a guess


def main() -> int:
    parser = part_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    return run(parser.parse_args())


def run(options: argparse.Namespace) -> int:
    """1 if a cell could not be measured."""
    cells, work = open_cells("collect_speed", options, new_tokens=NEW_TOKENS)
    there = (work / "pair" / "draft" / "model.safetensors").is_file() and not options.tiny
    folder, name = (work / "pair", "trained pair") if there else (TINY, "embedded pair")
    batches = [4] if options.tiny else options.batches
    pairs: list[tuple[str, Callable[[], Pair], Path | None]] = [
        (
            name,
            lambda: load_pair(folder / "target", folder / "draft", dtype="bfloat16"),
            TINY / "prompts" / "train.jsonl",
        ),
        ("8B and 1B shapes", lambda: build_pair(options.tiny), None),
    ]
    for shown, load, prompts in pairs:
        pair = load()
        for batch in batches if prompts else batches[:1]:
            tokens = 16 if options.tiny else NEW_TOKENS
            cells.measure(
                f"{shown}, batch {batch}",
                {"batch": batch, "new_tokens": tokens},
                lambda p=pair, b=batch, f=prompts, t=tokens: measure(p, _prompts(p, f, b), t),
                needs=CELL_SECONDS,
            )
        del pair
    return cells.status


def measure(pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int) -> Cell:
    """The second of two runs, by the clock."""
    device = pair.target.device
    given = [Prompt(index, str(index), "", tuple(prompt)) for index, prompt in enumerate(prompts)]
    settings = SimpleNamespace(
        sampling=SAMPLING, max_new_tokens=new_tokens, seed=0, batch_size=len(given), shard_size=len(given),
        alternatives=0, depths=None, end_token_ids=end_ids(pair.target, pair.tokenizer) if pair.tokenizer else (),
    )  # fmt: skip
    decoding = Decoding(pair, given, settings)
    seconds: dict[str, float] = {}
    for _ in range(2):
        finish(device)
        begin = time.perf_counter()
        columns = [columns for _, columns in decoding.records(0, given)]
        finish(device)
        middle = time.perf_counter()
        said = [row["response_ids"] for row in columns]
        score(pair, prompts, said, SAMPLING, seed=0, indices=range(len(prompts)))
        finish(device)
        seconds = {"collect": middle - begin, "score": time.perf_counter() - middle}
    generated = sum(map(len, said))
    fed = generated + sum(map(len, prompts))
    overlap = [value for row in columns for value in row["overlap"]]
    return {
        "responses": len(prompts),
        "tokens": generated,
        "collect_tokens_per_second": generated / seconds["collect"],
        "score_tokens_per_second": generated / seconds["score"],
        "score_fed_tokens_per_second": fed / seconds["score"],
        "seconds": seconds,
        "mean_overlap": sum(overlap) / len(overlap),
    }


def _prompts(pair: Pair, file: Path | None, count: int) -> list[list[int]]:
    if file is not None:
        loaded = load_prompts(str(file), pair.tokenizer, max_prompts=count)
        return [list(prompt.ids) for prompt in loaded]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, pair.vocab_size, (count, PROMPT_TOKENS), generator=generator).tolist()


if __name__ == "__main__":
    raise SystemExit(main())
