"""Speculative sampling from the trained pair, 4096 tokens of vocabulary, against autoregressive sampling.

Each judged sample is the first LENGTH new tokens after one real prompt. False alarms: 1 in 10,000 a chi-square.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.inference import decode, generate
from accept_head.inference.cache import CachedModel
from accept_head.inference.policies import ConfidencePolicy, FixedPolicy, HeadPolicy
from accept_head.pair import Forward
from accept_head.signals import SIGNALS

FALSE_ALARM = 1e-4
SAMPLES = 50_000
LENGTH, NEW_TOKENS = 3, 4  # one more than is judged, so that a round can draft as many as are judged
SAMPLING = Sampling(top_k=50)
BATCH = 1024


def head_policy(reads, **options):
    torch.manual_seed(3)
    statistics = {"signals": SIGNALS, "signal_mean": (-1.5, 1.5, 0.5), "signal_std": (1.5, 1.0, 0.3)}
    head = AcceptanceHead(HeadConfig(hidden_size=128, depth=1, reads=reads, **statistics))
    torch.nn.init.normal_(head.output.weight, std=0.2)
    return HeadPolicy(head, 0.5, **options)


POLICIES = {
    "fixed:3": lambda: FixedPolicy(3),
    "confidence:0.4": lambda: ConfidencePolicy(0.4),
    "head before": lambda: head_policy("before"),
    "head drawn, lag 1": lambda: head_policy("drawn", lag=1),
}


class SharingModel(CachedModel):
    """Forwards one row of each group of equal ones, and gives the others a copy of its keys, values and outputs.

    50,000 rows of one prompt are no more than some hundred different rows. Only what the models compute is shared: all
    that draws, verifies, accepts and rewinds works on every row.
    """

    def __init__(self, model, batch, max_length, **options):
        super().__init__(model, batch, max_length, **options)
        self.fed = torch.zeros(batch, max_length + 1, dtype=torch.long)

    def fill(self, tokens, rows, starts, ends):
        first, end = rows[0], ends[0]
        assert not any(starts) and (tokens[rows, :end] == tokens[first, :end]).all(), "prompts differ"
        super().fill(tokens, rows[:1], starts[:1], ends[:1])
        self.fed[rows, :end] = tokens[first, :end]
        for layer in self.layers:
            for part in (layer.keys, layer.values):
                part[rows, :, :end] = part[first, :, :end]

    def forward(self, input_ids, starts, longest_start):
        width, lowest = input_ids.shape[1], int(starts.min())
        positions = starts[:, None] + torch.arange(width)
        self.fed.scatter_(1, positions.clamp(max=self.max_length), input_ids)
        unseen = torch.arange(self.fed.shape[1]) >= starts[:, None] + width
        first, group = groups_of_equals(torch.cat([self.fed.masked_fill(unseen, -1), starts[:, None]], dim=1))
        places = self._write_at(starts[first], width, longest_start, first)
        logits, hidden = self._call(input_ids[first], places, self.kinds.masks(places, self.place.extent))
        for layer in self.layers:
            for part in (layer.keys, layer.values):
                part[:, :, lowest : self.place.extent] = part[first[group], :, lowest : self.place.extent]
        return Forward(logits[group], hidden[group])

    def select(self, rows):
        super().select(rows)
        self.fed = self.fed[rows]


def groups_of_equals(rows):
    """(rows, columns) int → (one row of each group, the group of each row)."""
    factors = torch.randint(-(2**62), 2**62, rows.shape[1:], generator=torch.Generator().manual_seed(0))
    names, group = ((rows + 2) * factors).sum(-1).unique(return_inverse=True)
    first = torch.empty(len(names), dtype=torch.long)
    first[group] = torch.arange(len(rows))
    return first, group


@pytest.fixture(scope="module")
def prompt(embedded_pair, embedded_pair_folder):
    """A real prompt's first twelve tokens."""
    records = (embedded_pair_folder / "prompts" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    text = next(record["prompt"] for record in map(json.loads, records) if record["domain"] == "stories")
    return embedded_pair.tokenizer(text)["input_ids"][:12]


def sample(pair, prompt, policy, samples=SAMPLES, shared=True, batch=BATCH):
    """Counter of the responses' first tokens."""
    with pytest.MonkeyPatch.context() as patch:
        if shared:
            patch.setattr(decode, "CachedModel", SharingModel)
        generated = generate(
            pair.target,
            pair.draft,
            [prompt] * samples,
            policy=policy,
            sampling=SAMPLING,
            max_new_tokens=NEW_TOKENS,
            batch_size=batch,
            end_token_ids=[],
        )
    return Counter(tuple(tokens[:LENGTH]) for tokens in generated.tokens), generated.stats
