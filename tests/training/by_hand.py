"""Slow references for distributions and random numbers: transformers' warpers, splitmix64 in Python integers."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from accept_head import Sampling


def processed(logits, sampling):
    """(n, vocab) float32 logits → float64 probabilities."""
    if sampling.temperature == 0:
        return np.eye(logits.shape[-1])[logits.argmax(-1)]
    scores = TemperatureLogitsWarper(sampling.temperature)(None, torch.from_numpy(logits))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    weights = np.exp(scores.double().numpy() - scores.double().numpy().max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def distributions(model, prompt, response, sampling, vocab):
    """(N, vocab): the distribution each response token was drawn from."""
    return processed(response_logits(model, prompt, response, vocab), sampling)


def signal_rows(logits, sampling):
    """What the draft signals are read from: the processed distribution, or, when decoding is greedy, the softmax."""
    return processed(logits, Sampling(temperature=1.0, top_k=0) if sampling.greedy else sampling)


def response_logits(model, prompt, response, vocab):
    """(N, vocab): the logits each response token was drawn from, by one ordinary forward."""
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1, :vocab].numpy()


def uniform_number(seed, *counters):
    """splitmix64 chained over the counters, in Python integers."""

    def mix(state):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    state = mix(seed)
    for counter in counters:
        state = mix(state ^ counter)
    return (state >> 11) / 2**53


Z_LIMIT = 3.89  # two-sided p = 1e-4


def likely_responses(pair, prompts, sampling, tokens):
    """Responses drawn from the processed target, one token at a time, so that none has probability 0."""
    generator = torch.Generator().manual_seed(2)
    responses = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(tokens):
            distribution = processed(pair.target(torch.tensor([ids])).logits[0, -1:].numpy(), sampling)[0]
            ids.append(torch.multinomial(torch.from_numpy(distribution), 1, generator=generator).item())
        responses.append(ids[len(prompt) :])
    return responses


class _Output:
    def __init__(self, logits):
        self.logits = logits


class FixedLogits(torch.nn.Module):
    """A target that gives every token the same next-token logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.device = torch.device("cpu")

    def forward(self, input_ids, **_):
        return _Output(self.logits.expand(*input_ids.shape, -1))


def p_value(counts, expected):
    """Chi-square; tokens expected less than 5 times share one bin."""
    often = expected >= 5
    observed, wanted = [*counts[often], counts[~often].sum()], [*expected[often], expected[~often].sum()]
    assert wanted[-1] > 1
    return chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue
