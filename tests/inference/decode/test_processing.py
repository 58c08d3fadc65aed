"""Logits processors and sampling settings give the same as in transformers' own loop, at every slot of a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from accept_head import InputError, Sampling
from accept_head.inference import generate
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import Request, Rows
from tests.inference.support.toy import VOCAB, architectures, ragged_prompts, transformers_greedy

NEW_TOKENS = 16
MODELS = {name: pair for name, pair in architectures().items() if name in ("llama", "gemma2")}
PROMPTS = ragged_prompts(7)


class DependsOnTheLength(LogitsProcessor):
    """Forbids one token, another at each length of the prefix, and favours the last but one."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids.shape[1] * 5 % VOCAB] = float("-inf")
        if input_ids.shape[1] > 1:
            scores.scatter_add_(1, input_ids[:, -2:-1], torch.full((len(scores), 1), 8.0))
        return scores


PROCESSORS = {
    "no repeated bigram": lambda: [NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda: [NoBadWordsLogitsProcessor([[3], [25, 25], [30, 4, 9]], eos_token_id=[])],
    "suppressed": lambda: [SuppressTokensLogitsProcessor(list(range(0, VOCAB, 3)))],
    "length": lambda: [DependsOnTheLength()],
    "several": lambda: [NoRepeatNGramLogitsProcessor(3), DependsOnTheLength(), SuppressTokensLogitsProcessor([1, 2])],
}


FREE = {name: [transformers_greedy(pair[0], prompt, NEW_TOKENS) for prompt in PROMPTS] for name, pair in MODELS.items()}


def ours(models, **options):
    options = {"policy": "fixed:4", "max_new_tokens": NEW_TOKENS, "batch_size": 4, "end_token_ids": [], **options}
    return generate(*models, PROMPTS, **options).tokens


def theirs(models, **options):
    return [transformers_greedy(models[0], prompt, NEW_TOKENS, **options) for prompt in PROMPTS]


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_with_processors_is_that_of_transformers(name, processors):
    models, make = MODELS[name], PROCESSORS[processors]
    expected = theirs(models, logits_processor=LogitsProcessorList(make()))
    assert expected != FREE[name]
    assert ours(models, logits_processor=make()) == expected


@pytest.mark.parametrize("penalty", [0.7, 5.0])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_with_a_repetition_penalty_is_that_of_transformers(name, penalty):
    models = MODELS[name]
    expected = theirs(models, repetition_penalty=penalty)
    assert expected != FREE[name]
    assert ours(models, repetition_penalty=penalty) == expected
    assert ours(models, logits_processor=[RepetitionPenaltyLogitsProcessor(penalty)]) == expected


def test_the_penalty_comes_before_the_processors():
    models, options = MODELS["llama"], {"repetition_penalty": 1.3}
    expected = theirs(models, logits_processor=LogitsProcessorList([DependsOnTheLength()]), **options)
    assert ours(models, logits_processor=[DependsOnTheLength()], **options) == expected


@pytest.mark.parametrize("policy", ["none", "fixed:1", "confidence:0.4", "fixed:8"])
def test_any_policy_sees_the_processed_logits(policy):
    models = MODELS["llama"]
    expected = theirs(models, logits_processor=LogitsProcessorList([DependsOnTheLength()]), repetition_penalty=1.3)
    assert ours(models, logits_processor=[DependsOnTheLength()], repetition_penalty=1.3, policy=policy) == expected


def test_a_draft_that_is_the_target_is_always_right_because_both_are_processed():
    target = MODELS["llama"][0]
    options = {"repetition_penalty": 1.4, "logits_processor": [DependsOnTheLength()], "end_token_ids": []}
    for sampling in (Sampling(temperature=0), Sampling(top_k=10), Sampling(top_k=0, top_p=0.8), Sampling(min_p=0.1)):
        result = generate(target, target, PROMPTS, policy="fixed:3", max_new_tokens=12, sampling=sampling, **options)
        assert all(row.accepted == row.drafted for row in result.stats)


@pytest.mark.parametrize("filters", [{"min_p": 0.2}, {"top_k": 3}, {"top_k": 0, "top_p": 0.6}])
def test_sampled_tokens_pass_the_filters_and_the_processors(filters):
    """Each token of a sampled response is one that transformers' processors and warpers leave, given its prefix."""
    target, draft = MODELS["llama"]
    sampling = Sampling(temperature=1.5, **filters)
    tokens = ours((target, draft), sampling=sampling, repetition_penalty=1.3, logits_processor=[DependsOnTheLength()])
    penalty, kept, chosen = RepetitionPenaltyLogitsProcessor(1.3), [], []
    for prompt, response in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([prompt + response])
        logits = target(ids).logits[0]
        for end in range(len(prompt), ids.shape[1]):
            scores = DependsOnTheLength()(ids[:, :end], penalty(ids[:, :end], logits[end - 1][None].clone()))
            p = numpy_probabilities(scores[0].numpy(), temperature=1.5, **{"top_k": 50, **filters})
            kept.append((p > 0).sum())
            chosen.append(p[ids[0, end]])
    assert min(chosen) > 0
    assert 1 < np.mean(kept) < VOCAB / 2  # the filters do filter


def test_the_penalty_at_each_slot_is_transformers_own():
    """Slot j follows the first lengths + offset + j tokens of its row, whatever stands behind them."""
    rows = Rows(3, 12, 4, torch.device("cpu"))
    rows.admit([Request(i, prompt, 5, i) for i, prompt in enumerate([[4, 4, 9], [1, 2, 3, 5, 8, 13], [30]])])
    generator = torch.Generator().manual_seed(0)
    rows.tokens[:, 6:] = torch.randint(0, VOCAB, rows.tokens[:, 6:].shape, generator=generator)
    processing = Processing(Sampling(temperature=0), VOCAB, repetition_penalty=1.7)
    reference = RepetitionPenaltyLogitsProcessor(1.7)
    for offset, slots in ((0, 4), (0, 1), (3, 1)):
        logits = torch.randn(3, slots, VOCAB + 5, generator=generator)
        scores = processing.scores(logits, rows, offset)
        for row, length in enumerate([3, 6, 1]):
            for slot in range(slots):
                prefix = rows.tokens[row, : length + offset + slot][None]
                expected = reference(prefix, logits[row, slot, :VOCAB][None].clone())[0]
                torch.testing.assert_close(scores[row, slot], expected, rtol=0, atol=0)


@pytest.mark.parametrize("penalty", [0, -1.0, float("nan"), float("inf")])
def test_a_penalty_that_makes_no_sense_is_refused(penalty):
    with pytest.raises(InputError, match=f"repetition_penalty is {penalty}"):
        ours(MODELS["llama"], repetition_penalty=penalty)


def numpy_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Sort, cut, renormalise: p of one distribution, in float64."""
    with np.errstate(divide="ignore"):
        p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), dtype=bool)
    if top_k:
        keep[order[top_k:]] = False
    p = np.where(keep, p, 0)
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@pytest.mark.parametrize("others", [{"top_k": 0}, {"top_k": 5}, {"top_k": 0, "top_p": 0.7}, {"temperature": 0.6}])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
def test_min_p_is_the_formula(min_p, others):
    logits = 3 * torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0))
    actual = Sampling(min_p=min_p, **others).probabilities(logits).numpy()
    settings = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **others, "min_p": min_p}
    expected = np.stack([[numpy_probabilities(row, **settings) for row in rows] for rows in logits.numpy()])
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert ((actual > 0) == (expected > 0)).all()


@pytest.mark.parametrize("min_p", [-0.1, 1.1, float("nan")])
def test_a_min_p_that_is_no_share_is_refused(min_p):
    with pytest.raises(InputError, match=f"min_p is {min_p}"):
        Sampling(min_p=min_p)
