"""Measures the embedded pair: held-out loss of both models, and acceptance at temperature 1, top-k 50, by domain.

    python checkpoints/recipe/measure_pair.py --data DATA

Writes checkpoints/tiny/measured.json, which checkpoints/README.md quotes.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from corpus import load_corpus

from accept_head import Sampling, load_pair
from accept_head.files import write_json
from accept_head.inference.decode.generate import generate
from accept_head.prompts import load_prompts
from accept_head.training.collect.score import score

CONTEXT_TOKENS, BATCH, NEW_TOKENS, DOCUMENTS_PER_DOMAIN = 512, 24, 96, 80


def main() -> None:
    here = Path(__file__).resolve()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=here.parents[3] / "shared" / "data")
    parser.add_argument("--pair", type=Path, default=here.parents[1] / "tiny")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(arguments.pair / "target", arguments.pair / "draft", dtype="float32")
    by_domain: dict[str, list[str]] = defaultdict(list)
    for document in load_corpus(arguments.data).held_out:
        by_domain[document.domain].append(document.text)
    losses = {domain: held_out_loss(pair, texts[:DOCUMENTS_PER_DOMAIN]) for domain, texts in sorted(by_domain.items())}
    acceptance = mean_overlap(pair, arguments.pair / "prompts" / "test.jsonl")
    result = {
        "held_out_loss_nats_per_token": losses,
        "acceptance_at_temperature_1_top_k_50": acceptance,
        "parameters": {name: getattr(pair, name).num_parameters() for name in ("target", "draft")},
        "made_by": "python checkpoints/recipe/measure_pair.py",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "hardware": f"{platform.machine()}, CPU, one thread",
        "date": datetime.date.today().isoformat(),
    }
    write_json(arguments.pair / "measured.json", result)
    print(result)


@torch.no_grad()
def held_out_loss(pair: Any, texts: list[str]) -> dict[str, float]:
    """Mean cross-entropy of documents cut to the context, for target and draft."""
    sums, tokens = {"target": 0.0, "draft": 0.0}, 0
    for text in texts:
        ids = torch.tensor([pair.tokenizer(text, truncation=True, max_length=CONTEXT_TOKENS)["input_ids"]])
        tokens += ids.shape[1] - 1
        for name in sums:
            logits = getattr(pair, name)(ids).logits[0, :-1]
            sums[name] += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return {name: total / tokens for name, total in sums.items()} | {"tokens": tokens}


def mean_overlap(pair: Any, path: Path) -> dict[str, float]:
    """Mean β over the target's own responses to the test prompts, by domain and over all."""
    prompts = load_prompts(str(path), pair.tokenizer)
    sampling = Sampling()
    values: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        ids = [prompt.ids for prompt in batch]
        responses = generate(
            pair.target, pair.draft, ids, policy="none", sampling=sampling, max_new_tokens=NEW_TOKENS, seed=start
        ).tokens
        indices = [prompt.index for prompt in batch]
        for prompt, columns in zip(batch, score(pair, ids, responses, sampling, seed=0, indices=indices), strict=True):
            values[prompt.domain] += columns["overlap"]
            values["all"] += columns["overlap"]
    return {domain: sum(betas) / len(betas) for domain, betas in sorted(values.items())}


if __name__ == "__main__":
    main()
