"""Makes accept_head/fit/mix.jsonl.gz, the prompts of a `fit` without prompts: chat messages of five domains.

Of the train prompts of the published pair (MBPP, GSM8K, Dolly, Glaive function calling) and of the embedded pair (prose
of Project Gutenberg, to be continued). Licences: checkpoints/README.md.

python checkpoints/recipe/make_mix.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OUT = REPOSITORY / "accept_head" / "fit" / "mix.jsonl.gz"
EACH = 120


def main() -> None:
    chat = REPOSITORY / "benchmarks" / "traces" / "qwen2.5-coder" / "prompts"
    records = [record for path in sorted(chat.glob("train*.jsonl")) for record in read(path)]
    prose = [
        each
        for each in read(REPOSITORY / "checkpoints" / "tiny" / "prompts" / "train.jsonl")
        if each["domain"] == "prose"
    ]
    records += [message("prose", f"Continue this text:\n\n{record['prompt']}") for record in prose]
    by_domain: dict[str, list[dict]] = {}
    for record in records:
        by_domain.setdefault(record["domain"], []).append(record)
    chosen = [record for domain in sorted(by_domain) for record in by_domain[domain][:EACH]]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in chosen)
    OUT.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"wrote {OUT}: {len(chosen)} prompts")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def message(domain: str, text: str) -> dict:
    return {"prompt": [{"role": "user", "content": text}], "domain": domain}


if __name__ == "__main__":
    main()
