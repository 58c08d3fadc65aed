"""The fit of a base: it is an optimum over all labels, with the ridge that is best on dev traces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.optimize import minimize

from accept_head.base import base_functions
from accept_head.signals import SIGNALS
from accept_head.trace.columns import ALTERNATIVE_COLUMNS, trace_features
from accept_head.training.learn import base as module
from accept_head.training.learn.base import Labelled, divergence, fit_base, qualities, train_quality
from accept_head.training.learn.data import labelled_places

COUNT = 4000
TRUTH = torch.tensor([0.4, -0.3, 0.0, 0.0, 0.5, 0.3, -0.4, 0.0, 0.2], dtype=torch.float64)


def signals_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    largest = torch.rand(count, generator=generator).clamp(0.02, 0.999)
    other = torch.rand(count, generator=generator) < 0.3
    logprob = torch.where(other, (1 - largest).log() - torch.rand(count, generator=generator), largest.log())
    entropy = -3 * largest.log() + 0.5 * torch.rand(count, generator=generator)
    return torch.stack([logprob, entropy, largest], dim=-1)


def labelled(count=COUNT, seed=0, hard=True):
    """Tokens whose acceptance is a logistic function of the base's own functions."""
    signals = signals_of(count, seed)
    chance = torch.sigmoid(base_functions(signals.double()) @ TRUTH + 1.0).float()
    label = torch.bernoulli(chance, generator=torch.Generator().manual_seed(seed + 1)) if hard else chance
    return Labelled(signals, label[:, None], 1 - label[:, None])


def fit(train, dev, **options):
    return fit_base(train, dev, hidden_size=8, signals=SIGNALS, predicts="token", **options)


def test_the_truth_is_found():
    train, dev = labelled(20_000, hard=False), labelled(seed=5, hard=False)
    head = fit(train, dev)
    assert divergence(head.base_logits(dev.signals), dev) < 1e-4
    constant = torch.logit(train.accept.mean()).expand(len(dev.signals), 1)
    assert divergence(constant, dev) > 0.05, "there was nothing to find"


@pytest.mark.parametrize(("w_acc", "w_rej"), [(1.0, 1.0), (1.0, 6.0)])
def test_it_is_the_optimum_of_weighted_cross_entropy_and_ridge(monkeypatch, w_acc, w_rej):
    """By scipy, from the definition."""
    monkeypatch.setattr(module, "RIDGES", (3.0,))
    train = labelled(500)
    head = fit(train, train, w_acc=w_acc, w_rej=w_rej)
    x, a, r = (
        each.double().numpy() for each in (head.normalised(train.signals), train.accept[:, 0], train.reject[:, 0])
    )

    def loss(weights):
        z = x @ weights[:-1] + weights[-1]
        return (w_acc * a * np.logaddexp(0, -z) + w_rej * r * np.logaddexp(0, z)).sum() + 1.5 * (
            weights[:-1] ** 2
        ).sum()

    best = minimize(loss, np.zeros(x.shape[1] + 1), tol=1e-10)
    found = np.append(head.base.weight.detach().numpy()[0], head.base.bias.item())
    np.testing.assert_allclose(found, best.x, atol=2e-3)
    assert loss(found) <= best.fun * (1 + 1e-6)


@pytest.mark.parametrize(("count", "worst"), [(30, 1e-3), (20_000, 1e4)])
def test_the_ridge_is_chosen_on_dev(monkeypatch, count, worst):
    """Of few tokens a small one fits them alone; of many a large one keeps from learning."""
    kls, train, dev, ridges = {}, labelled(count), labelled(seed=5), (1e-3, 3.0, 1e4)
    for ridge in ridges:
        monkeypatch.setattr(module, "RIDGES", (ridge,))
        kls[ridge] = divergence(fit(train, dev).base_logits(dev.signals), dev)
    monkeypatch.setattr(module, "RIDGES", ridges)
    assert divergence(fit(train, dev).base_logits(dev.signals), dev) == min(kls.values()) < kls[worst]


def test_a_function_that_does_not_vary_does_no_harm():
    """Greedy decoding: Y is the most likely token; log q − log max q is 0 but for rounding, which is not blown up."""
    train = labelled()
    train.signals[:, 0] = train.signals[:, 2].log()
    head = fit(train, train)
    rounded = train.signals.clone()
    rounded[:, 0] += 1e-6
    torch.testing.assert_close(head.base_logits(rounded), head.base_logits(train.signals), rtol=1e-3, atol=1e-3)


def test_each_prediction_learns_of_the_tokens_where_it_counts():
    train = labelled()
    both = Labelled(train.signals, train.accept.repeat(1, 2), train.reject.repeat(1, 2))
    both.accept[:2000, 1] = both.reject[:2000, 1] = 0.0  # not known there
    head = fit_base(both, both, hidden_size=8, signals=SIGNALS, predicts="both")
    half = Labelled(*(part[2000:] for part in train))
    one = fit(half, half)
    torch.testing.assert_close(
        head.base_logits(train.signals)[:, 1], one.base_logits(train.signals)[:, 0], rtol=0.05, atol=0.05
    )
    found, numbers = qualities(head, both), train_quality(head, both)
    assert (found["token"].count, found["next"].count) == (COUNT, COUNT - 2000)
    for name in ("token", "next"):
        assert numbers[name]["count"] == found[name].count
        assert numbers[name]["binary_kl"] == pytest.approx(found[name].binary_kl)


@pytest.mark.parametrize("alternatives", [0, 2])
def test_labels_are_those_of_the_traces(make_traces, alternatives):
    records = make_traces([(3, 9), (6, 2), (2, 14)])
    if alternatives:
        for record in records:
            count = alternatives * len(record["draft_ids"])
            record |= {"alternative_ids": [12] * count, "alternative_logprob": [-1.0] * count}
            record |= {"alternative_acceptance": [0.25] * count}
    names = trace_features(alternatives=bool(alternatives))
    traces = Dataset.from_list(records, features=names)
    found = Labelled.of(labelled_places(traces, "prefix", [0], alternatives=alternatives), [0])
    positions = sum(len(record["draft_ids"]) for record in records)
    accepted = sum(sum(record["acceptance"]) for record in records)
    assert float(found.accept.sum()) == pytest.approx(accepted + 0.25 * alternatives * positions, rel=1e-5)
    assert float((found.accept + found.reject).sum()) == pytest.approx(positions * (1 + alternatives))
    assert ("alternative_ids" in ALTERNATIVE_COLUMNS) and found.signals.shape[1] == 3
