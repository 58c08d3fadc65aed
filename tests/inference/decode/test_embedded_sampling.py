"""Speculative sampling from the trained pair, with 4096 tokens of vocabulary, equals autoregressive target sampling.

It samples the first new tokens after one real prompt SAMPLES times. They are compared with exact probabilities and with
transformers' own `generate`. False alarms: 1 in 10,000 for each chi-square.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.inference import generate
from accept_head.inference.decode import loop
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.pair import Forward
from accept_head.signals import SIGNALS
from tests.examples import generation_kwargs

FALSE_ALARM = 1e-4
SAMPLES = 25_000
RARE = 5  # responses expected less often than this are pooled
SAMPLING = Sampling(top_k=50)
BATCH = 1024
LONG = pytest.mark.timeout(3000)


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
LONG_POLICIES = ("head drawn, lag 1",)


class SharingModel(CachedModel):
    """Forwards one row of each group of equal ones, and gives the others a copy of its keys, values and outputs.

    25,000 rows of one prompt are no more than some hundred different rows. Only what the models compute is shared: all
    that draws, verifies, accepts and rewinds works on every row.
    """

    def __init__(self, model, batch, max_length, **options):
        super().__init__(model, batch, max_length, **options)
        self.fed = torch.zeros(batch, max_length + 1, dtype=torch.long)
        self.packs = False

    def fill(self, tokens, rows, starts, ends):
        first, end = rows[0], ends[0]
        assert not any(starts) and (tokens[rows, :end] == tokens[first, :end]).all(), "prompts differ"
        super().fill(tokens, rows[:1], starts[:1], ends[:1])
        self.fed[rows, :end] = tokens[first, :end]
        self._copy(torch.tensor(rows), torch.full((len(rows),), first), 0, end)

    def forward(self, input_ids, starts, longest_start, *, wanted=None, copy=True):
        width = input_ids.shape[1]
        positions = starts[:, None] + torch.arange(width)
        self.fed.scatter_(1, positions.clamp(max=self.max_length), input_ids)
        unseen = torch.arange(self.fed.shape[1]) >= starts[:, None] + width
        first, group = groups_of_equals(torch.cat([self.fed.masked_fill(unseen, -1), starts[:, None]], dim=1))
        reach = longest_start + width
        positions = self._write_at(starts[first], width, min(reach, self.max_length), reach, first)
        logits, hidden = self._call(input_ids[first], positions, self.kinds.masks(positions, self.place.extent))
        self._copy(torch.arange(len(group)), first[group], int(starts.min()), self.place.extent)
        return Forward(logits[group], hidden[group])

    def _copy(self, rows, source, start, end):
        for layer in self.layers:
            for part in (layer.keys, layer.values):
                part[rows, :, start:end] = part[source, :, start:end]

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


def sample(pair, prompt, policy, new_tokens, *, samples=SAMPLES, shared=True):
    """(samples, new_tokens)."""
    with pytest.MonkeyPatch.context() as patch:
        if shared:
            patch.setattr(loop, "CachedModel", SharingModel)
        generated = generate(
            pair.target,
            pair.draft,
            [prompt] * samples,
            policy=policy,
            sampling=SAMPLING,
            max_new_tokens=new_tokens,
            batch_size=BATCH,
            end_token_ids=[],
        )
    return torch.tensor(generated.tokens)


@torch.no_grad()
def sample_by_transformers(model, prompt, new_tokens):
    """transformers' own loop; the prompt but for its last token is computed once a chunk."""
    torch.manual_seed(0)
    ids, chunks = torch.tensor([prompt]), []
    for _ in range(SAMPLES // 1000):
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        cache.batch_repeat_interleave(1000)
        output = model.generate(
            ids.expand(1000, -1),
            attention_mask=torch.ones(1000, len(prompt)),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            **generation_kwargs(SAMPLING),
            eos_token_id=None,
            pad_token_id=0,
        )
        chunks.append(output[:, len(prompt) :])
    return torch.cat(chunks)


class Cells:
    """The exact probabilities of responses, by plain forwards of the target, binned for a chi-square.

    A response common enough has a cell of its own. Others share one: of those that begin alike, if that is common
    enough, else of those that share one token less, and so on.
    """

    def __init__(self, target, prompt, length, samples):
        self.target, self.prompt, self.samples = target, prompt, samples
        self.possible = {}  # prefix → the tokens that may follow
        probability = {(): 1.0}
        level = [()]
        for _ in range(length):
            level = self._extend(probability, level)
        self.cells = {prefix: p - self._children(probability, prefix) for prefix, p in probability.items()}
        for prefix in sorted(self.cells, key=len, reverse=True):
            if prefix and self.cells[prefix] * samples < RARE:
                self.cells[prefix[:-1]] += self.cells.pop(prefix)

    @torch.no_grad()
    def _extend(self, probability, level):
        ids = torch.tensor([[*self.prompt, *prefix] for prefix in level])
        p = SAMPLING.probabilities(self.target(ids).logits[:, -1]).double()
        longer = []
        for prefix, row in zip(level, p, strict=True):
            self.possible[prefix] = set(row.nonzero()[:, 0].tolist())
            for token in (row * probability[prefix] * self.samples >= RARE).nonzero()[:, 0].tolist():
                longer.append((*prefix, token))
                probability[longer[-1]] = probability[prefix] * float(row[token])
        return longer

    @staticmethod
    def _children(probability, prefix):
        return sum(p for longer, p in probability.items() if longer[:-1] == prefix and longer)

    def count(self, responses):
        """How many of (samples, ≥ length) responses are in each cell. Fails if one is impossible."""
        counts = Counter()
        for response, number in Counter(map(tuple, responses.tolist())).items():
            for end, token in enumerate(response):
                assert token in self.possible.get(response[:end], {token}), "a response of probability 0 was produced"
            end = next(end for end in range(len(response), -1, -1) if response[:end] in self.cells)
            counts[response[:end]] += number
        return [counts[cell] for cell in self.cells]

    def p_value(self, responses):
        counts = self.count(responses)
        scale = len(responses) / sum(self.cells.values())
        return chisquare(counts, [scale * p for p in self.cells.values()]).pvalue

    def p_value_of_two(self, one, other):
        table = torch.tensor([self.count(one), self.count(other)])
        return chi2_contingency(table[:, table.sum(0) > 0].numpy()).pvalue


def test_sharing_forwards_changes_no_token(embedded_pair, prompt):
    shared, plain = (
        sample(embedded_pair, prompt, POLICIES["head before"](), 4, samples=200, shared=shared)
        for shared in (True, False)
    )
    assert torch.equal(shared, plain)


@pytest.mark.slow
def test_two_tokens_have_the_targets_distribution(embedded_pair, prompt):
    cells = Cells(embedded_pair.target, prompt, 2, SAMPLES)
    assert len(cells.cells) > 100
    assert cells.p_value(sample(embedded_pair, prompt, POLICIES["fixed:3"](), 2)) > FALSE_ALARM


# Three tokens, of four drawn, so that a round can draft as many as are judged.


@pytest.fixture(scope="module")
def three_tokens(embedded_pair, prompt):
    """(cells, samples by policy)."""

    @cache
    def by(policy):
        return sample(embedded_pair, prompt, POLICIES[policy](), 4)[:, :3]

    return Cells(embedded_pair.target, prompt, 3, SAMPLES), by


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("policy", LONG_POLICIES)
def test_three_tokens_have_the_targets_distribution(three_tokens, policy):
    cells, by = three_tokens
    assert len(cells.cells) > 250
    assert cells.p_value(by(policy)) > FALSE_ALARM


@pytest.fixture(scope="module")
def by_transformers(embedded_pair, prompt):
    return sample_by_transformers(embedded_pair.target, prompt, 3)


@pytest.mark.slow
@LONG
def test_transformers_sampling_has_that_distribution_too(three_tokens, by_transformers):
    cells, _ = three_tokens
    assert cells.p_value(by_transformers) > FALSE_ALARM


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("policy", LONG_POLICIES)
def test_it_is_distributed_as_transformers_sampling(three_tokens, by_transformers, policy):
    cells, by = three_tokens
    assert cells.p_value_of_two(by(policy), by_transformers) > FALSE_ALARM
