"""Greedy speculative decoding gives the target's own greedy tokens, for every batch and policy."""

from __future__ import annotations

import pytest
import torch

from accept_head.inference import generate
from accept_head.inference.decode.rows import Rows
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.pair import hidden_size, load_pair
from accept_head.prompts import load_prompts
from tests.inference.support.toy import architectures, ragged_prompts, random_head, transformers_greedy

ARCHITECTURES = architectures()
BATCHES = (1, 3, 8, 16)
NEW_TOKENS = 14
ENDS = [7, 14, 20]

# name → a policy for a draft of this hidden size
POLICIES = {
    "fixed:0": lambda hidden: FixedPolicy(0),
    "fixed:1": lambda hidden: FixedPolicy(1),
    "fixed:4": lambda hidden: FixedPolicy(4),
    "fixed:8": lambda hidden: FixedPolicy(8),
    "head drawn lag 0": lambda hidden: HeadPolicy(random_head(hidden), 0.6, k_max=6, lag=0),
    "head drawn lag 1": lambda hidden: HeadPolicy(random_head(hidden, signals=True), 0.6, k_max=6),
    "head before": lambda hidden: HeadPolicy(random_head(hidden, reads="before", signals=True), 0.8, k_max=6),
    "head with embedding": lambda hidden: HeadPolicy(
        random_head(hidden, reads="before", embeddings=torch.randn(4096, hidden), width=20), 0.8, k_max=6
    ),
    "confidence": lambda hidden: ConfidencePolicy(0.5, k_max=6),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def toy(request):
    """A target, its draft, more prompts than the largest batch, and what transformers makes of them."""
    target, draft = ARCHITECTURES[request.param]
    prompts = ragged_prompts(max(BATCHES) + 3)
    expected = [transformers_greedy(target, prompt, NEW_TOKENS, eos_token_id=ENDS) for prompt in prompts]
    return target, draft, prompts, expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=() if batch in (3, 16) else pytest.mark.slow) for batch in BATCHES]
)
def test_every_architecture_decodes_ragged_prompts_exactly(toy, batch, policy):
    """There are three prompts more than rows: some take the place of others while the rest go on."""
    target, draft, prompts, expected = toy
    policy, prompts, expected = POLICIES[policy](hidden_size(draft)), prompts[: batch + 3], expected[: batch + 3]
    result = generate(
        target, draft, prompts, policy=policy, max_new_tokens=NEW_TOKENS, batch_size=batch, end_token_ids=ENDS
    )
    assert result.tokens == expected


def test_the_toy_responses_differ_in_tokens_and_lengths_and_have_no_near_ties(toy):
    """Otherwise the comparison above would show little, or depend on the last bit."""
    target, _, prompts, expected = toy
    assert len({tuple(row) for row in expected}) >= len(prompts) - 1
    assert len({len(row) for row in expected}) > 4
    for prompt, response in zip(prompts, expected, strict=True):
        best = target(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3


def test_drafts_are_accepted_often_but_not_always(toy):
    target, draft, prompts, _ = toy
    stats = generate(target, draft, prompts, policy="fixed:4", max_new_tokens=NEW_TOKENS).stats
    assert 0.3 < sum(row.accepted for row in stats) / sum(row.drafted for row in stats) < 0.9


class Embedded:
    """The trained pair in float32, its test prompts, and transformers' greedy responses, each computed once."""

    new_tokens = 40

    def __init__(self, folder):
        self.pair = load_pair(folder / "target", folder / "draft", dtype="float32", device="cpu")
        prompts = load_prompts(str(folder / "prompts" / "test.jsonl"), self.pair.tokenizer)
        self.prompts = [list(prompt.ids) for prompt in prompts]
        self.responses = []

    def expected(self, count):
        for prompt in self.prompts[len(self.responses) : count]:
            eos = self.pair.tokenizer.eos_token_id
            self.responses.append(transformers_greedy(self.pair.target, prompt, self.new_tokens, eos_token_id=eos))
        return self.responses[:count]

    def generate(self, count, policy, batch):
        policy = POLICIES[policy](hidden_size(self.pair.draft))
        prompts, options = self.prompts[:count], {"max_new_tokens": self.new_tokens, "batch_size": batch}
        return generate(self.pair.target, self.pair.draft, prompts, policy=policy, **options)


@pytest.fixture(scope="module")
def embedded(embedded_pair_folder):
    return Embedded(embedded_pair_folder)


@pytest.mark.parametrize(
    ("count", "batch", "policy"),
    [(16, 16, policy) for policy in ("fixed:0", "fixed:4", "head drawn lag 1", "confidence")]
    + [(16, 5, "fixed:4"), (3, 1, "fixed:8")],
)
def test_the_embedded_pair_decodes_exactly_end_tokens_included(embedded, count, batch, policy):
    assert embedded.generate(count, policy, batch).tokens == embedded.expected(count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "policy"), [*((16, policy) for policy in POLICIES), *((batch, "head before") for batch in BATCHES[:-1])]
)
def test_the_embedded_pair_decodes_200_prompts_exactly(embedded, batch, policy):
    assert len(embedded.prompts) >= 200
    assert embedded.generate(200, policy, batch).tokens == embedded.expected(200)


def test_a_hole_in_the_drafts_cache_costs_acceptance_but_not_correctness(embedded, monkeypatch):
    """After a fully accepted round the last drafted token still has to be fed; skip it, and drafts get worse."""
    good = embedded.generate(16, "fixed:4", 16)
    accept = Rows.accept

    def skips(rows, *arguments):
        outcome = accept(rows, *arguments)
        rows.fed = rows.lengths - 1
        return outcome

    monkeypatch.setattr(Rows, "accept", skips)
    bad = embedded.generate(16, "fixed:4", 16)
    assert bad.tokens == embedded.expected(16)  # still lossless: the draft is never trusted
    assert sum(row.accepted for row in bad.stats) < sum(row.accepted for row in good.stats)
