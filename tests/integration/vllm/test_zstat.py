"""The test statistic for vLLM's sampled runs, on tokens whose distribution is known."""

from __future__ import annotations

import pytest
import torch

from accept_head.sampling import Sampling
from tests.integration.vllm.zstat import moments, p_value, z_statistics

LENGTH = 48


def sampled(model, prompts, temperature, seed):
    """Continuations drawn by transformers' own loop."""
    torch.manual_seed(seed)
    ids = torch.tensor(prompts)
    done = model.generate(
        ids,
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        pad_token_id=0,
    )
    return done[:, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(5, 261, (96, 4), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def pair(random_llama):
    # Without an end-of-text token: transformers would forbid it to reach LENGTH, which changes the distribution.
    target, draft = random_llama(1), random_llama(2, hidden=16, layers=1)
    target.generation_config.eos_token_id = None
    return target, draft


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_of_the_target_pass(pair, prompts, temperature):
    # Seed fixed; false alarms at most 1e-4.
    sampling = Sampling(temperature=temperature, top_k=0)
    statistics = z_statistics(*pair, prompts, sampled(pair[0], prompts, temperature, seed=1), sampling)
    assert len(statistics) == 4 and p_value(statistics) >= 1e-4, statistics


def test_tokens_of_a_slightly_colder_target_fail(pair, prompts):
    statistics = z_statistics(*pair, prompts, sampled(pair[0], prompts, 0.9, seed=1))
    assert p_value(statistics) < 1e-4 and statistics["log p"] > 4, statistics


def test_a_token_that_sampling_excludes_fails(pair, prompts):
    outputs = sampled(pair[0], prompts, 1.0, seed=1)
    assert p_value(z_statistics(*pair, prompts, outputs, Sampling(temperature=1.0, top_k=5))) == 0


def test_mean_and_variance_of_a_coin():
    p = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    values = torch.tensor([[2.0, 6.0, -torch.inf]], dtype=torch.float64)
    deviation, variance = moments(values, p, torch.tensor([[0]]))
    assert deviation.tolist() == [2.0 - 5.0] and variance.tolist() == [3.0]
