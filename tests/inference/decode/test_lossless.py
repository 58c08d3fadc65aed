"""The output of speculative decoding has the target's distribution for every policy, and a biased policy is detected.

These tests sample with the loop's own random numbers. test_enumeration.py is exact and does not sample. False alarms: 1
in 10,000 for each test.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from accept_head import Sampling
from accept_head.inference import generate
from accept_head.inference.decode import steps
from accept_head.inference.kernels import rows
from accept_head.inference.kernels.verify import by_ratio
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.randomness import DecodeStream
from tests.inference.support.enumeration import random_head_policy, uncertain_pair
from tests.inference.support.toy import TOKENS, exact_distribution

FALSE_ALARM = 1e-4
SAMPLES = 16_000
LENGTH, NEW_TOKENS = 3, 4  # one more than is judged: a round can draft three, which is where a head at lag 1 may stop
PROMPT = [1, 3]
WITHOUT_FILTERS = Sampling(top_k=0)


def response_frequencies(target, draft, policy, sampling):
    generated = generate(
        target,
        draft,
        [PROMPT] * SAMPLES,
        policy=policy,
        sampling=sampling,
        max_new_tokens=NEW_TOKENS,
        batch_size=8_000,
        end_token_ids=[],
    )
    place = (torch.tensor(generated.tokens)[:, :LENGTH] * TOKENS ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    return torch.bincount(place, minlength=TOKENS**LENGTH).double()


def p_value(observed, expected_probability):
    """Chi-square of all responses; those too rare to test (expected below 5) are pooled."""
    expected = expected_probability * SAMPLES
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    kept = expected > 0
    assert observed[~kept].sum() == 0, "a response of probability 0 was produced"
    expected = expected[kept] * (SAMPLES / expected[kept].sum())
    return chisquare(observed[kept].numpy(), expected.numpy()).pvalue


def p_value_of(policy, sampling=WITHOUT_FILTERS):
    target, draft = uncertain_pair()
    expected = exact_distribution(target, PROMPT, LENGTH, sampling)
    return p_value(response_frequencies(target, draft, policy, sampling), expected)


STOPPING = {
    "head drawn, lag 0": lambda: random_head_policy(lag=0),
    "head drawn, lag 0, k_max 2": lambda: random_head_policy(lag=0, k_max=2),
    "head drawn, lag 1": lambda: random_head_policy(lag=1),
    "head before": lambda: random_head_policy(reads="before"),
    "head before, k_min 2": lambda: random_head_policy(reads="before", k_min=2),
    "confidence": lambda: ConfidencePolicy(0.3),
}
POLICIES = {
    "none": lambda: FixedPolicy(0),
    "fixed:1": lambda: FixedPolicy(1),
    "fixed:2": lambda: FixedPolicy(2),
    "fixed:8": lambda: FixedPolicy(8),
    **STOPPING,
}


QUICK = ("head drawn, lag 1", "confidence")


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(WITHOUT_FILTERS, id="T=1", marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.7, top_k=3), id="T=.7 k=3"),
    ],
)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
def test_every_policy_leaves_the_targets_distribution(name, sampling):
    assert p_value_of(POLICIES[name](), sampling) > FALSE_ALARM


def test_the_pair_is_one_on_which_a_bias_would_show():
    """Both models are uncertain, and they disagree, but not about everything."""
    p, q = (exact_distribution(model, PROMPT, LENGTH, WITHOUT_FILTERS) for model in uncertain_pair())
    assert (p * SAMPLES >= 5).sum() > 90 and max(p.max(), q.max()) < 0.15
    assert 0.3 < (p - q).abs().sum() / 2 < 0.8


@pytest.mark.parametrize("name", STOPPING)
def test_policies_that_can_stop_early_do(name):
    target, draft = uncertain_pair()
    first = []
    generate(
        target,
        draft,
        [PROMPT] * 500,
        policy=STOPPING[name](),
        sampling=WITHOUT_FILTERS,
        max_new_tokens=NEW_TOKENS,
        end_token_ids=[],
        watch=lambda round_: first.append(round_.drafted.lengths.bincount()),
    )
    assert (first[0] > 5).sum() > 1  # different rows, different lengths


@pytest.mark.parametrize("purpose", ["ACCEPT", pytest.param("REDRAW", marks=pytest.mark.slow)])
def test_reusing_the_drafts_random_number_in_verification_is_caught(monkeypatch, purpose):
    streams = {stream.name: stream for stream in DecodeStream}
    monkeypatch.setattr(steps, "DecodeStream", SimpleNamespace(**streams | {purpose: DecodeStream.DRAFT}))
    assert p_value_of(FixedPolicy(2)) < FALSE_ALARM


def test_the_same_random_numbers_in_every_round_are_caught(monkeypatch):
    uniforms = rows.uniforms
    monkeypatch.setattr(
        rows, "uniforms", lambda seed, keys, rounds, *rest: uniforms(seed, keys, torch.zeros_like(rounds), *rest)
    )
    assert p_value_of(FixedPolicy(2)) < FALSE_ALARM


def test_verify_accepts_as_often_as_the_formula_says_at_every_depth():
    """Rows that share p and q: P(accepted ≥ i) = Π_{j≤i} β_j when each draft token is drawn from q."""
    generator = torch.Generator().manual_seed(0)
    rows, k, vocab = 200_000, 3, 4
    p = torch.rand(k + 1, vocab, generator=generator).softmax(-1)
    q = (3 * torch.rand(k, vocab, generator=generator)).softmax(-1)
    draft_ids = torch.stack([torch.multinomial(q[i], rows, True, generator=generator) for i in range(k)], dim=1)
    verified = by_ratio(
        p.expand(rows, -1, -1),
        q.expand(rows, -1, -1),
        draft_ids,
        torch.full((rows,), k),
        torch.rand(rows, k, generator=generator),
        torch.rand(rows, generator=generator),
    )
    beta = torch.minimum(p[:k], q).sum(-1)
    for depth in range(1, k + 1):
        expected = beta[:depth].prod().item()
        observed = (verified.accepted >= depth).double().mean().item()
        z = abs(observed - expected) / (expected * (1 - expected) / rows) ** 0.5
        assert z < 3.9  # two-sided 1e-4
