"""Greedy speculative decoding gives the target's own greedy tokens, one by one, for every batch and policy."""

from __future__ import annotations

import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.inference import generate
from accept_head.inference.policies import FixedPolicy, HeadPolicy
from accept_head.pair import hidden_size, load_pair
from accept_head.prompts import load_prompts
from tests.inference.toy import architectures, pair_of

GREEDY = Sampling(temperature=0)
ARCHITECTURES = architectures()


def transformers_greedy(model, prompt, max_new_tokens, end_ids=()):
    """transformers' own loop on one prompt: no padding, no cache of ours."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def policies(hidden):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(hidden_size=hidden, depth=1))
    return [FixedPolicy(0), FixedPolicy(1), FixedPolicy(4), FixedPolicy(8), HeadPolicy(head, 0.6, k_max=6)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_architecture_decodes_ragged_prompts_exactly(name, batch):
    target, draft = ARCHITECTURES[name]
    generator = torch.Generator().manual_seed(batch)
    prompts = [torch.randint(0, 32, (1 + 3 * row,), generator=generator).tolist() for row in range(batch)]
    expected = [transformers_greedy(target, prompt, 20) for prompt in prompts]
    assert len({tuple(row) for row in expected}) == batch or batch == 1  # different prompts, different answers
    for policy in policies(hidden_size(draft)):
        results = generate(pair_of(target, draft), prompts, policy=policy, sampling=GREEDY, max_new_tokens=20)
        assert [result.token_ids for result in results] == expected


@pytest.fixture(scope="module")
def embedded(embedded_pair_folder):
    pair = load_pair(embedded_pair_folder / "target", embedded_pair_folder / "draft", dtype="float32")
    prompts = load_prompts(str(embedded_pair_folder / "prompts" / "test.jsonl"), pair.tokenizer, max_prompts=24)
    prompts = [list(prompt.ids) for prompt in prompts]
    ends = [pair.tokenizer.eos_token_id]
    return pair, prompts, ends, [transformers_greedy(pair.target, prompt, 40, ends) for prompt in prompts]


@pytest.mark.parametrize("batch", [5, 24])
def test_the_embedded_pair_decodes_exactly_end_tokens_included(embedded, batch):
    pair, prompts, ends, expected = embedded
    for policy in policies(hidden_size(pair.draft)):
        results = []
        for start in range(0, len(prompts), batch):
            results += generate(
                pair,
                prompts[start : start + batch],
                policy=policy,
                sampling=GREEDY,
                max_new_tokens=40,
                end_ids=ends,
            )
        assert [result.token_ids for result in results] == expected


def test_a_hole_in_the_drafts_cache_costs_acceptance_but_not_correctness(embedded, monkeypatch):
    """After a fully accepted round the last drafted token still has to be fed; skip it, and drafts get worse."""
    from accept_head.inference import decode

    pair, prompts, ends, expected = embedded
    good = generate(pair, prompts, policy=FixedPolicy(4), sampling=GREEDY, max_new_tokens=40, end_ids=ends)
    accept = decode.Rows.accept

    def skips(rows, drafted, verified, end_ids):
        outcome = accept(rows, drafted, verified, end_ids)
        rows.draft_fed = rows.lengths - 1
        return outcome

    monkeypatch.setattr(decode.Rows, "accept", skips)
    bad = generate(pair, prompts, policy=FixedPolicy(4), sampling=GREEDY, max_new_tokens=40, end_ids=ends)
    assert [result.token_ids for result in bad] == expected  # still lossless: the draft is never trusted
    assert sum(result.accepted for result in bad) < sum(result.accepted for result in good)
