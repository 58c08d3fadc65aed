"""Part (c). Question: what do 20 heads cost in one sweep, next to 20 runs and to a plain loop that re-runs the draft?

The paper's grid (depth 0 to 4, w_rej 1, 3, 6, 12) over traces of a draft of the shape of Llama 3.2 1B (random weights,
random traces: the time depends on neither), and over those of the pair trained in part (b) where it is there.

    sweep      `accept-head train` with both lists
    singles    the same for one head; of depth 0, 2 and 4, whose mean is taken for each of 20
    plain      per head a pass of the whole draft, as transformers gives hidden states, the head, AdamW: no sharing, no
               packing; of depth 2, and times 20

Seconds are those of Trainer.fit, and of the loop; draft tokens are prompt and response tokens, times epochs.

python benchmarks/gpu/head_sweep.py [--traces 1024] [--epochs 2] [--tiny]
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from cells import Cell, open_cells, part_parser
from recorded_loop import random_head
from shapes import LLAMA_32_1B, SMALL_DRAFT, build
from transformers import PreTrainedModel

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.inference.profile.device import finish
from accept_head.pair import load_model
from accept_head.sampling import Sampling
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import read_traces, write_shard
from accept_head.training.learn.verb import train

DEPTHS, WEIGHTS = [0, 1, 2, 3, 4], [1, 3, 6, 12]
SINGLES = (0, 2, 4)  # depths of the heads that are trained alone
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 128
BATCH = 32
TRACES_SECONDS, SWEEP_SECONDS, RUN_SECONDS = 30, 35, 15  # guesses


def main() -> int:
    parser = part_parser(__doc__)
    parser.add_argument("--traces", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    return run(parser.parse_args())


def run(options: argparse.Namespace) -> int:
    """1 if a cell could not be measured."""
    traces, epochs = (16, 1) if options.tiny else (options.traces, options.epochs)
    cells, work = open_cells(
        "head_sweep",
        options,
        depth=DEPTHS,
        w_rej=WEIGHTS,
        epochs=epochs,
        scaled=f"20 single runs: the mean of those of depth {SINGLES}, times 20; the plain loop: depth 2, times 20",
    )
    folder = work / "head_sweep"
    draft, made = folder / "draft", folder / "traces"
    cases = [("1B shape", draft, made)]
    if (work / "pair" / "draft" / "model.safetensors").is_file() and (work / "t1" / "train").is_dir():
        cases.append(("trained pair", work / "pair" / "draft", work / "t1" / "train"))
    shape = SMALL_DRAFT if options.tiny else LLAMA_32_1B
    cells.measure(
        "traces of the 1B shape",
        {"traces": traces},
        lambda: make_traces(draft, made, shape, traces),
        needs=TRACES_SECONDS,
        made=made / "trace_config.json",
    )
    for name, draft, place in cases:
        job = Job(draft, place, folder / name.replace(" ", "-"), epochs, options.tiny)
        settings = {"draft": name, "traces": traces, "epochs": epochs}
        cells.measure(f"sweep, {name}", settings, lambda j=job: j.fit(DEPTHS, WEIGHTS), needs=SWEEP_SECONDS)
        for depth in SINGLES:
            cells.measure(
                f"depth {depth} alone, {name}", settings, lambda d=depth, j=job: j.fit(d, 1), needs=RUN_SECONDS
            )
        cells.write(compared={shown: compare(cells.cells, shown) for shown, _, _ in cases})
        cells.measure(f"plain loop, {name}", settings, job.plain, needs=RUN_SECONDS)
    cells.write(compared={name: compare(cells.cells, name) for name, _, _ in cases})
    return cells.status


def compare(cells: dict[str, Cell], name: str) -> dict[str, float] | None:
    """How many times as fast the sweep is; None where a cell is missing."""
    parts = [cells.get(f"{part}, {name}", {}) for part in ("sweep", *(f"depth {d} alone" for d in SINGLES))]
    if any("seconds" not in part for part in parts):
        return None
    sweep, *singles = (part["seconds"] for part in parts)
    plain = cells.get(f"plain loop, {name}", {}).get("seconds")
    heads = len(DEPTHS) * len(WEIGHTS)
    alone = sum(singles) / len(singles)
    return {
        "heads": heads,
        "sweep_seconds": sweep,
        "singles_seconds": heads * alone,
        "sweep_over_singles": heads * alone / sweep,
        **({} if plain is None else {"plain_seconds": heads * plain, "sweep_over_plain": heads * plain / sweep}),
        "draft_tokens_per_second": parts[0]["draft_tokens"] / sweep,
        "head_tokens_per_second": heads * parts[0]["draft_tokens"] / sweep,
    }


class Job:
    """One draft and its traces."""

    def __init__(self, draft: Path, traces: Path, out: Path, epochs: int, tiny: bool):
        self.draft, self.traces, self.out, self.epochs, self.tiny = draft, traces, out, epochs, tiny

    def fit(self, depth: Any, w_rej: Any) -> Cell:
        for path in (self.out, self.out.with_name(f"{self.out.name}-run")):
            shutil.rmtree(path, ignore_errors=True)
        batch = 4 if self.tiny else BATCH
        with timed_fit() as seconds:
            train(
                traces=str(self.traces),
                draft=str(self.draft),
                out=str(self.out),
                depth=depth,
                w_rej=w_rej,
                epochs=self.epochs,
                batch_size=batch,
                micro_batch_size=batch,
                precision="fp32" if self.tiny else "bf16",
            )
        tokens = self._tokens(0.9)  # a tenth is held out
        return {"seconds": seconds[0], "draft_tokens": tokens, "tokens_per_second": tokens / seconds[0]}

    def _records(self) -> list[tuple[list[int], list[int], list[float]]]:
        _, traces = read_traces(self.traces)
        return [(row["prompt_ids"], row["response_ids"], row["acceptance"]) for row in traces]

    def _tokens(self, share: float = 1.0) -> int:
        return int(share * self.epochs * sum(len(prompt) + len(said) for prompt, said, _ in self._records()))

    def plain(self) -> Cell:
        """One head of depth 2."""
        model = load_model(self.draft, "--draft", dtype="float32" if self.tiny else "bfloat16")
        head = random_head(model, depth=2).train().requires_grad_(True)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
        records = self._records()
        records = records[: len(records) * 9 // 10]
        batch = 4 if self.tiny else BATCH
        begin = tokens = 0.0
        for turn in range(self.epochs + 1):  # a warm-up of one batch first
            for start in range(0, len(records) if turn else batch, batch):
                fed = _plain_step(model, head, optimizer, records[start : start + batch])
                tokens += fed if turn else 0
            if not turn:
                finish(model.device)
                begin = time.perf_counter()
        finish(model.device)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "draft_tokens": tokens, "tokens_per_second": tokens / seconds}


def _plain_step(model: PreTrainedModel, head: Any, optimizer: Any, records: Sequence[Any]) -> int:
    width = max(len(prompt) + len(said) for prompt, said, _ in records)
    ids = torch.zeros(len(records), width, dtype=torch.long)
    labels, mask = torch.zeros(len(records), width), torch.zeros(len(records), width)
    for row, (prompt, said, acceptance) in enumerate(records):
        end = len(prompt) + len(said)
        ids[row, :end] = torch.tensor([*prompt, *said])
        labels[row, len(prompt) : end] = torch.tensor(acceptance)
        mask[row, len(prompt) : end] = 1
    ids, labels, mask = (each.to(model.device) for each in (ids, labels, mask))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        hidden = output.hidden_states[-1]
        q = output.logits.float().softmax(-1)
        drawn = ids.roll(-1, 1)
        logprob = q.gather(-1, drawn[..., None])[..., 0].clamp(min=1e-30).log()
        entropy = -(q.clamp(min=1e-30).log() * q).sum(-1)
        signals = torch.stack([logprob, entropy, q.amax(-1)], dim=-1)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.dtype is torch.bfloat16):
        logits = head(hidden, signals, drawn)[..., 0]
    loss = (F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none") * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return sum(len(prompt) + len(said) for prompt, said, _ in records)


@contextmanager
def timed_fit() -> Iterator[list[float]]:
    """The seconds of each Trainer.fit inside."""
    seconds: list[float] = []
    fit = L.Trainer.fit

    def timed(*arguments: Any, **options: Any) -> None:
        begin = time.perf_counter()
        fit(*arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)

    L.Trainer.fit = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        L.Trainer.fit = fit  # type: ignore[method-assign]


def make_traces(draft: Path, out: Path, shape: dict[str, Any], count: int) -> Cell:
    """A draft of this shape, and random traces of it."""
    model = build(shape)
    model.save_pretrained(draft)
    vocab = shape["vocab_size"]
    config = TraceConfig(
        target="random",
        target_fingerprint="random",
        draft=str(draft),
        draft_fingerprint=checkpoint_fingerprint(draft),
        vocabulary_fingerprint="none",
        prompts_fingerprint="random",
        vocab_size=vocab,
        end_token_ids=(2,),
        num_prompts=count,
        sampling=Sampling(),
        max_new_tokens=RESPONSE_TOKENS,
        seed=0,
        batch_size=count,
        shard_size=count,
    )
    out.mkdir(parents=True, exist_ok=True)
    write_shard(out, 0, _random_records(count, vocab))
    config.save(out)
    return {"parameters": model.num_parameters(), "tokens": count * (PROMPT_TOKENS + RESPONSE_TOKENS)}


def _random_records(count: int, vocab: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    records = []
    for index in range(count):
        said, drawn = (random.integers(5, vocab, RESPONSE_TOKENS) for _ in range(2))
        accepted = random.random(RESPONSE_TOKENS) < 0.6
        columns = ("acceptance", "overlap", "draft_max_prob", "draft_entropy")
        records.append(
            {
                "index": index,
                "id": str(index),
                "domain": "",
                "finished": False,
                "prompt_ids": random.integers(5, vocab, PROMPT_TOKENS).tolist(),
                "response_ids": said.tolist(),
                "draft_ids": np.where(accepted, said, drawn).tolist(),
                "accepted": accepted.tolist(),
                "target_logprob": (-random.random(RESPONSE_TOKENS)).tolist(),
                "draft_logprob": (-random.random(RESPONSE_TOKENS)).tolist(),
                "divergence": [0.5] * RESPONSE_TOKENS,
                **{name: random.random(RESPONSE_TOKENS).tolist() for name in columns},
            }
        )
    return records


if __name__ == "__main__":
    raise SystemExit(main())
