"""Made-up traces of any shape, and a slow walk through their rounds, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from accept_head import Sampling
from accept_head.inference.replay.coupled import CoupledTraces, couple
from accept_head.trace.columns import trace_features
from accept_head.trace.config import TraceConfig

HIDDEN, VOCAB, END = 6, 8, 7
SIGNALS = ("logprob", "entropy", "max_prob")
MADE_UP = settings(derandomize=True, deadline=None, max_examples=25)


class Token(NamedTuple):
    """One token that a round drafts. fed, drawn: the draft's state before it and at it; None where it has none."""

    id: int
    logprob: float
    entropy: float
    max_prob: float
    fed: torch.Tensor
    drawn: torch.Tensor | None
    accepted: bool


@dataclass
class Sample:
    """Made-up traces. fed: of each record, (N, hidden). rollouts: of each record, by position, tables of its tokens."""

    config: TraceConfig
    records: list[dict[str, Any]]
    fed: list[torch.Tensor]
    rollouts: list[dict[int, dict[str, Any]]]
    k_max: int

    def couple(self, folder, k_max=None, count=None) -> CoupledTraces:
        """Through files, as `load_coupled` reads them; of the first `count` records."""
        count = len(self.records) if count is None else count
        size = self.config.shard_size
        paths = [folder / f"shard-{shard:05d}.safetensors" for shard in range(-(-count // size))]
        for shard, path in enumerate(paths):
            self._save(path, range(shard * size, min((shard + 1) * size, len(self.records))))
        data = Dataset.from_list(self.records, features=trace_features())
        return couple(self.config, data.select(range(count)), paths, k_max or self.k_max)

    def _save(self, path, rows):
        """Beyond a rollout's length there is something, as there is in real files, and nobody may look at it."""
        slots, tables, start = self.k_max - 1, [], 0
        for row in rows:
            for position, rollout in sorted(self.rollouts[row].items()):
                tables.append((start + position, rollout))
            start += len(self.fed[row])
        generator = torch.Generator().manual_seed(1)
        tensors = {name: torch.rand(len(tables), slots, generator=generator) for name in SIGNALS}
        tensors["hidden"] = torch.randn(len(tables), slots, HIDDEN, generator=generator)
        tensors["ids"] = torch.zeros(len(tables), slots, dtype=torch.int32)
        for number, (_, rollout) in enumerate(tables):
            for name in (*SIGNALS, "hidden", "ids"):
                tensors[name][number, : len(rollout["ids"])] = rollout[name]
        tensors["position"] = torch.tensor([position for position, _ in tables], dtype=torch.long)
        tensors["length"] = torch.tensor([len(rollout["ids"]) for _, rollout in tables], dtype=torch.long)
        tensors["fed_hidden"] = torch.cat([self.fed[row] for row in rows])
        save_file(tensors, path)

    def round(self, row: int, start: int, k_max: int) -> list[Token]:
        """Every token that a round from `start` can draft, by docs/theory.md §4."""
        record, tokens = self.records[row], []
        last = len(record["response_ids"]) - 1
        for i in range(start, min(last + 1, self.config.max_new_tokens - 1)):
            accepted = record["accepted"][i]
            rollout = self.rollouts[row].get(i)
            if accepted:
                drawn = self.fed[row][i + 1] if i < last else None
            else:
                drawn = rollout["hidden"][0] if len(rollout["ids"]) else None
            values = [record[f"draft_{name}"][i] for name in SIGNALS]
            tokens.append(Token(record["draft_ids"][i], *values, self.fed[row][i], drawn, accepted))
            if not accepted:
                tokens += off_path(rollout)
                break
        return tokens[:k_max]


def off_path(rollout) -> list[Token]:
    count = len(rollout["ids"])
    return [
        Token(
            int(rollout["ids"][j]),
            *(float(rollout[name][j]) for name in SIGNALS),
            rollout["hidden"][j],
            rollout["hidden"][j + 1] if j + 1 < count else None,
            False,
        )
        for j in range(count)
    ]


def config_of(count, *, max_new_tokens, shard_size=3, **changes) -> TraceConfig:
    values = {
        **{name: "x" for name in ("target", "target_fingerprint", "draft", "draft_fingerprint")},
        **{name: "x" for name in ("vocabulary_fingerprint", "prompts_fingerprint")},
        **{"vocab_size": VOCAB, "end_token_ids": (END,), "sampling": Sampling(), "seed": 0, "batch_size": 4},
    }
    sizes = {"num_prompts": count, "max_new_tokens": max_new_tokens, "shard_size": shard_size}
    return TraceConfig(**{**values, **sizes, **changes})


def make_sample(
    seed=0, *, responses=5, max_new_tokens=12, k_max=6, accept=0.6, ends=0.1, shard_size=3, domains=("",)
) -> Sample:
    """Responses end with END or with their budget; a rejected proposal, and a rollout's token, can be END as well.

    accept: the share of accepted proposals; one of each domain, or one of all.
    """
    shares = [accept] * len(domains) if isinstance(accept, float) else accept
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)

    def token(other_than=None):
        while True:
            drawn = END if random.random() < ends else int(random.integers(0, END))
            if drawn != other_than:
                return drawn

    records, fed, rollouts = [], [], []
    for index in range(responses):
        ids = [token()]
        while ids[-1] != END and len(ids) < max_new_tokens:
            ids.append(token())
        accepted = (random.random(len(ids)) < shares[index % len(domains)]).tolist()
        drafts = [x if kept else token(x) for x, kept in zip(ids, accepted, strict=True)]
        own = {}
        for i in range(min(len(ids), max_new_tokens - 1)):
            if not accepted[i]:
                off = [drafts[i]]
                while off[-1] != END and len(off) - 1 < min(max_new_tokens - 2 - i, k_max - 1):
                    off.append(token())
                count = len(off) - 1
                own[i] = {name: torch.from_numpy(random.random(count)).float() for name in ("entropy", "max_prob")}
                own[i]["logprob"] = -own[i]["entropy"].flip(0)
                own[i]["hidden"] = torch.randn(count, HIDDEN, generator=generator)
                own[i]["ids"] = torch.tensor(off[1:], dtype=torch.int32)
        names = ("acceptance", "overlap", "divergence", "draft_entropy", "draft_max_prob")
        records.append(
            {
                "index": index,
                "id": str(index),
                "domain": domains[index % len(domains)],
                "finished": ids[-1] == END,
                "prompt_ids": random.integers(0, END, 1 + index % 3).tolist(),
                "response_ids": ids,
                "draft_ids": drafts,
                "accepted": accepted,
                "target_logprob": [-1.0] * len(ids),
                "draft_logprob": (-random.random(len(ids))).astype(np.float32).tolist(),
                **{name: random.random(len(ids)).astype(np.float32).tolist() for name in names},
            }
        )
        fed.append(torch.randn(len(ids), HIDDEN, generator=generator))
        rollouts.append(own)
    config = config_of(responses, max_new_tokens=max_new_tokens, shard_size=shard_size)
    return Sample(config, records, fed, rollouts, k_max)


class Walked(NamedTuple):
    """As Replayed has them. counts: (n, 4) generated, discarded, target forwards, draft forwards."""

    counts: np.ndarray
    draft_lengths: np.ndarray
    at_risk: np.ndarray
    accepted: np.ndarray


def walk(sample: Sample, decide, k_max: int) -> Walked:
    """Round after round. decide(tokens that can be drafted) → (how many are, forwards beyond them)."""
    counts = np.zeros((len(sample.records), 4))
    lengths, at_risk, kept = np.zeros(k_max + 1), np.zeros(k_max), np.zeros(k_max)
    for row, record in enumerate(sample.records):
        place, emitted = 0, len(record["response_ids"])
        while place < emitted:
            tokens = sample.round(row, place, k_max)
            drafted, beyond = decide(tokens)
            accepted = 0
            for depth, token in enumerate(tokens[:drafted]):
                at_risk[depth] += 1
                if not token.accepted:
                    break
                kept[depth] += 1
                accepted += 1
            counts[row] += [0, drafted - accepted, 1, drafted + beyond]
            lengths[drafted] += 1
            place += accepted + 1
        counts[row, 0] = emitted
    return Walked(counts, lengths, at_risk, kept)


def samples(**fixed):
    """Made-up traces of all shapes."""
    shapes = {
        "seed": st.integers(0, 10**6),
        "responses": st.integers(1, 7),
        "max_new_tokens": st.integers(1, 14),
        "k_max": st.integers(2, 9),
        "accept": st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]),
        "ends": st.sampled_from([0.0, 0.1, 0.3]),
        "shard_size": st.integers(1, 8),
    }
    shapes |= {name: st.just(value) for name, value in fixed.items()}
    return st.fixed_dictionaries(shapes).map(lambda values: make_sample(**values))
