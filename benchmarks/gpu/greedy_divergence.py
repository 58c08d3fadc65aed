"""Part (e). Question: in bf16, how often is speculative greedy text not the target's own, and is that rounding?

Verification feeds several tokens where decoding alone feeds one; matrix products of other shapes add up in another
order, and where the two best logits are closer than that rounding, the other token comes out. From there the texts
differ. The same happens to the target alone when its batch size changes. So both are counted: the first position that
differs, and the margin of the target's two best logits there, next to the margin at all other positions.

python benchmarks/gpu/greedy_divergence.py [--pair FOLDER] [--dtype bfloat16] [--tiny]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import TINY, Cell, open_cells, part_parser
from graph_modes import modes
from torch import Tensor

from accept_head import Sampling, load_pair
from accept_head.inference.bench.measure import Stage
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.rows import Request
from accept_head.inference.policies.registry import make_policy
from accept_head.pair import Pair, end_ids
from accept_head.prompts import load_prompts

PROMPTS, NEW_TOKENS, OTHER_BATCH = 24, 64, 8
MODE_SECONDS = 45  # a guess of what a cell takes
POLICIES = ("fixed:2", "fixed:4", "fixed:8", "max-prob:0.4,k_max=8")


def main() -> int:
    parser = part_parser(__doc__)
    parser.add_argument("--pair", type=Path, help="folder with target and draft; WORK/pair, else the embedded pair")
    parser.add_argument("--prompts", type=Path, help="JSONL; those of the embedded pair when left out")
    parser.add_argument("--dtype", default="bfloat16")
    return run(parser.parse_args())


def run(options: argparse.Namespace) -> int:
    """1 if a cell could not be measured."""
    cells, work = open_cells("greedy_divergence", options, dtype=options.dtype, fallback=modes()[1])
    trained = work / "pair" / "draft" / "model.safetensors"
    folder = options.pair or (work / "pair" if trained.is_file() and not options.tiny else TINY)
    pair = load_pair(folder / "target", folder / "draft", dtype=options.dtype)
    prompts = options.prompts or TINY / "prompts" / "test.jsonl"
    count, tokens, policies = (3, 12, POLICIES[:1]) if options.tiny else (PROMPTS, NEW_TOKENS, POLICIES)
    loaded = load_prompts(str(prompts), pair.tokenizer, max_prompts=count)
    requests = make_requests([prompt.ids for prompt in loaded], tokens)
    name = "embedded" if folder == TINY else str(folder)
    cells.write(pair=name, prompts=len(requests), new_tokens=tokens)
    for mode in modes()[0]:
        settings = {"compile": mode, "pair": name, "dtype": options.dtype}
        cells.measure(mode, settings, lambda m=mode: compare(pair, requests, m, policies), needs=MODE_SECONDS)
    return cells.status


def compare(
    pair: Pair,
    requests: Sequence[Request],
    mode: str = "none",
    policies: Sequence[str] = POLICIES,
) -> Cell:
    """Divergences of every policy at batch 1 and at OTHER_BATCH from the target alone at batch 1, and of the target
    alone at OTHER_BATCH and in transformers."""

    def decode(spec: str, batch: int) -> list[list[int]]:
        policy = make_policy(spec, pair)
        options: Any = {"batch_size": batch, "greedy": True, "compile": mode}
        decoder = make_decoder(pair.target, pair.draft, requests, policy, **options)
        stage = Stage(decoder, pair, Sampling(temperature=0))
        finished = sorted(stage.run(requests, policy, 0), key=lambda done: done.request.index)
        return [done.token_ids for done in finished]

    alone = decode("none", 1)
    others = {
        f"none, batch {OTHER_BATCH}": decode("none", OTHER_BATCH),
        "transformers, batch 1": _plain(pair, requests),
    }
    speculative = {}
    for batch in (1, OTHER_BATCH):
        for spec in policies:
            speculative[f"{spec}, batch {batch}"] = decode(spec, batch)
    margins = top_margins(pair, requests, alone)
    return {
        "against": "none, batch 1",
        "autoregressive": [
            {"name": name, **divergence(requests, alone, texts, margins)} for name, texts in others.items()
        ],
        "speculative": [
            {"name": name, **divergence(requests, alone, texts, margins)} for name, texts in speculative.items()
        ],
        "margin_of_all_positions": _quantiles(np.concatenate(margins)),
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two texts differ, None if they are equal. Where one has ended, it differs."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def divergence(
    requests: Sequence[Request],
    reference: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    margins: Sequence[np.ndarray],
) -> dict[str, Any]:
    """How many texts differ from the reference, where first, and the margin of the reference's two best logits there.
    which: their numbers.
    rate_a_token: texts that differ over tokens compared, those up to the first difference."""
    first = [first_difference(one, other) for one, other in zip(reference, texts, strict=True)]
    places = [(row, place) for row, place in enumerate(first) if place is not None]
    compared = sum(len(text) if place is None else place + 1 for text, place in zip(reference, first, strict=True))
    at = np.array([margins[row][place] for row, place in places if place < len(margins[row])])
    return {
        "texts": len(requests),
        "different": len(places),
        "rate": len(places) / len(requests),
        "rate_a_token": len(places) / compared,
        "which": [row for row, _ in places],
        "first_positions": [place for _, place in places],
        "margins_there": [round(float(value), 5) for value in at],
        "margin_there": _quantiles(at) if len(at) else None,
    }


@torch.no_grad()
def top_margins(pair: Pair, requests: Sequence[Request], texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """At each position of each text, the target's best logit minus its second, from one forward over all of it."""
    margins = []
    for request, text in zip(requests, texts, strict=True):
        ids = torch.tensor([[*request.prompt, *text]], device=pair.target.device)
        logits: Tensor = pair.target(ids).logits[0, len(request.prompt) - 1 : -1, : pair.vocab_size].float()
        best = logits.topk(2, dim=-1).values
        margins.append((best[:, 0] - best[:, 1]).cpu().numpy())
    return margins


def _plain(pair: Pair, requests: Sequence[Request]) -> list[list[int]]:
    """transformers' greedy text, one prompt at a time."""
    texts = []
    for request in requests:
        ids = torch.tensor([list(request.prompt)], device=pair.target.device)
        output = pair.target.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=end_ids(pair.target, pair.tokenizer),
            pad_token_id=pair.tokenizer.pad_token_id,
        )
        texts.append(output[0, len(request.prompt) :].tolist())
    return texts


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (5, 50, 95, 100)}


if __name__ == "__main__":
    raise SystemExit(main())
