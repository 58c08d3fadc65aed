"""Responses by our loop, and their scores: against transformers' generation, the exact distribution, and `score`."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig

from accept_head import InputError, Pair, Sampling
from accept_head.prompts import Prompt
from accept_head.training.collect import decoding as module
from accept_head.training.collect.decoding import Decoding
from accept_head.training.collect.score import score
from tests.training.generated import generated
from tests.training.records import make_records

DEFAULT, GREEDY = Sampling(), Sampling(temperature=0)
PROMPTS = [[1, 40, 41], [1, 100, 7, 8, 9, 60, 61, 62], [1, 5], [1, 200, 201, 30, 31], [1, 9], [1, 77, 78], [1, 5, 6]]


@dataclass(frozen=True)
class Settings:
    """The part of a TraceConfig that decoding reads."""

    sampling: Sampling = DEFAULT
    max_new_tokens: int = 20
    seed: int = 5
    batch_size: int = 3
    shard_size: int = 64
    alternatives: int | None = None
    depths: int | None = None
    end_token_ids: tuple[int, ...] = ()


@pytest.fixture
def pair(random_llama, byte_tokenizer):
    target = random_llama(1)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a draft that is like its target, so that some candidates are accepted
        for weight in draft.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
    return Pair(target, draft, byte_tokenizer(), 261)


def as_prompts(prompts):
    return [Prompt(index + 10, str(index), "", tuple(prompt)) for index, prompt in enumerate(prompts)]


def responses(pair, settings, prompts=PROMPTS, **options):
    return [record["response_ids"] for record in make_records(pair, as_prompts(prompts), settings, **options)]


def test_greedy_responses_equal_generate_row_by_row(pair):
    expected = generated(pair.target, pair.tokenizer, PROMPTS, GREEDY, max_new_tokens=20)
    assert responses(pair, Settings(GREEDY, end_token_ids=(2,))) == expected
    assert len({tuple(row) for row in expected}) == len(PROMPTS), "equal rows would prove little"


def test_greedy_responses_of_the_trained_pair_equal_generate_row_by_row(embedded_pair):
    texts = ["Once upon a time", "<|user|>What are three ways to build a pillow fort?<|assistant|>", "The"]
    prompts = [embedded_pair.tokenizer(text)["input_ids"] for text in texts]
    expected = generated(embedded_pair.target, embedded_pair.tokenizer, prompts, GREEDY, max_new_tokens=24)
    settings = Settings(GREEDY, max_new_tokens=24, batch_size=2, end_token_ids=(embedded_pair.tokenizer.eos_token_id,))
    assert responses(embedded_pair, settings, prompts) == expected


def test_top_k_1_equals_greedy(pair):
    greedy = responses(pair, Settings(GREEDY))
    assert responses(pair, Settings(Sampling(top_k=1), seed=7)) == greedy
    assert responses(pair, Settings(Sampling(top_k=0), seed=7)) != greedy


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7, top_k=6), Sampling(top_k=0, top_p=0.8), Sampling(temperature=1.5, top_k=0)]
)
def test_first_token_is_drawn_from_the_processed_distribution(pair, sampling):
    """Chi-square over 4,000 draws at one position; a right sampler fails with p = 1e-4."""
    prompt, draws = PROMPTS[1], 4000
    logits = pair.target(torch.tensor([prompt])).logits[0, -1].detach().double() / sampling.temperature
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

    settings = Settings(sampling, max_new_tokens=1, batch_size=500, shard_size=draws)
    counts = torch.bincount(torch.tensor(responses(pair, settings, [prompt] * draws)).flatten(), minlength=261).double()
    assert counts[~kept].sum() == 0, "a token was drawn that the settings exclude"
    assert binned_p_value(counts, expected * draws) > 1e-4
    wrong = (logits / 1.2).softmax(-1) * kept
    assert binned_p_value(counts, wrong / wrong.sum() * draws) < 1e-4, "the test has no power"


def binned_p_value(counts, expected):
    """Chi-square; tokens expected less than 5 times share one bin."""
    often = expected >= 5
    observed = [*counts[often].tolist(), counts[~often].sum().item()]
    wanted = [*expected[often].tolist(), expected[~often].sum().item()]
    if wanted[-1] < 1:
        observed, wanted = [*observed[:-2], sum(observed[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    return chisquare(observed, wanted).pvalue


def test_the_models_own_generation_config_does_not_leak_in(pair):
    plain = responses(pair, Settings())
    own = GenerationConfig(top_p=0.01, repetition_penalty=50.0, temperature=0.01, num_beams=2, do_sample=True)
    pair.target.generation_config = own
    assert responses(pair, Settings()) == plain


def test_responses_depend_on_seed_and_prompt_but_not_on_the_batch(pair):
    whole = responses(pair, Settings())
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert responses(pair, Settings(batch_size=1)) == whole
    assert torch.equal(torch.get_rng_state(), before)
    assert responses(pair, Settings(seed=6)) != whole
    twice = responses(pair, Settings(), [PROMPTS[0], PROMPTS[0]])
    assert twice[0] == whole[0] != twice[1]


def test_a_response_ends_with_its_first_end_token(pair):
    unended = responses(pair, Settings(GREEDY))
    assert [len(row) for row in unended] == [20] * len(PROMPTS)
    ends = (2, unended[1][4])
    ended = responses(pair, Settings(GREEDY, end_token_ids=ends))
    for row, full in zip(ended, unended, strict=True):
        first = next((i for i, token in enumerate(full) if token in ends), len(full) - 1)
        assert row == full[: first + 1]
    assert len(ended[1]) <= 5 < len(unended[1])


# --- scores ----------------------------------------------------------------------------------------------------------

SCORED = [Settings(alternatives=2), Settings(GREEDY), Settings(Sampling(temperature=0.8, top_k=0, top_p=0.9))]


def check_equal(records, scored):
    for record, columns in zip(records, scored, strict=True):
        for name, values in columns.items():
            exact = name.endswith("_ids") or name == "accepted"
            assert record[name] == (values if exact else pytest.approx(values, abs=1e-4)), name


def score_again(pair, records, settings):
    return score(
        pair,
        [record["prompt_ids"] for record in records],
        [record["response_ids"] for record in records],
        settings.sampling,
        seed=settings.seed,
        indices=[record["index"] for record in records],
        alternatives=settings.alternatives or 0,
    )


@pytest.mark.parametrize("draft_policy", ["none", "fixed:3"])
@pytest.mark.parametrize("width", [1, 3, 16, 64])
@pytest.mark.parametrize("settings", SCORED, ids=lambda s: str(s.sampling))
def test_columns_are_those_of_scoring_afterwards(pair, settings, width, draft_policy, monkeypatch):
    """Rows come and go, and end with positions that fill no part of `width`."""
    monkeypatch.setattr(module, "WIDTH", width)
    ending = responses(pair, settings)[1][6]
    settings = replace(settings, end_token_ids=(2, ending))
    records = make_records(pair, as_prompts(PROMPTS), settings, draft_policy)
    assert len({len(record["response_ids"]) for record in records}) > 1
    scored = score_again(pair, records, settings)
    check_equal(records, scored)
    late = [{**row, "overlap": [*row["overlap"][1:], 0.0], "draft_ids": row["draft_ids"][::-1]} for row in scored]
    with pytest.raises(AssertionError):
        check_equal(records, late)


def test_speculation_changes_no_record_and_does_accept(pair, monkeypatch):
    plain = make_records(pair, as_prompts(PROMPTS), Settings(alternatives=2))
    calls = count_forwards(pair.target, monkeypatch)
    fast = make_records(pair, as_prompts(PROMPTS), Settings(alternatives=2), "fixed:4")
    assert calls["tokens"] > calls["forwards"]
    check_equal(fast, plain)


def count_forwards(model, monkeypatch):
    """{"forwards", "tokens"}: calls of the model with its head, and the tokens that they fed."""
    calls, forward = {"forwards": 0, "tokens": 0}, model.forward

    @functools.wraps(forward)
    def counted(input_ids=None, **options):
        calls["forwards"] += 1
        calls["tokens"] += input_ids.numel()
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", counted)
    return calls


def test_each_model_reads_each_token_once(pair, monkeypatch):
    """One batch, so that no padding is fed: a target forward a token, and a draft forward for WIDTH tokens."""
    settings = Settings(max_new_tokens=32, batch_size=len(PROMPTS))
    make_records(pair, as_prompts(PROMPTS), settings)  # both models have been tested by now
    target, draft = (count_forwards(model, monkeypatch) for model in (pair.target, pair.draft))
    make_records(pair, as_prompts(PROMPTS), settings)
    assert target == {"forwards": 32, "tokens": 32 * len(PROMPTS)}
    assert draft == {"forwards": 2, "tokens": 32 * len(PROMPTS)}


# --- memory ----------------------------------------------------------------------------------------------------------


class Scarce:
    """A model's forward, with memory for so many rows."""

    def __init__(self, model, most, error=None):
        self.forward, self.most, self.__signature__ = model.forward, most, inspect.signature(model.forward)
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def __call__(self, input_ids=None, **options):
        if len(input_ids) > self.most:
            raise self.error
        return self.forward(input_ids=input_ids, **options)


def test_when_memory_runs_out_half_of_the_rows_go_on_with_the_same_records(pair, monkeypatch, capfd):
    settings = Settings(batch_size=7)
    whole = make_records(pair, as_prompts(PROMPTS), settings)
    with pytest.raises(RuntimeError) as caught:  # the CPU's allocator has no error class of its own
        torch.empty(1 << 50)
    monkeypatch.setattr(pair.target, "forward", Scarce(pair.target, 2, caught.value))
    check_equal(make_records(pair, as_prompts(PROMPTS), settings), whole)
    first, second = capfd.readouterr().err.splitlines()
    assert "with 7 prompts together; going on with 3" in first and "going on with 1" in second


def test_a_plan_that_does_not_fit_is_made_for_fewer_rows(pair, monkeypatch):
    decoding = Decoding(pair, as_prompts(PROMPTS), Settings(batch_size=7))
    monkeypatch.setattr("accept_head.inference.engine.memory.available_bytes", lambda device: 300_000)
    records = dict(decoding.records(0, as_prompts(PROMPTS)))
    assert len(records) == len(PROMPTS) and decoding.batch < 7


def test_one_prompt_that_does_not_fit_is_the_users_to_know(pair, monkeypatch):
    decoding = Decoding(pair, as_prompts(PROMPTS), Settings())
    monkeypatch.setattr(pair.target, "forward", Scarce(pair.target, 0))
    with pytest.raises(InputError, match=r"out of memory while generating with a single prompt.*--max_new_tokens"):
        list(decoding.records(0, as_prompts(PROMPTS)))


def test_other_errors_are_not_swallowed(pair, monkeypatch):
    decoding = Decoding(pair, as_prompts(PROMPTS), Settings())
    monkeypatch.setattr(pair.target, "forward", Scarce(pair.target, 0, RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes"):
        list(decoding.records(0, as_prompts(PROMPTS)))
