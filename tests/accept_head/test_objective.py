"""Weighted soft-label cross-entropy and binary KL against numpy and scipy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit, rel_entr

from accept_head.objective import binary_kl, weighted_bce


def numpy_bce(logits, labels, mask, w_acc, w_rej):
    """Numerator and denominator of docs/theory.md §4 in float64; −log sigmoid(z) = log(1 + e^−z)."""
    z, a = logits.numpy().astype(np.float64)[mask], labels.numpy().astype(np.float64)[mask]
    loss = w_acc * a * np.logaddexp(0, -z) + w_rej * (1 - a) * np.logaddexp(0, z)
    return loss.sum(), (w_acc * a + w_rej * (1 - a)).sum()


def batch(shape=(5, 40), seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(shape, generator=generator)
    labels[labels > 0.6] = 1.0  # as in traces: most labels are exactly one, some exactly zero
    labels[labels < 0.1] = 0.0
    return 4 * torch.randn(shape, generator=generator), labels, torch.rand(shape, generator=generator) < 0.7


@pytest.mark.parametrize(("w_acc", "w_rej"), [(1, 1), (1, 6), (2.5, 12), (1, 0), (0, 1)])
def test_weighted_bce_follows_the_formula(w_acc, w_rej):
    logits, labels, mask = batch()
    found = weighted_bce(logits, labels, mask, w_acc=w_acc, w_rej=w_rej)
    value, weight = numpy_bce(logits, labels, mask.numpy(), w_acc, w_rej)
    assert found.value.item() == pytest.approx(value, rel=1e-5)
    assert found.weight.item() == pytest.approx(weight, rel=1e-5)


def test_weighted_bce_of_three_positions_by_hand():
    # z = 0: P̂ = ½, both logs are log ½.  a = 1, ½, 0 with w_rej = 3:
    #   value = ln 2·(1 + (½ + 3·½) + 3) = 6 ln 2        weight = 1 + 2 + 3 = 6        loss = ln 2
    found = weighted_bce(torch.zeros(3), torch.tensor([1, 0.5, 0]), torch.ones(3, dtype=torch.bool), w_rej=3)
    assert found.weight.item() == 6
    assert found.value.item() == pytest.approx(6 * np.log(2), rel=1e-6)


def test_a_wrong_weight_gives_another_loss():
    logits, labels, mask = batch()
    right = weighted_bce(logits, labels, mask, w_rej=6)
    value, weight = numpy_bce(logits, labels, mask.numpy(), 1, 3)
    assert (right.value / right.weight).item() != pytest.approx(value / weight, rel=0.01)


@pytest.mark.parametrize("logit_value", [80.0, -80.0])
@pytest.mark.parametrize("label", [0.0, 0.25, 1.0])
def test_extreme_logits_stay_finite_and_exact(logit_value, label):
    logits, labels = torch.tensor([logit_value], requires_grad=True), torch.tensor([label])
    found = weighted_bce(logits, labels, torch.tensor([True]), w_rej=6)
    value, _ = numpy_bce(logits.detach(), labels, np.array([True]), 1, 6)
    found.value.backward()
    assert found.value.item() == pytest.approx(value, rel=1e-6, abs=1e-30)
    # d/dz = −a·(1 − P̂) + w_rej·(1 − a)·P̂
    assert logits.grad.item() == pytest.approx(
        -label * expit(-logit_value) + 6 * (1 - label) * expit(logit_value), abs=1e-6
    )


def test_sums_over_split_batches_equal_the_whole():
    logits, labels, mask = batch((8, 64))
    whole = weighted_bce(logits, labels, mask, w_rej=6)
    parts = [weighted_bce(*rows, w_rej=6) for rows in zip(logits.split(3), labels.split(3), mask.split(3), strict=True)]
    assert sum(part.value.item() for part in parts) == pytest.approx(whole.value.item(), rel=1e-5)
    assert sum(part.weight.item() for part in parts) == pytest.approx(whole.weight.item(), rel=1e-5)
    mean_of_means = np.mean([(part.value / part.weight).item() for part in parts])
    assert mean_of_means != pytest.approx((whole.value / whole.weight).item(), rel=1e-4)


def test_masked_positions_have_neither_value_nor_gradient():
    logits, labels, mask = batch()
    logits.requires_grad_()
    weighted_bce(logits, labels, mask).value.backward()
    assert (logits.grad[~mask] == 0).all() and (logits.grad[mask] != 0).any()
    changed = torch.where(mask, logits.detach(), -50.0)
    assert weighted_bce(changed, labels, mask).value == weighted_bce(logits.detach(), labels, mask).value


def test_an_empty_mask_sums_to_zero():
    logits, labels, mask = batch()
    found = weighted_bce(logits, labels, torch.zeros_like(mask))
    assert found.value.item() == 0 and found.weight.item() == 0


def test_half_precision_logits_are_summed_in_float32():
    logits, labels, mask = batch((50, 400))
    found = weighted_bce(logits.bfloat16(), labels.bfloat16(), mask)
    value, weight = numpy_bce(logits.bfloat16().float(), labels.bfloat16().float(), mask.numpy(), 1, 1)
    assert found.value.dtype == torch.float32
    assert found.value.item() == pytest.approx(value, rel=1e-5) and found.weight.item() == pytest.approx(
        weight, rel=1e-5
    )


# --- binary KL

probability = st.floats(1e-9, 1 - 1e-9)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.one_of(probability, st.sampled_from([0.0, 1.0])), st.floats(-15, 15))
def test_binary_kl_is_the_relative_entropy_of_two_coins(label, z):
    expected = rel_entr(label, expit(z)) + rel_entr(1 - label, expit(-z))
    found = binary_kl(torch.tensor(label, dtype=torch.float64), torch.tensor(z, dtype=torch.float64)).item()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(derandomize=True, deadline=None)
@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_binary_kl_is_zero_only_where_label_and_prediction_are_equal(label, predicted):
    found = binary_kl(
        torch.tensor(label, dtype=torch.float64), torch.tensor(logit(predicted), dtype=torch.float64)
    ).item()
    # Pinsker: KL ≥ 2·(a − P̂)²
    assert found >= 2 * (label - predicted) ** 2 - 1e-12
    same = binary_kl(torch.tensor(label, dtype=torch.float64), torch.tensor(logit(label), dtype=torch.float64)).item()
    assert same == pytest.approx(0, abs=1e-12)


def test_binary_kl_of_a_certain_miss_is_the_logit():
    labels, logits = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([-80.0, 80.0, 80.0, -80.0])
    assert binary_kl(labels, logits).tolist() == pytest.approx([80, 80, 0, 0], abs=1e-12)


def test_binary_kl_is_not_symmetric():
    a, b = 0.9, 0.5
    one, other = (binary_kl(torch.tensor(x), torch.tensor(logit(y))).item() for x, y in ((a, b), (b, a)))
    assert abs(one - other) > 0.1
