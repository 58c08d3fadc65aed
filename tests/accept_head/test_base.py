"""The base of a head, alone and below a residual: its functions of the draft signals, against numpy in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig, InputError
from accept_head.base import BASE_FUNCTIONS, MOST_LOG_ODDS, base_functions, places_of
from accept_head.head.saved import load_head
from accept_head.head.scorer import make_scorer
from accept_head.signals import SIGNALS

HIDDEN, VOCAB = 8, 13


def base_config(signals=SIGNALS, **config):
    count = len(places_of(signals))
    numbers = {"signal_mean": tuple(0.1 * i - 0.3 for i in range(count)), "signal_std": (0.5, 2.0, 1.0) * (count // 3)}
    if count % 3:
        numbers["signal_std"] = (1.5,) * count
    return {"hidden_size": HIDDEN, "reads": "before", "base": True, "signals": signals, **numbers, **config}


def alone(**config):
    return base_config(depth=0, residual=False, **config)


def made(**config):
    """Of random weights, the output's too."""
    head = AcceptanceHead(HeadConfig(**config))
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    return head.attach(torch.randn(VOCAB, HIDDEN, generator=generator))


def signals_of(*shape, seed=1):
    """Such as a distribution has: log q(Y) ≤ log max q, and an entropy that grows as max q falls."""
    generator = torch.Generator().manual_seed(seed)
    largest = torch.rand(shape, generator=generator).clamp(0.01, 0.999)
    logprob = largest.log() - torch.rand(shape, generator=generator) * 5
    return torch.stack([logprob, -4 * largest.log(), largest], dim=-1)


def by_numpy(signals):
    logprob, entropy, largest = np.moveaxis(signals.double().numpy(), -1, 0)
    q = np.exp(logprob)
    logit, logit_largest = np.log(q / (1 - q)), np.log(largest / (1 - largest))
    columns = [logprob, entropy, largest, q, logit, logit_largest, np.sqrt(entropy), logprob * entropy]
    return np.stack([*columns, logprob - np.log(largest)], axis=-1)


def test_functions_are_what_their_names_say():
    signals = signals_of(50, 3)
    assert len(BASE_FUNCTIONS) == 9
    np.testing.assert_allclose(base_functions(signals).numpy(), by_numpy(signals), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_are_finite_and_bounded_wherever_a_distribution_is(dtype):
    """Of one-hot distributions too, whose log-odds are infinite, and of tokens that have no mass left in float32."""
    extremes = torch.tensor(
        [[0.0, 0.0, 1.0], [1e-7, -1e-7, 1 + 1e-7], [-1e-9, 0.0, 1.0], [-87.0, 0.0, 1.0], [-87.0, 11.9, 1e-6]],
        dtype=dtype,
    )
    found = base_functions(extremes)
    assert found.isfinite().all()
    assert found[:, [0, 4, 5]].abs().max() <= MOST_LOG_ODDS
    assert torch.equal(found[0, 4:6], torch.full((2,), MOST_LOG_ODDS, dtype=dtype))


def test_log_odds_keep_the_digits_that_float32_has_near_one():
    """From q = 1 − 3e-5 in float32, 1 − q has two digits; from log q it has all seven."""
    logprob = torch.tensor([-3e-5], dtype=torch.float32)
    (odds,) = base_functions(torch.stack([logprob, logprob * 0, logprob.exp()], dim=-1))[:, 4].tolist()
    assert odds == pytest.approx(np.log(1 / np.expm1(3e-5)), rel=1e-5)


@pytest.mark.parametrize(
    ("signals", "count"), [(SIGNALS, 9), (("draft_entropy", "draft_max_prob"), 4), (("draft_max_prob",), 2), ((), 0)]
)
def test_only_functions_of_the_heads_own_signals_are_read(signals, count):
    assert len(places_of(signals)) == count
    if not count:
        return
    head = made(**alone(signals=signals))
    read, other = signals_of(6), signals_of(6)
    for place, name in enumerate(SIGNALS):
        if name not in signals:
            other[:, place] = -0.7
    assert torch.equal(head.base_logits(read), head.base_logits(other))


@pytest.mark.parametrize("predicts", ["token", "both"])
def test_a_base_alone_is_a_logistic_regression_on_the_functions(predicts):
    head = made(**alone(predicts=predicts))
    signals = signals_of(4, 3)
    config, weight = head.config, head.base.weight.detach().double().numpy()
    x = (by_numpy(signals) - np.array(config.signal_mean)) / np.array(config.signal_std)
    expected = x @ weight.T + head.base.bias.detach().double().numpy()
    nothing = torch.full((4, 3, HIDDEN), torch.nan)  # it reads no state
    np.testing.assert_allclose(head(nothing, signals).detach().numpy(), expected, rtol=1e-3, atol=1e-3)
    assert sum(parameter.numel() for parameter in head.parameters()) == len(head.config.predictions) * 10


@pytest.mark.parametrize(
    "config", [{}, {"predicts": "both"}, {"signals": ("draft_entropy", "draft_max_prob")}], ids=str
)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("fusible", [False, True])
def test_serving_scores_are_the_probabilities(config, residual, fusible):
    more = {"depth": 2, "width": 5, "standardised": True, "embedding_std": 0.7} if residual else {}
    head = made(**(base_config(**config, **more) if residual else alone(**config)))
    generator = torch.Generator().manual_seed(3)
    for shape in ((6,), (2, 3), (0,), ()):
        hidden, ids = (
            torch.randn((*shape, HIDDEN), generator=generator),
            torch.randint(VOCAB, shape, generator=generator),
        )
        read = hidden, signals_of(*shape), ids
        with torch.no_grad():
            expected = head(*read).sigmoid()
            score = make_scorer(head, "both" if head.config.predicts == "both" else "token", fusible=fusible)
            wanted = expected if head.config.predicts == "both" else expected[..., 0]
            torch.testing.assert_close(score(*read), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("residual", [False, True])
def test_what_is_served_may_be_a_slice(residual):
    """Every other token of a row: its states and signals do not lie side by side."""
    more = {"depth": 1, "width": 5, "standardised": True} if residual else {"depth": 0, "residual": False}
    head = made(**base_config(**more))
    hidden, signals = torch.randn(2, 6, HIDDEN)[:, ::2], signals_of(2, 6)[:, ::2]
    with torch.no_grad():
        expected = head(hidden, signals)[..., 0].sigmoid()
        torch.testing.assert_close(make_scorer(head)(hidden, signals), expected, rtol=1e-5, atol=1e-6)


def test_base_and_residual_are_added_up_as_log_odds():
    """By numpy. The residual reads what the base reads, too."""
    head = made(**base_config(depth=1, width=5, standardised=True, embedding_std=0.7))
    w = {name: value.double().numpy() for name, value in head.state_dict().items()}
    hidden, signals, ids = torch.randn(6, HIDDEN), signals_of(6), torch.arange(6)
    told = (by_numpy(signals) - np.array(head.config.signal_mean)) / np.array(head.config.signal_std)
    x = hidden.double().numpy() @ w["state_input.weight"].T + w["state_input.bias"] + told @ w["signal_input.weight"].T
    x = x + head.embeddings[ids].double().numpy() / 0.7 @ w["embedding_input.weight"].T
    z = x @ w["blocks.0.linear.weight"].T + w["blocks.0.linear.bias"]
    residual = (x + z / (1 + np.exp(-z))) @ w["output.weight"].T + w["output.bias"]
    expected = told @ w["base.weight"].T + w["base.bias"] + residual
    np.testing.assert_allclose(head(hidden, signals, ids).detach().numpy(), expected, rtol=1e-3, atol=1e-3)


def test_a_new_residual_adds_nothing():
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(**base_config(width=5, standardised=True, depth=2, embedding_std=0.7)))
    head.attach(torch.randn(VOCAB, HIDDEN))
    signals, ids = signals_of(7), torch.arange(7)
    assert torch.equal(head(torch.randn(7, HIDDEN), signals, ids), head.base_logits(signals))
    torch.nn.init.ones_(head.output.weight)
    assert not torch.allclose(head(torch.randn(7, HIDDEN), signals, ids), head.base_logits(signals))


def test_a_folder_is_what_was_saved(tmp_path):
    for name, config in (("alone", alone()), ("both", base_config(width=5, standardised=True, embedding_std=0.7))):
        head = made(**config)
        head.save_pretrained(tmp_path / name)
        loaded = load_head(tmp_path / name, hidden_size=HIDDEN, embeddings=head.embeddings)
        read = torch.randn(6, HIDDEN), signals_of(6), torch.arange(6)
        assert torch.equal(loaded(*read), head(*read))
        assert json.loads((tmp_path / name / "config.json").read_text())["base"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signals": (), "signal_mean": (), "signal_std": ()}, "base is true, but signals"),
        ({"signal_mean": (0.0,) * 3}, "one finite number a function of the signals"),
        ({"standardised": True}, "standardised is true, but width"),
        ({"base": "yes"}, "base is 'yes', expected true or false"),
        ({"residual": False}, "residual is false, expected depth 0"),
        ({"residual": False, "depth": 0, "width": 4}, "residual is false, expected depth 0"),
        ({"residual": False, "depth": 0, "reads": "drawn"}, "residual is false, expected depth 0"),
        (
            {"residual": False, "depth": 0, "base": False, "signal_mean": (0.0,) * 3, "signal_std": (1.0,) * 3},
            "base and residual are false",
        ),
    ],
)
def test_a_wrong_config_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        HeadConfig(**{**base_config(), **changes})
