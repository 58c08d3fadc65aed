"""The output of speculative decoding has the target's distribution, whatever the policy; a biased one is caught."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from accept_head import AcceptanceHead, HeadConfig, Sampling
from accept_head.inference import decode
from accept_head.inference.policies import FixedPolicy, HeadPolicy
from accept_head.inference.verify import verify
from accept_head.signals import SIGNALS
from tests.inference.toy import TOKENS, exact_distribution, toy_pair

FALSE_ALARM = 1e-4
SAMPLES, LENGTH = 40_000, 3
PROMPT = [1, 3]


def response_frequencies(pair, policy, sampling, seed=0):
    results = decode.generate(
        pair, [PROMPT] * SAMPLES, policy=policy, sampling=sampling, max_new_tokens=LENGTH, seed=seed
    )
    ids = torch.tensor([result.token_ids for result in results])
    place = (ids * TOKENS ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
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


def random_head(threshold, reads="drawn", **bounds):
    torch.manual_seed(5)
    statistics = {"signals": SIGNALS, "signal_mean": (-1.0, 1.0, 0.5), "signal_std": (1.0, 0.5, 0.2)}
    head = AcceptanceHead(HeadConfig(hidden_size=16, depth=1, reads=reads, **statistics))
    torch.nn.init.normal_(head.output.weight, std=2.0)
    return HeadPolicy(head, threshold, **bounds)


POLICIES = {
    "none": lambda: FixedPolicy(0),
    "fixed:1": lambda: FixedPolicy(1),
    "fixed:2": lambda: FixedPolicy(2),
    "fixed:8": lambda: FixedPolicy(8),
    "head:0.3": lambda: random_head(0.3),
    "head:0.7 short": lambda: random_head(0.7, k_max=2),
    "head before:0.4": lambda: random_head(0.4, reads="before"),
    "head before:0.8": lambda: random_head(0.8, reads="before", k_min=2),
}


@pytest.mark.parametrize("sampling", [Sampling(top_k=0), Sampling(temperature=0.7, top_k=3)], ids=["T=1", "T=.7 k=3"])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_leaves_the_targets_distribution(name, sampling):
    pair = toy_pair()
    expected = exact_distribution(pair.target, PROMPT, LENGTH, sampling)
    assert p_value(response_frequencies(pair, POLICIES[name](), sampling), expected) > FALSE_ALARM


def test_the_draft_is_different_enough_for_the_test_to_mean_something():
    pair, sampling = toy_pair(), Sampling(top_k=0)
    p, q = (exact_distribution(model, PROMPT, LENGTH, sampling) for model in (pair.target, pair.draft))
    assert (p - q).abs().sum() / 2 > 0.3


def test_dropping_drawn_tokens_by_their_own_probability_is_caught(monkeypatch):
    """keep-then-stop is what makes proposal scores lossless: cutting the token itself biases the output."""
    pair, sampling = toy_pair(), Sampling(top_k=0)
    draft = decode._draft

    def drops_unlikely_tokens(*arguments):
        drafted = draft(*arguments)
        if drafted.ids.shape[1] == 0:
            return drafted
        chosen = drafted.probabilities.gather(-1, drafted.ids[..., None]).squeeze(-1)
        likely = (chosen > 0.5).long().cumprod(-1).sum(-1)
        return drafted._replace(lengths=torch.minimum(drafted.lengths, likely))

    monkeypatch.setattr(decode, "_draft", drops_unlikely_tokens)
    expected = exact_distribution(pair.target, PROMPT, LENGTH, sampling)
    assert p_value(response_frequencies(pair, FixedPolicy(2), sampling), expected) < FALSE_ALARM


def test_reusing_a_random_number_for_draft_and_verification_is_caught(monkeypatch):
    pair, sampling = toy_pair(), Sampling(top_k=0)
    monkeypatch.setattr(decode, "ACCEPT", decode.DRAFT)
    expected = exact_distribution(pair.target, PROMPT, LENGTH, sampling)

    def same_slot(seed, *counters):  # the draft counts slots from 1, verification from 0
        *place, slot, stream = counters
        return uniforms(seed, *place, slot + 1 if isinstance(slot, torch.Tensor) else slot, stream)

    uniforms = decode.uniforms
    monkeypatch.setattr(decode, "uniforms", same_slot)
    assert p_value(response_frequencies(pair, FixedPolicy(2), sampling), expected) < FALSE_ALARM


def test_verify_accepts_as_often_as_the_formula_says_at_every_depth():
    """Rows that share p and q: P(accepted ≥ i) = Π_{j≤i} β_j when each draft token is drawn from q."""
    generator = torch.Generator().manual_seed(0)
    rows, k, vocab = 200_000, 3, 4
    p = torch.rand(k + 1, vocab, generator=generator).softmax(-1)
    q = (3 * torch.rand(k, vocab, generator=generator)).softmax(-1)
    draft_ids = torch.stack([torch.multinomial(q[i], rows, True, generator=generator) for i in range(k)], dim=1)
    verified = verify(
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
