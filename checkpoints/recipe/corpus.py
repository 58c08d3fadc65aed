"""The text that the embedded pair is trained on, and the prompts held out from it.

Every source becomes documents in one of two shapes: plain text, or a one-turn (or longer) chat in the tokenizer's
template. Records that overlap evaluation prompts (OVERLAP.jsonl) are dropped. Whole records are held out, never parts
of one, so that a shipped prompt comes from text that neither model has seen.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOS, EOS, PAD, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, USER, ASSISTANT]

HELD_OUT_BOOKS = {"The Railway Children", "Through the Looking Glass"}
# Prompts a domain ships in train/dev/test. Their records are held out of language-model training.
PROMPTS_PER_DOMAIN = {"train": 160, "dev": 32, "test": 48}
MOST_FINAL_PROMPTS = 48  # of a domain: what is left, for questions that were answered once on the test prompts before


@dataclass(frozen=True, kw_only=True)
class Document:
    """One record: `prompt` is what a user would send, `text` the whole document that a model is trained on."""

    domain: str
    source: str
    prompt: str
    text: str
    repeats: int = 1  # times the document is seen in target training


@dataclass
class Corpus:
    train: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)


def load_corpus(data: Path, seed: int = 0) -> Corpus:
    """Read every source under `data` and split it into training and held-out documents."""
    overlap = _overlapping_lines(data)
    corpus = Corpus()
    for documents, held_out_count in (
        (_math(data, overlap), 320),
        (_mbpp(data, overlap), 150),
        (_algorithms(data, overlap), 150),
        (_dolly(data, overlap), 260),
        (_toolcalls(data), 40),
        (_stories(data), 300),
    ):
        random.Random(seed).shuffle(documents)
        corpus.held_out += documents[:held_out_count]
        corpus.train += documents[held_out_count:]
    for document, held_out in _books(data):
        (corpus.held_out if held_out else corpus.train).append(document)
    corpus.train += _shakespeare(data)
    return corpus


def write_prompts(corpus: Corpus, out: Path, seed: int = 0) -> None:
    """Write train/dev/test.jsonl (id, domain, source, prompt): disjoint, as many from each domain. final.jsonl has
    those that are left, not as many from each."""
    out.mkdir(parents=True, exist_ok=True)
    by_domain: dict[str, list[Document]] = {}
    seen = {document.prompt for document in corpus.train}  # different records can begin alike
    for document in corpus.held_out:
        if document.prompt not in seen:
            seen.add(document.prompt)
            by_domain.setdefault(document.domain, []).append(document)
    splits: dict[str, list[dict[str, str]]] = {split: [] for split in (*PROMPTS_PER_DOMAIN, "final")}
    for domain, documents in sorted(by_domain.items()):
        documents = [d for d in documents if len(d.prompt) <= 700]
        random.Random(seed).shuffle(documents)
        start = 0
        for split, count in {**PROMPTS_PER_DOMAIN, "final": MOST_FINAL_PROMPTS}.items():
            chosen = documents[start : start + count]
            if len(chosen) < count and split != "final":
                raise ValueError(
                    f"domain {domain}: {len(documents)} held-out prompts, too few for {PROMPTS_PER_DOMAIN}"
                )
            start += count
            splits[split] += [
                {"id": f"{domain}-{split}-{i}", "domain": domain, "source": d.source, "prompt": d.prompt}
                for i, d in enumerate(chosen)
            ]
    for split, records in splits.items():
        random.Random(seed).shuffle(records)
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def chat_prompt(content: str) -> str:
    """The rendered form of one user message with a generation prompt, equal to the tokenizer's chat template."""
    return f"{USER}{content}{ASSISTANT}"


def _chat(domain: str, source: str, question: str, answer: str, repeats: int) -> Document:
    prompt = chat_prompt(question.strip())
    return Document(domain=domain, source=source, prompt=prompt, text=prompt + answer.strip(), repeats=repeats)


def _overlapping_lines(data: Path) -> dict[str, set[int]]:
    lines: dict[str, set[int]] = {}
    for record in _jsonl(data / "OVERLAP.jsonl"):
        lines.setdefault(record["file"], set()).add(record["line"])
    return lines


def _jsonl(path: Path) -> list[Any]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def _kept(data: Path, name: str, overlap: dict[str, set[int]]) -> list[Any]:
    dropped = overlap.get(name, set())
    return [record for i, record in enumerate(_jsonl(data / name)) if i not in dropped]


def _math(data: Path, overlap: dict[str, set[int]]) -> list[Document]:
    records = _kept(data, "math_gsm8k/train.jsonl.gz", overlap)
    return [_chat("math", "gsm8k", r["question"], r["answer"], 5) for r in records]


def _mbpp(data: Path, overlap: dict[str, set[int]]) -> list[Document]:
    records = _kept(data, "code_mbpp/mbpp.jsonl", overlap)
    return [_chat("code", "mbpp", r["text"], r["code"].replace("\r", "").expandtabs(4), 6) for r in records]


def _algorithms(data: Path, overlap: dict[str, set[int]]) -> list[Document]:
    records = _kept(data, "code_thealgorithms/python_files.jsonl.gz", overlap)
    return [_chat("code", "thealgorithms", f"Write the Python file {r['path']}", r["text"], 4) for r in records]


def _dolly(data: Path, overlap: dict[str, set[int]]) -> list[Document]:
    records = _kept(data, "instr_dolly/dolly_3k.jsonl.gz", overlap)
    asked = [(r["instruction"] + ("\n\n" + r["input"] if r["input"] else ""), r["output"]) for r in records]
    return [_chat("instruction", "dolly", question, answer, 5) for question, answer in asked]


def _toolcalls(data: Path) -> list[Document]:
    """Multi-turn conversations; the prompt is the first user message, tools are left out to keep prompts short."""
    documents = []
    for record in _jsonl(data / "instr_toolcall/glaive_toolcall_en_demo.jsonl"):
        turns = record["conversations"]
        text = "".join(
            (USER if t["from"] in ("human", "observation") else ASSISTANT) + t["value"].strip() for t in turns
        )
        prompt = chat_prompt(turns[0]["value"].strip())
        if turns[0]["from"] == "human" and text.startswith(prompt):
            documents.append(Document(domain="instruction", source="toolcall", prompt=prompt, text=text, repeats=5))
    return documents


def _stories(data: Path) -> list[Document]:
    documents = []
    for record in _jsonl(data / "stories_tinystories/tinystories.jsonl.gz"):
        text = record["text"].strip()
        opening = text.split("\n")[0][:90].rsplit(" ", 1)[0]
        documents.append(Document(domain="stories", source="tinystories", prompt=opening, text=text, repeats=4))
    return documents


def _books(data: Path) -> list[tuple[Document, bool]]:
    """Chunks of about 2,000 characters, cut at paragraphs; two whole books are held out."""
    documents = []
    for book in _jsonl(data / "prose_gutenberg/books.jsonl.gz"):
        for text in _paragraph_chunks(book["text"], 2000):
            document = Document(domain="prose", source="gutenberg", prompt=_opening(text), text=text, repeats=2)
            documents.append((document, book["title"] in HELD_OUT_BOOKS))
    return documents


def _shakespeare(data: Path) -> list[Document]:
    text = (data / "prose_shakespeare/input.txt").read_text(encoding="utf-8")
    chunks = _paragraph_chunks(text, 2000)
    return [Document(domain="prose", source="shakespeare", prompt=_opening(c), text=c, repeats=2) for c in chunks]


def _paragraph_chunks(text: str, size: int) -> list[str]:
    chunks, current = [], ""
    for paragraph in text.split("\n\n"):
        if current and len(current) + len(paragraph) > size:
            chunks.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}" if current else paragraph
    return [*chunks, current] if current else chunks


def _opening(text: str) -> str:
    """The first 300 characters, cut after a word."""
    return text if len(text) <= 300 else text[:300].rsplit(" ", 1)[0]
