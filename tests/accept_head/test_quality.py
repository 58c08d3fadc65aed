"""Quality of predictions against numpy and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit, rel_entr
from sklearn.metrics import roc_auc_score

from accept_head.errors import InputError
from accept_head.quality import auroc, binary_kl, expected_calibration_error, quality


def sample(count=500, hard=False, seed=0):
    """Predictions in (0, 1) and labels that lean the same way."""
    generator = np.random.default_rng(seed)
    predicted = generator.beta(2, 1, count)
    labels = np.clip(predicted + generator.normal(0, 0.3, count), 0, 1)
    if hard:
        labels = (generator.random(count) < labels).astype(float)
    return predicted, labels


def auroc_of_expanded_labels(predicted, labels):
    """A soft label a is a positive of weight a and a negative of weight 1 − a."""
    truth = np.repeat([1, 0], len(labels))
    return roc_auc_score(truth, np.tile(predicted, 2), sample_weight=np.concatenate([labels, 1 - labels]))


def numpy_ece(predicted, labels, bins):
    index = np.minimum((predicted * bins).astype(int), bins - 1)
    gaps = [
        abs(predicted[index == b].mean() - labels[index == b].mean()) * (index == b).mean() for b in np.unique(index)
    ]
    return sum(gaps)


def tensors(*arrays):
    return [torch.tensor(array, dtype=torch.float64) for array in arrays]


def equal_shares(count):
    return np.full(count, 1 / count)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_is_the_weighted_gap_of_equal_width_bins(bins):
    predicted, labels = sample()
    found = expected_calibration_error(*tensors(predicted, labels, equal_shares(len(labels))), bins)
    assert found == pytest.approx(numpy_ece(predicted, labels, bins), rel=1e-9)


def test_auroc_counts_ties_one_half():
    predicted, labels = sample()
    coarse = predicted.round(1)
    assert auroc(*tensors(coarse, labels, equal_shares(len(labels)))) == pytest.approx(
        auroc_of_expanded_labels(coarse, labels), rel=1e-12
    )
    # pairs (positive, negative): (0.5, 0.5) tie, (0.5, 0.2) right, (0.8, ·) right twice → (½ + 1 + 1 + 1) / 4
    assert auroc(*tensors([0.5, 0.8, 0.5, 0.2], [1, 1, 0, 0], equal_shares(4))) == pytest.approx(0.875)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auroc_is_one_half_when_one_class_has_no_weight(label):
    assert auroc(*tensors([0.1, 0.5, 0.9], [label] * 3, equal_shares(3))) == 0.5


def test_quality_collects_every_metric():
    predicted, labels = sample()
    found = quality(torch.tensor(logit(predicted)), torch.tensor(labels))
    constant = labels.mean()
    kl = rel_entr(labels, predicted) + rel_entr(1 - labels, 1 - predicted)
    constant_kl = rel_entr(labels, constant) + rel_entr(1 - labels, 1 - constant)
    assert found.to_dict() == pytest.approx(
        {
            "count": 500,
            "binary_kl": kl.mean(),
            "constant_kl": constant_kl.mean(),
            "brier": np.mean((predicted - labels) ** 2),
            "ece": numpy_ece(expit(logit(predicted)), labels, 15),
            "auroc": auroc_of_expanded_labels(predicted, labels),
            "mean_predicted": predicted.mean(),
            "mean_observed": labels.mean(),
        },
        rel=1e-9,
    )


def test_a_weight_is_so_many_positions():
    predicted, labels = sample(50)
    times = np.arange(50) % 4
    logits, labels = torch.tensor(logit(predicted)), torch.tensor(labels)
    found, expected = (
        quality(logits, labels, torch.tensor(times)),
        quality(*(values.repeat_interleave(torch.tensor(times)) for values in (logits, labels))),
    )
    assert found.to_dict() == pytest.approx(expected.to_dict(), rel=1e-9)
    assert found.binary_kl != pytest.approx(quality(logits, labels).binary_kl, rel=1e-3)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_of_one_kind_only_give_finite_numbers(label):
    found = quality(torch.tensor([-2.0, 0.0, 3.0]), torch.full((3,), label))
    assert all(np.isfinite(value) for value in found.to_dict().values())
    assert found.constant_kl == pytest.approx(0, abs=1e-9)


def test_float32_logits_are_judged_in_float64():
    predicted, labels = sample(20000)
    found = quality(torch.tensor(logit(predicted)).float(), torch.tensor(labels).float())
    assert found.mean_observed == pytest.approx(labels.mean(), abs=1e-7)
    assert found.auroc == pytest.approx(auroc_of_expanded_labels(predicted, labels), abs=1e-6)


def test_no_positions_is_an_input_error():
    with pytest.raises(InputError, match="no positions"):
        quality(torch.empty(0), torch.empty(0))
    with pytest.raises(InputError, match="no positions"):
        quality(torch.zeros(2), torch.ones(2), torch.zeros(2))


# --- binary KL

probability = st.floats(1e-9, 1 - 1e-9)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.one_of(probability, st.sampled_from([0.0, 1.0])), st.floats(-15, 15))
def test_binary_kl_is_the_relative_entropy_of_two_coins(label, z):
    expected = rel_entr(label, expit(z)) + rel_entr(1 - label, expit(-z))
    found = binary_kl(torch.tensor(label, dtype=torch.float64), torch.tensor(z, dtype=torch.float64)).item()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_binary_kl_of_a_certain_miss_is_the_logit():
    labels, logits = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([-80.0, 80.0, 80.0, -80.0])
    assert binary_kl(labels, logits).tolist() == pytest.approx([80, 80, 0, 0], abs=1e-12)
