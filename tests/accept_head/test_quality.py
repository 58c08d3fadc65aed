"""Quality of predictions against numpy and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit, rel_entr
from sklearn.metrics import brier_score_loss, roc_auc_score

from accept_head.errors import InputError
from accept_head.quality import auroc, binary_kl, brier, expected_calibration_error, quality


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


def test_brier_is_the_mean_squared_error():
    predicted, labels = sample()
    assert brier(*tensors(predicted, labels)) == pytest.approx(np.mean((predicted - labels) ** 2), rel=1e-12)
    predicted, labels = sample(hard=True)
    assert brier(*tensors(predicted, labels)) == pytest.approx(brier_score_loss(labels, predicted), rel=1e-12)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_is_the_weighted_gap_of_equal_width_bins(bins):
    predicted, labels = sample()
    found = expected_calibration_error(*tensors(predicted, labels), bins)
    assert found == pytest.approx(numpy_ece(predicted, labels, bins), rel=1e-9)


def test_calibration_error_of_four_positions_by_hand():
    # two bins: [0, ½) holds 0.2 and 0.4 with labels 0, 1: gap |0.3 − 0.5| = 0.2;  [½, 1] holds 0.9 and 1.0 with labels
    # 1, 0: gap |0.95 − 0.5| = 0.45.  ECE = ½·0.2 + ½·0.45 = 0.325
    assert expected_calibration_error(*tensors([0.2, 0.4, 0.9, 1.0], [0, 1, 1, 0]), 2) == pytest.approx(0.325)


def test_perfect_calibration_has_no_error_and_a_shift_has():
    predicted, _ = sample()
    assert expected_calibration_error(*tensors(predicted, predicted)) == pytest.approx(0, abs=1e-12)
    shifted = np.clip(predicted - 0.1, 0, 1)
    assert expected_calibration_error(*tensors(shifted, predicted)) == pytest.approx(
        (predicted - shifted).mean(), abs=0.01
    )


def test_auroc_of_hard_labels_is_that_of_scikit_learn():
    predicted, labels = sample(hard=True)
    assert auroc(*tensors(predicted, labels)) == pytest.approx(roc_auc_score(labels, predicted), rel=1e-12)


def test_auroc_of_soft_labels_is_that_of_weighted_hard_ones():
    predicted, labels = sample()
    assert auroc(*tensors(predicted, labels)) == pytest.approx(auroc_of_expanded_labels(predicted, labels), rel=1e-12)


def test_auroc_counts_ties_one_half():
    predicted, labels = sample()
    coarse = predicted.round(1)
    assert auroc(*tensors(coarse, labels)) == pytest.approx(auroc_of_expanded_labels(coarse, labels), rel=1e-12)
    # pairs (positive, negative): (0.5, 0.5) tie, (0.5, 0.2) right, (0.8, ·) right twice → (½ + 1 + 1 + 1) / 4
    assert auroc(*tensors([0.5, 0.8, 0.5, 0.2], [1, 1, 0, 0])) == pytest.approx(0.875)


def test_auroc_of_reversed_scores_is_reversed():
    predicted, labels = sample(hard=True)
    right = auroc(*tensors(predicted, labels))
    assert right > 0.6
    assert auroc(*tensors(1 - predicted, labels)) == pytest.approx(1 - right, rel=1e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auroc_is_one_half_when_one_class_has_no_weight(label):
    assert auroc(*tensors([0.1, 0.5, 0.9], [label] * 3)) == 0.5


def test_a_constant_predictor_ranks_nothing_and_is_off_by_the_difference_of_the_means():
    _, labels = sample()
    found = quality(torch.full((len(labels),), float(logit(0.8))), torch.tensor(labels))
    assert found.auroc == pytest.approx(0.5, abs=1e-12)
    assert found.ece == pytest.approx(abs(0.8 - labels.mean()), rel=1e-6)
    assert found.mean_predicted == pytest.approx(0.8, rel=1e-6)


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


def test_no_constant_beats_the_mean_label():
    _, labels = sample()
    best = quality(torch.zeros(len(labels)), torch.tensor(labels)).constant_kl
    assert quality(torch.full((len(labels),), logit(labels.mean())), torch.tensor(labels)).binary_kl == pytest.approx(
        best
    )
    for constant in (labels.mean() - 0.05, labels.mean() + 0.05):
        assert quality(torch.full((len(labels),), logit(constant)), torch.tensor(labels)).binary_kl > best + 1e-3


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
