"""Makes checkpoints/tiny from a folder of texts: corpus → prompts and tokenizer → target → draft.

    python checkpoints/recipe/make_pair.py --data DATA

On one thread of a CPU with AVX512-bf16 this takes about an hour and a half; on a GPU, minutes. Every stage is seeded
and skipped when its result is there, and an interrupted stage resumes from its last checkpoint in --work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import numpy as np
import torch
from corpus import Document, load_corpus, write_prompts
from language_model import DRAFT_SHAPE, TARGET_SHAPE, build_model, train_language_model
from tokenizer import save_tokenizer, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT_TOKENS = 65_536  # of the held-out text, for the loss shown during training


def main() -> None:
    here = Path(__file__).resolve()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=here.parents[3] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=here.parents[1] / "tiny")
    parser.add_argument("--work", type=Path, help="checkpoints and logs; OUT/work when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target_tokens", type=int, default=17_000_000, help="tokens of text the target is trained on")
    parser.add_argument("--draft_tokens", type=int, default=10_000_000, help="the same for the draft")
    arguments = parser.parse_args()
    work = arguments.work or arguments.out / "work"
    torch.set_num_threads(arguments.threads)
    L.seed_everything(arguments.seed)

    corpus = load_corpus(arguments.data, arguments.seed)
    target_folder, draft_folder = arguments.out / "target", arguments.out / "draft"
    write_prompts(corpus, arguments.out / "prompts", arguments.seed)
    if not (target_folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(corpus.train), target_folder, draft_folder)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    held_out = pack(corpus.held_out, tokenizer, arguments.seed, repeats=False)[:HELD_OUT_TOKENS]

    if not (target_folder / "model.safetensors").exists():
        L.seed_everything(arguments.seed)
        tokens = pack(corpus.train, tokenizer, arguments.seed)[: arguments.target_tokens]
        target = build_model(TARGET_SHAPE, tokenizer)
        target = train_language_model(target, tokens, held_out, work=work / "target", lr=3e-3)
        target.half().save_pretrained(target_folder)
    if not (draft_folder / "model.safetensors").exists():
        L.seed_everything(arguments.seed + 1)
        # The draft sees the same documents in another order, and fewer of them: it is small and saturates.
        tokens = pack(corpus.train, tokenizer, arguments.seed + 1)[: arguments.draft_tokens]
        teacher = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="eager")
        draft = build_model(DRAFT_SHAPE, tokenizer)
        draft = train_language_model(draft, tokens, held_out, work=work / "draft", lr=5e-3, teacher=teacher)
        draft.half().save_pretrained(draft_folder)


def pack(documents: list[Document], tokenizer, seed: int, repeats: bool = True) -> np.ndarray:
    """All documents, each `repeats` times in a random order, as one array: <|begin|> text <|end|> <|begin|> …"""
    encoded = tokenizer([d.text for d in documents])["input_ids"]
    order = np.concatenate([np.full(d.repeats if repeats else 1, i) for i, d in enumerate(documents)])
    np.random.default_rng(seed).shuffle(order)
    end = tokenizer.eos_token_id
    return np.concatenate([np.asarray([*encoded[i], end], dtype=np.uint16) for i in order])


if __name__ == "__main__":
    main()
