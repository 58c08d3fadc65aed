"""A response ends exactly where transformers' own loop would end it, also in the middle of a round."""

from __future__ import annotations

from itertools import pairwise

import pytest
from transformers import StoppingCriteria, StoppingCriteriaList

from accept_head import InputError, Sampling
from accept_head.inference import generate
from accept_head.prompts import load_prompts
from tests.inference.support.toy import VOCAB, architectures, ragged_prompts, transformers_greedy

NEW_TOKENS = 20
MODELS = architectures()["llama"]
PROMPTS = ragged_prompts(6)


class TokenTwice(StoppingCriteria):
    """A token came twice in a row, prompt included."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == input_ids[:, -2]


class LongEnough(StoppingCriteria):
    """A length that depends on what was written."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= 10 + input_ids[:, -1] % 9


def ours(**options):
    options = {"policy": "fixed:6", "max_new_tokens": NEW_TOKENS, "batch_size": 3, "end_token_ids": [], **options}
    return generate(*MODELS, PROMPTS, **options)


def theirs(max_new_tokens=NEW_TOKENS, **options):
    return [transformers_greedy(MODELS[0], prompt, max_new_tokens, **options) for prompt in PROMPTS]


def assert_counts_are_consistent(result):
    for tokens, row in zip(result.tokens, result.stats, strict=True):
        assert len(tokens) == row.generated > 0
        assert 0 <= row.accepted <= row.drafted
        assert row.accepted <= row.generated <= row.accepted + row.rounds
        assert row.discarded == row.drafted - row.accepted
        assert row.draft_forwards == row.drafted


@pytest.mark.parametrize("ends", [[3], [25, 30], list(range(0, VOCAB, 2)), list(range(VOCAB))])
def test_end_tokens_end_a_response_and_are_part_of_it(ends):
    result = ours(end_token_ids=ends)
    assert result.tokens == theirs(eos_token_id=ends)
    assert_counts_are_consistent(result)
    if len(ends) == VOCAB:
        assert all(row.generated == row.rounds == 1 for row in result.stats)


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limit_of_new_tokens_is_never_passed_nor_missed(limit):
    result = ours(max_new_tokens=limit)
    assert result.tokens == theirs(limit)
    assert_counts_are_consistent(result)
    assert all(row.accepted + row.rounds == limit for row in result.stats)  # no draft is wasted on the last token


@pytest.mark.parametrize("criteria", [[TokenTwice], [LongEnough], [TokenTwice, LongEnough]])
@pytest.mark.parametrize("ends", [[], [25, 30]])
def test_stopping_criteria_stop_where_they_first_hold(criteria, ends):
    """Together with end tokens: whichever comes first."""
    result = ours(stopping_criteria=[criterion() for criterion in criteria], end_token_ids=ends)
    expected = theirs(stopping_criteria=StoppingCriteriaList(c() for c in criteria), eos_token_id=ends or None)
    assert result.tokens == expected
    assert len({len(tokens) for tokens in expected}) > 2
    assert_counts_are_consistent(result)


def test_sampled_responses_are_cut_prefixes_of_uncut_ones():
    options = {"sampling": Sampling(top_k=0), "seed": 5}
    free = ours(**options)
    doubled = ours(stopping_criteria=[TokenTwice()], **options).tokens
    for prompt, whole, cut in zip(PROMPTS, free.tokens, doubled, strict=True):
        text = [prompt[-1], *whole]
        ends = [place for place, (one, other) in enumerate(pairwise(text), start=1) if one == other]
        assert cut == whole[: ends[0] if ends else None]
    for whole, cut in zip(free.tokens, ours(end_token_ids=[25, 30], **options).tokens, strict=True):
        ends = [place for place, token in enumerate(whole, start=1) if token in (25, 30)]
        assert cut == whole[: ends[0] if ends else None]


@pytest.fixture(scope="module")
def embedded(embedded_pair, embedded_pair_folder):
    """Prompts, and what the target says to them when nothing but its end token stops it."""
    prompts = load_prompts(str(embedded_pair_folder / "prompts" / "test.jsonl"), embedded_pair.tokenizer)
    prompts = [list(prompt.ids) for prompt in prompts[:6]]
    return prompts, [transformers_greedy(embedded_pair.target, prompt, 24, eos_token_id=2) for prompt in prompts]


@pytest.mark.parametrize("strings", [["the"], ["ing ", "0", ".\n"]])
def test_stop_strings_stop_where_transformers_stops(embedded, embedded_pair, strings):
    prompts, free = embedded
    pair, options = embedded_pair, {"stop_strings": strings, "tokenizer": embedded_pair.tokenizer}
    expected = [transformers_greedy(pair.target, prompt, 24, eos_token_id=2, **options) for prompt in prompts]
    assert sum(cut != whole for cut, whole in zip(expected, free, strict=True)) >= 3
    result = generate(pair.target, pair.draft, prompts, policy="fixed:7", max_new_tokens=24, batch_size=5, **options)
    assert result.tokens == expected
    assert_counts_are_consistent(result)


@pytest.mark.parametrize("own", [25, [25, 30]])
def test_the_end_tokens_are_the_targets_own_unless_given(own, monkeypatch):
    monkeypatch.setattr(MODELS[0].generation_config, "eos_token_id", own)
    assert ours(end_token_ids=None).tokens == theirs(eos_token_id=own)
    assert ours(end_token_ids=[3]).tokens == theirs(eos_token_id=[3])
    assert {row.generated for row in ours(end_token_ids=[]).stats} == {NEW_TOKENS}


def test_stop_strings_without_a_tokenizer_or_without_text_are_refused(embedded_pair):
    with pytest.raises(InputError, match="tokenizer"):
        ours(stop_strings=["the"])
    for strings in ([""], ["the", ""], [3]):
        with pytest.raises(InputError, match="stop strings are"):
            ours(stop_strings=strings, tokenizer=embedded_pair.tokenizer)
