"""Processed distributions against numpy and against transformers' `generate`; draws against the inverse CDF."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, TopPLogitsWarper

from accept_head import sampling
from accept_head.errors import InputError
from accept_head.sampling import Sampling, draw
from tests.examples import generation_kwargs

VOCAB = 12
SETTINGS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 3, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.6},
    {"temperature": 1.6, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.3, "top_k": 500, "top_p": 0.95},
]


def logits(rows=6, vocab=VOCAB, seed=0):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def numpy_probabilities(row, temperature, top_k, top_p):
    """Temperature, then top-k, then top-p: the smallest set of most likely tokens whose probability reaches top_p."""
    scores = row.numpy().astype(np.float64) / temperature
    order = np.argsort(-scores)
    keep = order[:top_k] if top_k else order
    weights = np.exp(scores[keep] - scores[keep].max())
    weights /= weights.sum()
    size = int(np.searchsorted(np.cumsum(weights), top_p)) + 1 if top_p < 1 else len(keep)
    result = np.zeros_like(scores)
    result[keep[:size]] = weights[:size] / weights[:size].sum()
    return result


@pytest.mark.parametrize("values", SETTINGS, ids=str)
def test_probabilities_follow_the_formula(values):
    found = Sampling(**values).probabilities(logits())
    for row, expected in zip(found, logits(), strict=True):
        assert np.allclose(row, numpy_probabilities(expected, **values), atol=1e-6)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("values", SETTINGS, ids=str)
def test_generate_samples_from_the_same_distribution(model, values):
    sampling = Sampling(**values)
    torch.manual_seed(1)
    out = model.generate(
        torch.tensor([[1, 2, 3], [3, 2, 1]]),
        attention_mask=torch.ones(2, 3, dtype=torch.long),
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **generation_kwargs(sampling),
    )
    for raw, processed in zip(out.logits, out.scores, strict=True):
        assert torch.allclose(sampling.probabilities(raw), processed.softmax(-1), atol=1e-7)


def test_generate_is_greedy_at_temperature_zero(model):
    sampling = Sampling(temperature=0)
    out = model.generate(
        torch.tensor([[1, 2, 3]]),
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_logits=True,
        **generation_kwargs(sampling),
    )
    for step, raw in enumerate(out.logits):
        assert sampling.probabilities(raw)[0, out.sequences[0, 3 + step]] == 1


def test_greedy_is_one_hot_on_the_argmax():
    found = Sampling(temperature=0, top_k=2, top_p=0.5).probabilities(logits())
    assert torch.equal(found, torch.eye(VOCAB)[logits().argmax(-1)])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)], ids=str)
def test_any_leading_shape_is_processed_row_by_row(temperature, shape):
    sampling = Sampling(temperature=temperature, top_k=4, top_p=0.9)
    values = torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(2))
    found = sampling.probabilities(values)
    assert found.shape == values.shape
    for row in np.ndindex(*shape):
        assert torch.equal(found[row], sampling.probabilities(values[row][None])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probabilities_are_float32_whatever_the_logits_are(dtype):
    found = Sampling(temperature=0.8, top_k=0).probabilities(logits().to(dtype))
    assert found.dtype == torch.float32
    assert torch.equal(found, Sampling(temperature=0.8, top_k=0).probabilities(logits().to(dtype).float()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_an_input_error_that_names_it(field, value):
    with pytest.raises(InputError, match=f"^{field} is "):
        Sampling(**{field: value})


# --- draws


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
def test_a_draw_is_the_inverse_cdf_on_a_grid_of_uniforms(weights):
    """With integer weights of total W, the uniform (i + ½)/W falls in the middle of the i-th of W equal slots."""
    total = sum(weights)
    expected = np.repeat(np.arange(len(weights)), weights)
    uniforms = (torch.arange(total, dtype=torch.float64) + 0.5) / total
    found = draw(torch.tensor(weights, dtype=torch.float64).expand(total, -1), uniforms)
    assert np.array_equal(found, expected)


def test_a_draw_at_a_step_belongs_to_the_token_above_it():
    """Intervals are closed below and open above: P(y) is exactly the width of [F(y−1), F(y))."""
    probabilities = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.25 - 2**-54, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities.expand(5, -1), uniforms).tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_a_draw_never_returns_a_token_of_probability_zero(dtype, uniform):
    generator = torch.Generator().manual_seed(3)
    probabilities = torch.rand(400, 1000, generator=generator, dtype=dtype)
    probabilities[torch.rand(400, 1000, generator=generator) < 0.9] = 0
    probabilities[:, :5] = 0
    probabilities[:, -5:] = 0
    probabilities /= probabilities.sum(-1, keepdim=True)
    found = draw(probabilities, torch.full((400,), uniform, dtype=torch.float64))
    assert (probabilities.gather(-1, found[:, None]) > 0).all()


def test_a_draw_at_the_upper_end_is_of_the_last_token_that_has_probability():
    """Rounding leaves the sum below the largest uniform."""
    probabilities = torch.tensor([0.1] * 10 + [0.0], dtype=torch.float64)
    assert draw(probabilities, torch.tensor(1 - 2.0**-53, dtype=torch.float64)).item() == 9


def test_a_uniform_that_was_rounded_up_to_one_still_draws_a_token_of_positive_probability():
    uniform = torch.tensor(1 - 2.0**-53, dtype=torch.float32)
    assert uniform == 1
    assert draw(torch.tensor([0.0, 0.3, 0.7, 0.0, 0.0]), uniform).item() == 2


def test_unnormalised_weights_are_drawn_like_their_distribution():
    generator = torch.Generator().manual_seed(4)
    weights = torch.rand(50, 7, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    assert torch.equal(draw(weights, uniforms), draw(weights / weights.sum(-1, keepdim=True), uniforms))


@pytest.mark.parametrize("scale", [0.2, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_by_the_likeliest_tokens_keeps_what_sorting_all_keeps(scale, top_p):
    """With a flat distribution, with one that 4,096 tokens cover, and with one that 256 do."""
    scores = logits(rows=8, vocab=6000) * scale / 3
    kept = Sampling(top_k=0, top_p=top_p).probabilities(scores) > 0
    warped = TopPLogitsWarper(top_p)(None, scores).softmax(-1)
    assert torch.equal(kept, warped > 0)
    few = sampling._top_p_of_few(scores, top_p)
    assert (few is None) == (int(kept.sum(-1).max()) > 4096)


def test_the_likeliest_token_is_the_first_of_equals():
    for dtype in (torch.float32, torch.bfloat16):
        scores = logits(vocab=700).round().to(dtype)
        assert sampling.likeliest(scores).tolist() == scores.float().argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [1, 511, 512, 513, 2000])
def test_draws_by_blocks_are_those_of_cumulative_sums(vocab):
    """The inverse CDF in float64 over the whole vocabulary, with tokens of probability 0 at both ends."""
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(5, vocab, generator=generator) ** 8
    weights[:, : vocab // 3] = 0.0
    weights[0, vocab // 2 + 1 :] = 0.0
    uniform = torch.cat([torch.rand(5, 200, generator=generator, dtype=torch.float64), torch.zeros(5, 1)], dim=1)
    cumulative = weights.double().cumsum(-1)
    found = sampling.draw_several(weights, uniform)
    expected = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    assert torch.equal(found, expected)
    assert (weights.gather(1, found) > 0).all()
    end = sampling.draw_several(weights, torch.ones(5, 1, dtype=torch.float64))
    assert (weights.gather(1, end) > 0).all(), "rounding up selects no token without probability"
