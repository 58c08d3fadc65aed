"""`accept-head demo`: `fit` on the embedded pair and its prompts."""

from __future__ import annotations

from pathlib import Path

from accept_head.errors import InputError
from accept_head.fit.verb import fit


def demo(
    pair: str | None = None,
    out: str = "runs/demo",
    temperature: float = 1.0,
    max_prompts: int | None = None,
    max_new_tokens: int = 80,
    seed: int = 0,
) -> None:
    """Make a head for the embedded pair, and say what it gains on this machine.

    Args:
        pair: Folder with `target`, `draft` and `prompts`; checkpoints/tiny of this repository when left out.
        out: Folder for everything that is made. What an earlier demo left there is continued.
        temperature: Sampling temperature; 0 is greedy.
        max_prompts: Use at most so many prompts.
        max_new_tokens: Longest response, in tokens.
        seed: Seed of everything.
    """
    folder = Path(pair) if pair else Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"
    if not (folder / "target").is_dir():
        raise InputError(f"--pair {folder}: no embedded pair there; run the demo from a checkout, or give --pair")
    fit(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        prompts=str(folder / "prompts" / "train.jsonl"),
        out=out,
        temperature=temperature,
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
