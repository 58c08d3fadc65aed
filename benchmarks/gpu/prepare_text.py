"""What the pair of part b is trained on: a tokenizer of 16,384 tokens, ids, prompts. 7 MB, and no GPU is needed.

The text and what is held out of it are those of the embedded pair (checkpoints/recipe/corpus.py, seed 0).

python benchmarks/gpu/prepare_text.py --data DATA --out runs/gpu-text
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cells  # also finds the recipe
import corpus
import numpy as np
import tokenizer as recipe_tokenizer

from accept_head.files import atomic_path

VOCAB_SIZE = 16_384
HELD_OUT_DOCUMENTS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that `make pair` reads")
    parser.add_argument("--out", type=Path, default=cells.REPOSITORY / "runs" / "gpu-text")
    options = parser.parse_args()
    documents = corpus.load_corpus(options.data)
    corpus.write_prompts(documents, options.out / "prompts")
    recipe_tokenizer.VOCAB_SIZE = VOCAB_SIZE  # the recipe's own is that of the embedded pair
    trained = recipe_tokenizer.train_tokenizer(documents.train)
    recipe_tokenizer.save_tokenizer(trained, options.out / "tokenizer")
    write_text(options.out, documents.train, documents.held_out[:HELD_OUT_DOCUMENTS], trained)


def write_text(out: Path, train: list[corpus.Document], held_out: list[corpus.Document], tokenizer: Any) -> None:
    """OUT/text.npz: ids of all documents one after the other, uint16, and of each its length and how often it is to be
    seen."""
    arrays = {}
    for name, documents in (("train", train), ("held_out", held_out)):
        encoded = tokenizer([document.text for document in documents])["input_ids"]
        ids = [[*row, tokenizer.eos_token_id] for row in encoded]
        arrays[name] = np.concatenate([np.asarray(row, dtype=np.uint16) for row in ids])
        arrays[f"{name}_lengths"] = np.array([len(row) for row in ids])
    arrays["repeats"] = np.array([document.repeats for document in train])
    out.mkdir(parents=True, exist_ok=True)
    with atomic_path(out / "text.npz") as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)
    size = (out / "text.npz").stat().st_size
    seen = int((arrays["train_lengths"] * arrays["repeats"]).sum())
    print(f"wrote {out / 'text.npz'}: {len(arrays['train'])} tokens, {seen} with repeats, {size / 1e6:.1f} MB")


def tiny_text(out: Path) -> Path:
    """The same of the embedded pair's prompts, for a test of the scripts."""
    from transformers import AutoTokenizer

    if not (out / "text.npz").is_file():
        tokenizer = AutoTokenizer.from_pretrained(cells.TINY / "target")
        recipe_tokenizer.save_tokenizer(tokenizer, out / "tokenizer")
        documents = {}
        for split, count in (("train", 200), ("dev", 20), ("test", 20)):
            lines = (cells.TINY / "prompts" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
            (out / "prompts").mkdir(parents=True, exist_ok=True)
            (out / "prompts" / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            prompts = [json.loads(line)["prompt"] for line in lines]
            documents[split] = [corpus.Document(domain="", source="", prompt="", text=text) for text in prompts]
        write_text(out, documents["train"], documents["dev"], tokenizer)
    return out


if __name__ == "__main__":
    main()
