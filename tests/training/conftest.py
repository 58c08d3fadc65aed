"""Fixtures for the tests of training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accept_head import Pair


@pytest.fixture
def related_pair(random_llama, byte_tokenizer):
    """A draft that is the target with a bent output layer, so that proposals are accepted at some positions only."""
    target, draft = random_llama(1), random_llama(1)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(1)
        draft.lm_head.weight += 0.2 * torch.randn(draft.lm_head.weight.shape, generator=noise)
    return Pair(target, draft, byte_tokenizer(), 261)


@pytest.fixture
def sequences():
    random = np.random.default_rng(11)
    lengths = [(3, 9), (12, 4), (1, 15), (6, 1)]
    prompts = [random.integers(5, 261, prompt).tolist() for prompt, _ in lengths]
    return prompts, [random.integers(5, 261, response).tolist() for _, response in lengths]
