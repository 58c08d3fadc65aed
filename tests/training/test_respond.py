"""Responses against transformers' own generation, one row at a time, and against the exact distribution."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig

from accept_head import Sampling
from accept_head.pair import end_ids
from accept_head.training.respond.transformers import respond, respond_with_logits

GREEDY = Sampling(temperature=0)
PROMPTS = [[1, 40, 41], [1, 100, 7, 8, 9, 60, 61, 62], [1], [1, 200, 201, 30, 31]]


@pytest.fixture
def model(random_llama):
    return random_llama(1)


@pytest.fixture
def tokenizer(byte_tokenizer):
    return byte_tokenizer()


def generated_alone(model, prompt, max_new_tokens, **options):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
    return out[0, len(prompt) :].tolist()


def test_greedy_responses_equal_generate_row_by_row(model, tokenizer):
    expected = [generated_alone(model, prompt, 20, do_sample=False) for prompt in PROMPTS]
    assert respond(model, tokenizer, PROMPTS, GREEDY, max_new_tokens=20, seed=0) == expected
    assert len({tuple(row) for row in expected}) == len(PROMPTS), "equal rows would prove little"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_that_each_token_was_drawn_from(model, tokenizer, dtype):
    """In the target's own dtype and before any processing; by a forward of each row alone."""
    model = model.to(dtype)
    said = respond_with_logits(model, tokenizer, PROMPTS, Sampling(temperature=0.7), max_new_tokens=12, seed=3)
    for prompt, (ids, logits) in zip(PROMPTS, said, strict=True):
        alone = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.dtype == dtype and len(logits) == len(ids)
        tolerance = 1e-4 if dtype == torch.float32 else 0.15
        torch.testing.assert_close(logits, alone, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(logits.float(), logits.float().roll(1, 0), atol=0.15), "any position would do"


def test_greedy_responses_of_the_trained_pair_equal_generate_row_by_row(embedded_pair):
    texts = ["Once upon a time", "<|user|>What are three ways to build a pillow fort?<|assistant|>", "The"]
    prompts = [embedded_pair.tokenizer(text)["input_ids"] for text in texts]
    expected = [generated_alone(embedded_pair.target, prompt, 16, do_sample=False) for prompt in prompts]
    assert (
        respond(embedded_pair.target, embedded_pair.tokenizer, prompts, GREEDY, max_new_tokens=16, seed=0) == expected
    )


def test_comparison_would_see_padding_that_is_attended_to(model):
    prompt = PROMPTS[0]
    padded = torch.tensor([[0] * 5 + prompt])
    seen = model.generate(padded, attention_mask=torch.ones_like(padded), max_new_tokens=20, do_sample=False)
    assert seen[0, padded.shape[1] :].tolist() != generated_alone(model, prompt, 20, do_sample=False)


def test_top_k_1_equals_greedy(model, tokenizer):
    greedy = respond(model, tokenizer, PROMPTS, GREEDY, max_new_tokens=12, seed=0)
    assert respond(model, tokenizer, PROMPTS, Sampling(top_k=1), max_new_tokens=12, seed=7) == greedy
    assert respond(model, tokenizer, PROMPTS, Sampling(top_k=0), max_new_tokens=12, seed=7) != greedy


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, top_k=6), Sampling(top_k=0, top_p=0.8), Sampling(temperature=1.5, top_k=0)]
)
def test_first_token_is_drawn_from_the_processed_distribution(model, tokenizer, sampling):
    """Chi-square over 4,000 draws at one position; a right sampler fails with p = 1e-4."""
    prompt, draws = PROMPTS[1], 4000
    logits = model(torch.tensor([prompt])).logits[0, -1].double() / sampling.temperature
    probabilities = logits.softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = torch.zeros_like(probabilities, dtype=torch.bool)
    mass = 0.0
    for rank, token in enumerate(order.tolist()):  # top-k, then top-p: the fewest tokens that reach the mass
        if (sampling.top_k and rank >= sampling.top_k) or mass >= sampling.top_p:
            break
        kept[token] = True
        mass += probabilities[token].item()
    expected = torch.where(kept, probabilities, 0) / probabilities[kept].sum()

    rows = respond(model, tokenizer, [prompt] * draws, sampling, max_new_tokens=1, seed=3)
    counts = torch.bincount(torch.tensor(rows).flatten(), minlength=261).double()
    assert counts[~kept].sum() == 0, "a token was drawn that the settings exclude"
    assert binned_p_value(counts, expected * draws) > 1e-4
    wrong = model(torch.tensor([prompt])).logits[0, -1].double().div(1.2 * sampling.temperature).softmax(-1) * kept
    assert binned_p_value(counts, wrong / wrong.sum() * draws) < 1e-4, "the test has no power"


def binned_p_value(counts, expected):
    """Chi-square; tokens expected less than 5 times share one bin."""
    often = expected >= 5
    observed = [*counts[often].tolist(), counts[~often].sum().item()]
    wanted = [*expected[often].tolist(), expected[~often].sum().item()]
    if wanted[-1] < 1:
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    return chisquare(observed, wanted).pvalue


def test_models_own_generation_config_does_not_leak_in_and_is_put_back(model, tokenizer):
    odd = copy.deepcopy(model)
    # One thing that each of greedy and sampled generation would notice, and more.
    own = GenerationConfig(
        eos_token_id=2,
        pad_token_id=0,
        do_sample=True,
        top_p=0.01,
        repetition_penalty=50.0,
        temperature=0.01,
        num_beams=2,
    )
    odd.generation_config = own
    before = own.to_dict()
    for sampling in (GREEDY, Sampling(), Sampling(top_k=0)):
        plain = respond(model, tokenizer, PROMPTS, sampling, max_new_tokens=12, seed=5)
        assert respond(odd, tokenizer, PROMPTS, sampling, max_new_tokens=12, seed=5) == plain
    assert odd.generation_config is own and own.to_dict() == before
    greedy_with_own = [generated_alone(odd, prompt, 12, do_sample=False) for prompt in PROMPTS]
    assert greedy_with_own != respond(model, tokenizer, PROMPTS, GREEDY, max_new_tokens=12, seed=5), (
        "own changes nothing"
    )


def test_generation_config_is_put_back_when_generation_fails(model, tokenizer):
    own = model.generation_config
    with pytest.raises(IndexError):
        respond(model, tokenizer, [[1, 9999]], GREEDY, max_new_tokens=2, seed=0)
    assert model.generation_config is own


def test_same_batch_and_seed_give_the_same_responses_and_another_seed_others(model, tokenizer):
    first = respond(model, tokenizer, PROMPTS, Sampling(), max_new_tokens=12, seed=5)
    torch.manual_seed(99)
    assert respond(model, tokenizer, PROMPTS, Sampling(), max_new_tokens=12, seed=5) == first
    assert respond(model, tokenizer, PROMPTS, Sampling(), max_new_tokens=12, seed=6) != first


def test_global_random_state_is_untouched(model, tokenizer):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    respond(model, tokenizer, PROMPTS, Sampling(), max_new_tokens=4, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_response_ends_with_its_first_end_token(model, tokenizer, as_list):
    unended = respond(model, tokenizer, PROMPTS, GREEDY, max_new_tokens=12, seed=0)
    end = unended[1][4]
    model.generation_config.eos_token_id = [2, end] if as_list else end
    ended = respond(model, tokenizer, PROMPTS, GREEDY, max_new_tokens=12, seed=0)
    ends = {2, end} if as_list else {end}
    for row, full in zip(ended, unended, strict=True):
        first = next((i for i, token in enumerate(full) if token in ends), len(full) - 1)
        assert row == full[: first + 1]
    assert len(ended[1]) <= 5 < len(unended[1])


def test_end_ids_come_from_the_generation_config_or_else_the_tokenizer(model, tokenizer):
    model.generation_config.eos_token_id = [2, 9]
    assert end_ids(model, tokenizer) == [2, 9]
    model.generation_config.eos_token_id = None
    assert end_ids(model, tokenizer) == [2]
    tokenizer.eos_token = None
    assert end_ids(model, tokenizer) == []
    rows = respond(model, tokenizer, PROMPTS, GREEDY, max_new_tokens=6, seed=0)
    assert [len(row) for row in rows] == [6] * len(PROMPTS)
