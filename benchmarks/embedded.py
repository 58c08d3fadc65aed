"""Traces of the embedded pair that the benchmarks share, collected once under runs/."""

from __future__ import annotations

from pathlib import Path

from record import REPOSITORY, TINY

from accept_head.training.collect.verb import collect

NEW_TOKENS = 80
PROMPTS = {"train": 480, "dev": 160, "test": 200}


def traces(split: str, temperature: float = 1.0) -> Path:
    """Folder of traces at T = 1, top-k 50, or greedy."""
    folder = REPOSITORY / "runs" / ("traces" if temperature else "traces_greedy") / split
    collect(
        target=str(TINY / "target"),
        draft=str(TINY / "draft"),
        prompts=str(TINY / "prompts" / f"{split}.jsonl"),
        out=str(folder),
        temperature=temperature,
        max_new_tokens=NEW_TOKENS,
        max_prompts=PROMPTS[split],
        batch_size=40,
        shard_size=80,
    )
    return folder
