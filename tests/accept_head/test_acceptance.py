"""Acceptance, residual and post-hoc coupling, by exact enumeration on vocabularies of 3 to 5 tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from accept_head.acceptance import acceptance_probability, couple_with_target, divergence, overlap, residual

EXACT = 1e-12  # float64 sums over at most five tokens
enumerated = settings(derandomize=True, deadline=None, max_examples=150)


def normalised(weights):
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()


@st.composite
def pairs(draw_value):
    """(p, q) on the same 3-5 tokens; small integer weights make zeros, ties, one-hots and p = q common."""
    vocab = draw_value(st.integers(3, 5))
    weights = st.lists(st.integers(0, 4), min_size=vocab, max_size=vocab).filter(any)
    return normalised(draw_value(weights)), normalised(draw_value(weights))


def emitted_distribution(p, q, redraw):
    """What verification emits: Σ_y q(y)·a(y)·δ_y, and `redraw` with the probability that is left."""
    every_id = torch.arange(len(p))
    kept = torch.where(q > 0, q * acceptance_probability(p.expand(len(p), -1), q.expand(len(p), -1), every_id), 0)
    return kept + (1 - kept.sum()) * redraw


def joint_distribution(couple, p, q):
    """P(X = x, Y = y, accepted) as an array (vocab, vocab, 2), integrated exactly over both uniforms.

    `couple` is piecewise constant in the uniforms, and its steps can only lie at likelihood ratios (accept axis) or at
    cumulative sums of p, q or of a positive part (redraw axis). Each cell between steps is evaluated just inside its
    two ends and in the middle; they must agree, so a cell's value times its area is its integral.
    """
    p_, q_ = p.numpy(), q.numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(np.concatenate([q_ / p_, p_ / q_]), nan=0.0, posinf=1.0)
    parts = [p_, q_, np.clip(q_ - p_, 0, None), np.clip(p_ - q_, 0, None)]
    sums = np.concatenate([np.cumsum(part) / part.sum() for part in parts if part.sum() > 0])
    accept_steps, redraw_steps = (np.unique(np.clip(np.append(x, [0, 1]), 0, 1).round(13)) for x in (ratios, sums))

    def inside(steps):
        low, high = steps[:-1], steps[1:]
        margin = np.minimum(1e-9, (high - low) / 4)
        return np.stack([low + margin, (low + high) / 2, high - margin])  # (3, cells)

    accept_points, redraw_points = inside(accept_steps), inside(redraw_steps)
    joint = np.zeros((len(p_), len(p_), 2))
    areas = np.outer(np.diff(accept_steps), np.diff(redraw_steps))
    for x in np.flatnonzero(p_):
        grid = [
            couple(
                p.expand(*areas.shape, -1),
                q.expand(*areas.shape, -1),
                torch.full(areas.shape, int(x)),
                torch.tensor(accept_points[i])[:, None].expand(areas.shape),
                torch.tensor(redraw_points[i])[None, :].expand(areas.shape),
            )
            for i in range(3)
        ]
        ids, accepted = np.array(grid[1][0]), np.array(grid[1][1])
        for other_ids, other_accepted in (grid[0], grid[2]):
            assert np.array_equal(ids, other_ids) and np.array_equal(accepted, other_accepted), "not constant in a cell"
        np.add.at(joint, (x, ids, accepted.astype(int)), p_[x] * areas)
    return joint


# --- the three functions of one token


@enumerated
@given(pairs())
def test_acceptance_probability_is_the_clipped_likelihood_ratio(pair):
    p, q = pair
    ids = torch.nonzero(q).squeeze(-1)
    found = acceptance_probability(p.expand(len(ids), -1), q.expand(len(ids), -1), ids)
    assert np.allclose(found, np.minimum(1, p[ids].numpy() / q[ids].numpy()), atol=EXACT)


@enumerated
@given(pairs())
def test_overlap_is_one_minus_total_variation_and_the_expected_acceptance(pair):
    p, q = pair
    total_variation = np.abs(p.numpy() - q.numpy()).sum() / 2
    expected = sum(min(1, p[y] / q[y]) * q[y] for y in range(len(q)) if q[y] > 0)
    assert overlap(p, q).item() == pytest.approx(1 - total_variation, abs=EXACT)
    assert overlap(p, q).item() == pytest.approx(float(expected), abs=EXACT)


@enumerated
@given(pairs())
def test_residual_is_a_distribution_without_any_token_that_the_draft_overweights(pair):
    p, q = pair
    redraw = residual(p, q)
    assert redraw.sum().item() == pytest.approx(1, abs=EXACT) and (redraw >= 0).all()
    if not torch.equal(p, q):
        assert (redraw[p <= q] == 0).all()


@enumerated
@given(pairs())
def test_verification_emits_exactly_the_target_distribution(pair):
    p, q = pair
    assert np.allclose(emitted_distribution(p, q, residual(p, q)), p, atol=EXACT)


def test_equal_distributions_are_always_accepted_and_leave_the_target_as_residual():
    p = normalised([1, 2, 0, 4])
    assert (acceptance_probability(p.expand(3, -1), p.expand(3, -1), torch.tensor([0, 1, 3])) == 1).all()
    assert overlap(p, p).item() == pytest.approx(1, abs=EXACT)
    assert torch.equal(residual(p, p), p)


def test_leading_dimensions_are_independent_rows():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 3, 5, generator=generator).softmax(-1), torch.rand(2, 3, 5, generator=generator).softmax(-1)
    y = torch.randint(5, (2, 3), generator=generator)
    for row in np.ndindex(2, 3):
        assert acceptance_probability(p, q, y)[row] == acceptance_probability(p[row], q[row], y[row])
        assert overlap(p, q)[row] == overlap(p[row], q[row])
        assert torch.equal(residual(p, q)[row], residual(p[row], q[row]))


@enumerated
@given(pairs())
def test_float32_is_exact_to_rounding(pair):
    p, q = (distribution.float() for distribution in pair)
    assert np.allclose(emitted_distribution(p, q, residual(p, q)), p, atol=1e-6)


# --- post-hoc coupling


@settings(derandomize=True, deadline=None, max_examples=60)
@given(pairs())
def test_coupling_with_the_target_token_is_the_maximal_coupling(pair):
    """X ∼ p and Y ∼ q exactly, P(accepted, Y = y) = min(p(y), q(y)), accepted ⇔ Y = X."""
    p, q = pair
    joint = joint_distribution(couple_with_target, p, q)
    accepted, rejected = joint[:, :, 1], joint[:, :, 0]
    np.testing.assert_allclose(joint.sum((1, 2)), p, atol=1e-9)
    np.testing.assert_allclose(joint.sum((0, 2)), q, atol=1e-9)
    np.testing.assert_allclose(accepted, np.diag(torch.minimum(p, q).numpy()), atol=1e-9)
    np.testing.assert_allclose(np.diag(rejected), 0, atol=1e-9)


def test_an_accepted_token_has_a_positive_acceptance_probability_even_if_the_target_gives_it_none():
    """A response scored in another batch can fall outside the top-k; label and outcome must still agree."""
    p, q = normalised([0, 1, 1]), normalised([2, 1, 1])
    uniforms = torch.linspace(0, 0.999, 8, dtype=torch.float64)
    ids, accepted = couple_with_target(
        p.expand(8, -1), q.expand(8, -1), torch.zeros(8, dtype=torch.long), uniforms, uniforms.flip(0)
    )
    labels = acceptance_probability(p.expand(8, -1), q.expand(8, -1), ids)
    assert (labels[accepted] > 0).all(), f"accepted {int(accepted.sum())} of 8 tokens whose label is 0"


# --- divergence

INFINITE = float("inf")


def kl(p, q):
    """Σ p·log(p/q), by scipy, in float64."""
    return rel_entr(p.numpy(), q.numpy()).sum()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4),
    st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4),
    st.floats(-50, 50, width=32),
)
def test_divergence_is_the_kl_of_both_softmaxes(target, draft, shift):
    target, draft = torch.tensor(target), torch.tensor(draft)
    expected = kl(target.double().softmax(-1), draft.double().softmax(-1))
    assert divergence(target, draft).item() == pytest.approx(expected, abs=2e-6, rel=1e-4)
    assert divergence(target + shift, draft).item() == pytest.approx(expected, abs=5e-5, rel=1e-3)
    assert divergence(target, draft).item() >= 0


def test_divergence_of_equal_models_is_zero():
    logits = 10 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    assert (divergence(logits, logits.clone()) == 0).all()


def test_divergence_is_finite_or_infinite_but_never_nan():
    """A token that a model rules out: no matter, if the target does; infinite, if only the draft does."""
    target = torch.tensor([[0.0, 1.0, -INFINITE], [0.0, 1.0, -INFINITE], [0.0, 1.0, 2.0], [-1e30, 0.0, 1e4]])
    draft = torch.tensor([[1.0, 0.0, 3.0], [1.0, 0.0, -INFINITE], [1.0, 0.0, -INFINITE], [0.0, 1.0, 2.0]])
    values = divergence(target, draft)
    assert not values.isnan().any()
    for row in (0, 1, 3):
        expected = kl(target[row].double().softmax(-1), draft[row].double().softmax(-1))
        assert values[row].item() == pytest.approx(expected, rel=1e-5)
    assert values[2].item() == INFINITE


def test_divergence_has_one_value_a_row_and_takes_any_precision():
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 3, 5, 40, generator=generator)
    whole = divergence(target, draft)
    assert whole.shape == (3, 5) and whole.dtype == torch.float32
    assert torch.allclose(divergence(target[1], draft[1]), whole[1], atol=1e-6)
    half = divergence(target.bfloat16(), draft.bfloat16())
    assert half.dtype == torch.float32 and torch.allclose(half, whole, atol=0.05)
