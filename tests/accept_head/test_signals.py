"""Draft signals, and heads that read them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import torch

from accept_head import AcceptanceHead, HeadConfig, InputError, Sampling
from accept_head.signals import SIGNALS, draft_signals, signals_of_logits, signals_of_q

STATISTICS = {"signals": SIGNALS, "signal_mean": (-1.0, 2.0, 0.5), "signal_std": (0.5, 1.5, 0.25)}


def head_with_signals(**changes):
    torch.manual_seed(0)
    return AcceptanceHead(HeadConfig(**{"hidden_size": 8, "depth": 2, **STATISTICS, **changes}))


def test_signals_are_log_probability_entropy_and_maximum():
    q = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    q[0] = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0])
    y = torch.tensor([1, 0, 3, 6, 2])
    found = draft_signals(q, y).numpy()
    plain = q.double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(plain > 0, plain * np.log(plain), 0).sum(-1)
    expected = np.stack([np.log(plain[np.arange(5), y.numpy()]), entropy, plain.max(-1)], axis=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_greedy_signals_come_from_the_plain_softmax_because_one_hot_says_nothing():
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    for sampling, expected in ((Sampling(temperature=0), logits.softmax(-1)), (Sampling(top_k=1), torch.eye(3)[[1]])):
        q = sampling.probabilities(logits)
        assert torch.allclose(sampling.signal_probabilities(logits, q), expected)


def exact(logits, temperature, y):
    """(batch, 3) in float64, from q = softmax(logits / temperature)."""
    z = logits.double().numpy() / temperature.double().numpy()[:, None]
    log_q = z - scipy.special.logsumexp(z, axis=-1, keepdims=True)
    q = np.exp(log_q)
    entropy = scipy.special.entr(q).sum(-1)
    logprob = np.maximum(log_q[np.arange(len(y)), y.numpy()], np.log(np.finfo(np.float32).tiny))
    return np.stack([logprob, entropy, q.max(-1)], axis=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_signals_of_logits_are_those_of_their_softmax(dtype, spread):
    generator = torch.Generator().manual_seed(1)
    logits = (spread * torch.randn(9, 301, generator=generator)).to(dtype)
    logits[0, 5:] = -torch.inf  # tokens that cannot be drawn
    temperature = torch.tensor([1.0, 0.3, 2.0] * 3)
    y = torch.randint(0, 5, (9,), generator=generator)
    found = torch.stack(signals_of_logits(logits, temperature, y), dim=-1)
    assert found.dtype == torch.float32 and found.isfinite().all()
    np.testing.assert_allclose(found.numpy(), exact(logits, temperature, y), rtol=2e-5, atol=2e-5)
    plain = torch.stack(signals_of_logits(logits, torch.ones(9), y), dim=-1)
    assert (spread == 0.1) or not torch.allclose(found, plain, atol=1e-2)  # the temperature counts


def test_signals_of_a_certain_token_and_of_one_that_is_impossible():
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 3] = 7.0
    ids = torch.tensor([3, 2])
    for signals in (signals_of_logits(logits, torch.ones(2), ids), signals_of_q(torch.eye(6)[[3, 3]], ids)):
        logprob, entropy, max_prob = (each.tolist() for each in signals)
        assert logprob == pytest.approx([0, math.log(torch.finfo(torch.float32).tiny)], rel=1e-6)
        assert entropy == pytest.approx([0, 0], abs=1e-6) and max_prob == [1, 1]


def test_signals_of_q_are_the_same_one_by_one_also_with_zeros_and_of_none():
    q = torch.rand(6, 40, generator=torch.Generator().manual_seed(0))
    q[q < 0.5] = 0
    q /= q.sum(-1, keepdim=True)
    y = q.argmax(-1)
    assert torch.equal(torch.stack(signals_of_q(q, y), dim=-1), draft_signals(q, y))
    for none in (signals_of_q(q[:0], y[:0]), signals_of_logits(q[:0], torch.ones(0), y[:0])):
        assert [each.shape for each in none] == [(0,)] * 3


def test_a_head_may_read_some_signals_only():
    head = head_with_signals(signals=("draft_max_prob",), signal_mean=(0.5,), signal_std=(0.25,))
    hidden, signals = torch.randn(1, 8), torch.rand(1, 3)
    others_changed = signals + torch.tensor([3.0, 3.0, 0.0])
    assert torch.equal(head(hidden, signals), head(hidden, others_changed))


def test_a_head_that_reads_signals_refuses_to_go_without():
    with pytest.raises(InputError, match="draft signals"):
        head_with_signals()(torch.randn(1, 8))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"signals": ("mood",), "signal_mean": (0.0,), "signal_std": (1.0,)}, "mood"),
        ({"signal_mean": (0.0,)}, "signal_mean"),
        ({"signal_std": (1.0, 0.0, 1.0)}, "signal_std"),
        ({"signal_std": (1.0, float("inf"), 1.0)}, "signal_std"),
        ({"signal_mean": (0.0, "a", 0.0)}, "signal_mean"),
        ({"signals": "draft_logprob"}, "signals"),
        ({"predicts": "next"}, "predicts"),
    ],
)
def test_a_config_with_wrong_signals_is_refused_by_name(changes, word):
    with pytest.raises(InputError, match=word):
        head_with_signals(**changes)
