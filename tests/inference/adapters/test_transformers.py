"""transformers' `generate` returns the same with our decode loop as without, for all its options."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

from accept_head import InputError
from accept_head.inference.adapters.transformers import generate
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from tests.inference.support.toy import architectures, ragged_prompts

NEW_TOKENS, PROMPTS = 12, 4
FALSE_ALARM = 1e-4
ARCHITECTURES = architectures()


class Both:
    """One model's `generate`, plain and with our loop, on a left-padded batch, and what it says without any options."""

    def __init__(self, pair, prompts):
        self.target, self.draft, self.tokenizer = pair.target, pair.draft, pair.tokenizer
        self.inputs = dict(self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left"))
        self.width = self.inputs["input_ids"].shape[1]
        self.plain = self.theirs()
        self.said = self.plain[:, self.width :].tolist()
        self.texts = self.tokenizer.batch_decode(self.said)

    def theirs(self, **options):
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **self.inputs, **options}
        return self.target.generate(**{name: value for name, value in options.items() if value is not None})

    def ours(self, **options):
        return self.theirs(custom_generate=generate, **{"draft": self.draft, "policy": "fixed:4", **options})


@pytest.fixture(scope="module")
def both(embedded_pair, embedded_pair_folder):
    lines = (embedded_pair_folder / "prompts" / "test.jsonl").read_text().splitlines()[:PROMPTS]
    return Both(embedded_pair, [json.loads(line)["prompt"] for line in lines])


def with_greedy_ends(both):
    """Two tokens that end two of the rows early, each at another step."""
    return [both.said[0][4], both.said[1][9]]


class EndsAt(StoppingCriteria):
    """Ends a row at a total length, padding included, that depends on its last token."""

    def __call__(self, input_ids, scores, **_):
        return (input_ids.shape[1] + input_ids[:, -1] % 3) % 7 == 0


def ended_by(criterion):
    return {"stopping_criteria": StoppingCriteriaList([criterion])}


# name → options of `generate`, made of what is said without any
OPTIONS = {
    "one end token": lambda b: {"eos_token_id": b.said[0][6]},
    "several end tokens": lambda b: {"eos_token_id": with_greedy_ends(b)},
    "another pad token": lambda b: {"eos_token_id": with_greedy_ends(b), "pad_token_id": 77},
    "a longest sequence": lambda b: {"max_new_tokens": None, "max_length": b.width + 7},
    "one new token": lambda b: {"max_new_tokens": 1},
    "fewest new tokens": lambda b: {"eos_token_id": with_greedy_ends(b), "min_new_tokens": 8},
    "a shortest sequence": lambda b: {"eos_token_id": with_greedy_ends(b), "min_length": b.width + 6},
    "repetition_penalty": lambda b: {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": lambda b: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda b: {"bad_words_ids": [[b.said[0][1]], b.said[1][2:4], b.said[2][5:8]]},
    "suppress_tokens": lambda b: {"suppress_tokens": [b.said[0][0], b.said[3][2]]},
    "begin_suppress_tokens": lambda b: {"begin_suppress_tokens": [row[0] for row in b.said]},
    "sequence_bias": lambda b: {"sequence_bias": [[[b.said[0][2]], -8.0], [b.said[1][3:5], -8.0]]},
    "forced_eos_token_id": lambda b: {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": lambda b: {"exponential_decay_length_penalty": (4, 2.0)},
    "watermarking_config": lambda b: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "renormalize_logits": lambda b: {"renormalize_logits": True, "suppress_tokens": [b.said[0][0]]},
    "several at once": lambda b: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [b.said[0][0]],
        "min_new_tokens": 5,
        "eos_token_id": with_greedy_ends(b),
    },
    "padding without a mask": lambda b: {"attention_mask": None, "repetition_penalty": 1.2},
    "stop strings": lambda b: ended_by(
        StopStringCriteria(b.tokenizer, [b.texts[0][9:13], b.texts[1][20:22], b.texts[3][14:19]])
    ),
    # A criterion of one's own sees the padding; a given one wins over the config's own of its kind.
    "a criterion": lambda b: ended_by(EndsAt()),
    "a criterion of length": lambda b: ended_by(MaxLengthCriteria(max_length=b.width + 6)),
    "a criterion of end tokens": lambda b: ended_by(EosTokenCriteria(eos_token_id=with_greedy_ends(b))),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_sequences_are_those_of_transformers(both, name):
    options = OPTIONS[name](both)
    expected = both.theirs(**options)
    assert expected.tolist() != both.plain.tolist(), "the option has no effect"
    assert both.ours(**options).tolist() == expected.tolist()


SAME = {
    **{
        f"policy {spec}": lambda spec=spec: {"policy": spec}
        for spec in ("none", "fixed:1", "fixed:8", "confidence:0.4")
    },
    "a policy object": lambda: {"policy": ConfidencePolicy(0.2, k_max=3)},
    **{f"{size} rows": lambda size=size: {"batch_size": size} for size in (1, 3, 64)},  # also fewer than the batch
    "an empty cache": lambda: {"past_key_values": DynamicCache()},
}


@pytest.mark.parametrize("name", SAME)
def test_what_only_costs_gives_the_same(both, name):
    ends = {"eos_token_id": with_greedy_ends(both), "repetition_penalty": 1.1}
    assert both.ours(**SAME[name](), **ends).tolist() == both.theirs(**ends).tolist()


@pytest.mark.parametrize("row", range(PROMPTS))
def test_a_batch_of_one_gives_the_same(both, row):
    own = both.inputs["attention_mask"][row].bool()
    inputs = {name: value[row : row + 1, own] for name, value in both.inputs.items()}
    options = {**inputs, "eos_token_id": both.said[row][8]}
    expected = both.theirs(**options)
    assert expected.shape[1] <= own.sum() + 9
    assert both.ours(**options).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_continues_a_left_padded_batch_as_transformers_does(name):
    target, draft = ARCHITECTURES[name]
    prompts = ragged_prompts(5, longest=9)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"attention_mask": mask, "do_sample": False, "eos_token_id": [7, 14, 20], "pad_token_id": 0}
    expected = target.generate(ids, max_new_tokens=18, **options)
    actual = target.generate(ids, max_new_tokens=18, custom_generate=generate, draft=draft, policy="fixed:3", **options)
    assert actual.tolist() == expected.tolist()


def test_without_a_pad_token_the_end_token_pads(both, monkeypatch):
    monkeypatch.setattr(both.target.generation_config, "pad_token_id", None)
    ends = with_greedy_ends(both)
    expected = both.theirs(eos_token_id=ends)
    assert (expected[:, -1] == ends[0]).any()
    assert both.ours(eos_token_id=ends).tolist() == expected.tolist()


def test_a_generation_config_is_used_as_it_is(both):
    config = GenerationConfig(
        max_new_tokens=11, repetition_penalty=1.2, eos_token_id=with_greedy_ends(both), pad_token_id=5
    )
    before = copy.deepcopy(config)
    options = {"generation_config": config, "max_new_tokens": None}
    expected = both.theirs(**options)
    assert both.ours(**options).tolist() == expected.tolist() != both.plain.tolist()
    assert config.to_dict() == before.to_dict()
    wins = both.ours(generation_config=config, max_new_tokens=4)
    assert wins.tolist() == both.theirs(generation_config=config, max_new_tokens=4).tolist()


def test_the_models_own_generation_config_gives_the_defaults(both, monkeypatch):
    ends = with_greedy_ends(both)
    for name, value in {"eos_token_id": ends, "repetition_penalty": 1.2, "max_new_tokens": 13}.items():
        monkeypatch.setattr(both.target.generation_config, name, value)
    expected = both.theirs(max_new_tokens=None)
    assert expected.shape[1] <= both.width + 13
    assert both.ours(max_new_tokens=None).tolist() == expected.tolist() != both.plain.tolist()


# --- what depends on more than one row's prefix ---------------------------------------------------------------------

# option of `generate` → its value, and transformers' class behind it
OTHER_PROCESSORS = {
    "prefix_allowed_tokens_fn": (
        lambda row, ids: list(range(300 * row, 300 * row + 300)),
        "PrefixConstrainedLogitsProcessor",
    ),
    "guidance_scale": (1.5, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    "encoder_repetition_penalty": (1.4, "EncoderRepetitionPenaltyLogitsProcessor"),
    "watermarking_config": (
        SynthIDTextWatermarkingConfig(keys=[1, 2, 3, 4], ngram_len=3),
        "SynthIDTextWatermarkLogitsProcessor",
    ),
}


@pytest.mark.parametrize("name", OTHER_PROCESSORS)
def test_a_processor_that_knows_rows_or_earlier_calls_is_served_or_refused_by_name(both, name):
    """Speculative decoding calls processors for one row at a time, and for tokens that are then rejected."""
    value, processor = OTHER_PROCESSORS[name]
    expected = both.theirs(**{name: value})
    assert expected.tolist() != both.plain.tolist()
    try:
        actual = both.ours(**{name: value})
    except InputError as refused:
        assert name in str(refused) or processor in str(refused)
    else:
        assert actual.tolist() == expected.tolist()


def test_a_repetition_penalty_with_a_length_for_each_row_is_served_first_or_refused_by_name(both):
    """As transformers 5.23 prepares it, so that padding is not penalised."""
    mask = both.inputs["attention_mask"]
    by_row = RepetitionPenaltyLogitsProcessor(1.3)
    by_row.prompt_ignore_length = (mask == 0).sum(1)
    longest = int(mask.sum(1).argmax())  # it has no padding
    expected = both.theirs(repetition_penalty=1.3)[longest].tolist()
    assert both.ours(logits_processor=LogitsProcessorList([by_row]))[longest].tolist() == expected
    with pytest.raises(InputError, match="SequenceBiasLogitsProcessor stands before the repetition penalty"):
        both.ours(sequence_bias=[[[both.said[0][2]], -8.0]], logits_processor=LogitsProcessorList([by_row]))


# --- scores ---------------------------------------------------------------------------------------------------------


def assert_equal_scores(actual, expected, sequences, width, ends):
    """Equal within 1e-4, and −∞ at the same places, for every row up to its end token. (batch, vocab) a step each."""
    assert len(actual) == len(expected) == sequences.shape[1] - width
    for row, tokens in enumerate(sequences[:, width:].tolist()):
        length = length_until_end(tokens, ends)
        ours, theirs = (torch.stack([step[row] for step in steps[:length]]) for steps in (actual, expected))
        assert torch.equal(ours.isneginf(), theirs.isneginf())
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch_size", [2, None])
def test_scores_and_logits_are_those_of_transformers(both, batch_size):
    ends = with_greedy_ends(both)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "eos_token_id": ends,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [both.said[0][0]],
    }
    expected = both.theirs(**options)
    actual = both.ours(batch_size=batch_size, **options)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert any(step.isneginf().any() for step in actual.scores)
    for name in ("scores", "logits"):
        assert_equal_scores(actual[name], expected[name], actual.sequences, both.width, ends)
    assert not torch.equal(actual.scores[0], actual.logits[0])


def test_only_what_is_asked_for_is_returned(both):
    actual = both.ours(return_dict_in_generate=True, output_logits=True)
    assert actual.scores is None and len(actual.logits) == NEW_TOKENS
    assert isinstance(both.ours(output_logits=True), torch.Tensor)


def length_until_end(tokens, ends):
    return next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))


def test_statistics_come_with_a_dict(both):
    ends = with_greedy_ends(both)
    stats = both.ours(return_dict_in_generate=True, eos_token_id=ends).stats
    assert [row.generated for row in stats] == [length_until_end(row, ends) for row in both.said]
    assert all(0 <= row.accepted <= row.drafted <= 4 * row.rounds for row in stats)
    assert sum(row.accepted for row in stats) > 0


# --- sampling -------------------------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


def warped(scores, temperature):
    """The scores that are sampled from, in transformers' own order. (rows, vocab)."""
    warpers = [
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ]
    return LogitsProcessorList(warpers)(None, scores)


def sampled(both, seed, **options):
    torch.manual_seed(seed)
    return both.ours(**{**SAMPLED, **options})


def test_a_sampled_call_is_repeated_by_its_seed_alone(both):
    first = sampled(both, 1)
    assert sampled(both, 1).tolist() == first.tolist()
    assert sampled(both, 1, batch_size=2).tolist() == first.tolist()
    assert sampled(both, 2).tolist() != first.tolist()
    torch.manual_seed(1)
    both.ours(**SAMPLED)
    assert both.ours(**SAMPLED).tolist() != first.tolist()


def test_returned_sequences_of_one_prompt_differ(both):
    rows = sampled(both, 0, num_return_sequences=4)[:, both.width :].tolist()
    assert len(rows) == 4 * PROMPTS
    for prompt in range(PROMPTS):
        assert len({tuple(row) for row in rows[4 * prompt : 4 * prompt + 4]}) > 2


def test_returned_sequences_stand_beside_their_prompt(both):
    ids = sampled(both, 0, num_return_sequences=3)[:, : both.width]
    assert ids.tolist() == both.inputs["input_ids"].repeat_interleave(3, dim=0).tolist()


@torch.no_grad()
def test_sampled_scores_are_what_the_tokens_were_drawn_from(both):
    options = {"return_dict_in_generate": True, "output_scores": True, "suppress_tokens": [both.said[0][0]]}
    output = sampled(both, 5, eos_token_id=[], **options)
    mask = torch.nn.functional.pad(both.inputs["attention_mask"], (0, NEW_TOKENS), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = both.target(output.sequences, attention_mask=mask, position_ids=positions).logits[:, both.width - 1 : -1]
    logits[..., both.said[0][0]] = float("-inf")
    for step, scores in enumerate(output.scores):
        expected = warped(logits[:, step], 0.8)
        # A probability at a filter's very edge may fall on either side.
        assert (scores.isneginf() == expected.isneginf()).float().mean() > 0.999
        kept = ~(scores.isneginf() | expected.isneginf())
        torch.testing.assert_close(scores[kept], expected[kept], atol=1e-4, rtol=0)
        assert not scores.gather(1, output.sequences[:, both.width + step, None]).isneginf().any()


@pytest.fixture(scope="module")
def first_tokens(both):
    """(prompt, 2,000 first tokens of it), each drafted and verified."""
    prompt = both.tokenizer("The", return_tensors="pt")["input_ids"]
    options = {"num_return_sequences": 2000, "max_new_tokens": 2, "return_dict_in_generate": True, "eos_token_id": []}
    output = sampled(both, 3, input_ids=prompt, attention_mask=torch.ones_like(prompt), batch_size=500, **options)
    assert all(row.drafted > 0 for row in output.stats)
    assert 0.1 < sum(row.accepted for row in output.stats) / sum(row.drafted for row in output.stats) < 0.95
    return prompt, output.sequences[:, prompt.shape[1]]


def p_value(both, first_tokens, temperature):
    """Chi-square of the first tokens against the target's distribution; rare tokens are pooled."""
    prompt, tokens = first_tokens
    with torch.no_grad():
        p = warped(both.target(prompt).logits[:, -1], temperature).softmax(-1)[0].double()
    expected = p * len(tokens)
    observed = torch.bincount(tokens, minlength=len(p)).double()
    frequent = expected >= 5
    pooled = [torch.cat([counts[frequent], counts[~frequent].sum()[None]]) for counts in (observed, expected)]
    if pooled[1][-1] == 0:
        if pooled[0][-1]:
            return 0.0  # a token that cannot be drawn
        pooled = [counts[:-1] for counts in pooled]
    return chisquare(pooled[0].numpy(), pooled[1].numpy(), sum_check=False).pvalue


def test_sampling_through_all_warpers_has_the_targets_distribution(both, first_tokens):
    assert p_value(both, first_tokens, 0.8) > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.65, 1.0])
def test_the_same_check_fails_for_another_temperature(both, first_tokens, temperature):
    assert p_value(both, first_tokens, temperature) < FALSE_ALARM


# --- what it refuses ------------------------------------------------------------------------------------------------


def filled_cache(both):
    cache = DynamicCache()
    both.target(both.inputs["input_ids"], past_key_values=cache)
    return cache


REFUSED = {
    "no draft": (lambda b: {"draft": None}, "draft=.*assistant_model="),
    "assistant_model instead of draft": (lambda b: {"draft": None, "assistant_model": b.draft}, "assistant_model="),
    "num_beams": (lambda b: {"num_beams": 2}, "num_beams is 2"),
    "attentions": (lambda b: {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden states": (
        lambda b: {"output_hidden_states": True, "return_dict_in_generate": True},
        "output_hidden_states",
    ),
    "a filled cache": (lambda b: {"past_key_values": filled_cache(b)}, "(past_key_values|cache) holds tokens"),
    "embeddings": (
        lambda b: {"input_ids": None, "inputs_embeds": b.target.get_input_embeddings()(b.inputs["input_ids"])},
        "inputs_embeds",
    ),
    "a draft of another dtype": (
        lambda b: {"draft": copy.deepcopy(b.draft).to(torch.bfloat16)},
        "bfloat16.*float32",
    ),
    "an unknown policy": (lambda b: {"policy": "best"}, "best"),
    "an empty batch": (lambda b: {"batch_size": 0}, "batch_size is 0"),
    "more than the context": (lambda b: {"max_new_tokens": 600}, "context has 512"),
    "a prompt of nothing but padding": (
        lambda b: {"attention_mask": b.inputs["attention_mask"] * (torch.arange(PROMPTS) > 0)[:, None]},
        "prompt 0 is empty",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(both, name):
    make, words = REFUSED[name]
    with pytest.raises(InputError, match=words) as caught:
        both.ours(**make(both))
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)


def test_a_policy_object_can_be_used_again(both):
    policy = FixedPolicy(3)
    assert both.ours(policy=policy).tolist() == both.ours(policy=policy, batch_size=2).tolist() == both.plain.tolist()
