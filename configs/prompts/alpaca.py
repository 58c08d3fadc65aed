"""Prompts of Alpaca as chat messages, in the paper's splits: 40,000 to train, 10,000 dev, the rest test.

    python configs/prompts/alpaca.py --out runs/alpaca

Writes train.jsonl, dev.jsonl and test.jsonl with the fields id, domain and prompt. An instruction with an input is one
message: the instruction, an empty line, the input. SpecDec++ does not say which prompts are in which split; here a
shuffle with a fixed seed decides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from datasets import load_dataset

SPLITS = (("train", 40_000), ("dev", 10_000), ("test", None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="tatsu-lab/alpaca", help="a data set, or a folder with its files")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    records = load_dataset(given.source, split="train")
    records = records.add_column("line", list(range(len(records)))).shuffle(seed=given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    first = 0
    for name, count in SPLITS:
        last = len(records) if count is None else min(first + count, len(records))
        lines = [json.dumps(as_prompt(records[row]), ensure_ascii=False) for row in range(first, last)]
        (given.out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{given.out / name}.jsonl: {len(lines):,} prompts")
        first = last


def as_prompt(record: dict[str, str]) -> dict[str, object]:
    text = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
    return {"id": f"alpaca-{record['line']}", "domain": "alpaca", "prompt": [{"role": "user", "content": text}]}


if __name__ == "__main__":
    main()
