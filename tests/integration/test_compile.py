"""Compiled forwards give the same tokens, each in one graph, with no more graphs than there are shapes.

Except in slow tests, a backend that runs the traced graph replaces inductor, so no C++ compiler is needed.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from itertools import zip_longest

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accept_head.inference import generate
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.cache import WIDTHS, CachedModel
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.sampling import Sampling
from tests.inference.support.toy import VOCAB, ragged_prompts, random_head, tiny, transformers_greedy


def with_noise(model, amount, seed=1):
    noisy = copy.deepcopy(model)
    torch.manual_seed(seed)
    for weight in noisy.parameters():
        weight += amount * weight.std() * torch.randn(weight.shape)
    return noisy


def pair(model, config, **options):
    """(target, draft) of one layer each: tracing takes seconds a layer."""
    target = tiny(model, config, layers=1, **options)
    return target, with_noise(target, 0.08)


PAIRS = {
    "llama": pair(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2),
    "gpt2": pair(GPT2LMHeadModel, GPT2Config),
}
POLICIES = {
    "fixed:4": lambda: FixedPolicy(4),
    "head": lambda: HeadPolicy(random_head(32, signals=True), 0.6, k_max=4),
}


NEW_TOKENS, ROWS = 14, 3
PROMPTS = ragged_prompts(9, longest=12, seed=3)
LONGEST = max(PROMPTS, key=len)  # in every batch below, so that all caches are of one size


class Traced:
    """A backend that runs graphs as they are and counts them, and the shapes that forwards have."""

    def __init__(self):
        self.graphs, self.calls = 0, 0
        self.forwards: Counter[tuple[int, ...]] = Counter()  # by model, its cache's capacity, rows and width

    def __call__(self, graph, example_inputs):
        self.graphs += 1

        def run(*arguments):
            self.calls += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture(scope="module")
def backend():
    """One for all tests here: tracing takes a second a graph, and most of them need the same ones."""
    torch._dynamo.reset()
    yield Traced()
    torch._dynamo.reset()


@pytest.fixture
def without_inductor(backend, monkeypatch):
    compile_ = torch.compile

    def compile_with_it(call, *, dynamic, fullgraph, **_):
        assert (dynamic, fullgraph) == (False, True)
        compiled = compile_(call, dynamic=dynamic, fullgraph=fullgraph, backend=backend)

        def seen(input_ids, positions, masks):
            cached = call.__self__
            backend.forwards[id(cached.model), cached.max_length, *input_ids.shape] += 1
            return compiled(input_ids, positions, masks)

        return seen

    monkeypatch.setattr(torch, "compile", compile_with_it)


@pytest.fixture
def traced(backend, without_inductor):
    """The backend, and what holds of it after every test."""
    yield backend
    assert backend.graphs <= len(backend.forwards)
    assert backend.calls == backend.forwards.total()
    assert {shape[-1] for shape in backend.forwards} <= set(WIDTHS)


def ours(models, prompts, policy, **options):
    options = {"max_new_tokens": NEW_TOKENS, "batch_size": ROWS, "end_token_ids": [], "compile": "default", **options}
    return generate(*models, prompts, policy=policy, **options)


def theirs(target, prompts):
    return [transformers_greedy(target, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PAIRS)
def test_compiled_tokens_are_those_of_transformers(name, policy, traced):
    """Nine prompts on three rows, so rows come and go."""
    target, draft = PAIRS[name]
    result = ours((target, draft), PROMPTS, POLICIES[policy]())
    assert result.tokens == theirs(target, PROMPTS)
    plain = ours((target, draft), PROMPTS, POLICIES[policy](), compile="none")
    assert [row.drafted for row in result.stats] == [row.drafted for row in plain.stats]
    assert 0 < sum(row.accepted for row in result.stats) < sum(row.drafted for row in result.stats)
    assert any(rows == ROWS for _, _, rows, _ in traced.forwards)


def test_more_prompts_and_rounds_need_no_more_graphs(traced):
    """A graph is made for a width that was not met before, and for nothing else."""
    ours(PAIRS["llama"], [LONGEST, *PROMPTS[:2]], "fixed:4")
    graphs, shapes, calls = traced.graphs, len(traced.forwards), traced.calls
    ours(PAIRS["llama"], ragged_prompts(24, longest=12), "fixed:4")
    assert traced.graphs - graphs <= len(traced.forwards) - shapes <= 2
    assert traced.calls - calls > 100


def run_of(models, prompts, policy):
    """A decoder of its own, about to begin."""
    requests = make_requests([LONGEST, *prompts], NEW_TOKENS)
    decoder = make_decoder(*models, requests, policy, batch_size=ROWS, greedy=True, compile="default")
    processing, stopping = Processing(Sampling(temperature=0), VOCAB), Stopping([], [], models[0].device)
    return decoder, decoder.run(requests, policy=policy, processing=processing, stopping=stopping)


def test_two_decoders_in_turns_each_use_their_own_cache(traced):
    """They are of one shape, so the second finds the first one's graphs; each goes on where the other paused."""
    models = PAIRS["llama"]
    prompts, others = PROMPTS[:4], PROMPTS[4:8]
    (first, run), (second, other_run) = (run_of(models, part, FixedPolicy(4)) for part in (prompts, others))
    assert first.max_length == second.max_length
    done, other_done = {}, {}
    for one, another in zip_longest(run, other_run):
        for finished, rows in ((one, done), (another, other_done)):
            if finished:
                rows[finished.request.index] = finished.token_ids
    expected = theirs(models[0], [LONGEST, *prompts, LONGEST, *others])
    assert [done[index] for index in range(5)] + [other_done[index] for index in range(5)] == expected


def test_models_of_equal_shapes_keep_their_own_weights(traced):
    target, draft = PAIRS["llama"]
    other = with_noise(target, 1.0, seed=5)
    prompts = [LONGEST, *PROMPTS[:2]]
    expected = theirs(target, prompts), theirs(other, prompts)
    assert expected[0] != expected[1]
    for models, responses in (((target, draft), expected[0]), ((other, draft), expected[1])):
        assert ours(models, prompts, "fixed:4").tokens == responses
    assert ours((target, draft), prompts, "fixed:4").tokens == expected[0]


def test_a_width_between_the_compiled_ones_is_padded(traced):
    """Also where the padding would stand behind the longest row: it has no place there and overwrites nothing."""
    model, width = PAIRS["llama"][0], 4
    ids = torch.tensor([PROMPTS[5] + PROMPTS[3]])
    length = ids.shape[1]
    whole = model(ids, output_hidden_states=True)
    cached = CachedModel(model, 1, length, with_hidden=True, compile="default")
    cached.fill(ids, [0], [0], [2])
    for start in range(2, length, width):
        new = slice(start, start + width)
        output = cached.forward(ids[:, new], torch.tensor([start]), start)
        torch.testing.assert_close(output.logits, whole.logits[:, new], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.hidden, whole.hidden_states[-1][:, new], atol=1e-4, rtol=1e-4)
    assert traced.forwards[id(model), cached.max_length, 1, 5] == (length - 2) / width == 5
    for start in range(length):  # every slot still holds what belongs there
        logits = cached.forward(ids[:, start : start + 1], torch.tensor([start]), start).logits
        torch.testing.assert_close(logits, whole.logits[:, start : start + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_responses_of_any_number_of_lengths_can_be_decoded_in_one_process(without_inductor):
    """Dynamo keeps so many graphs of one function and no more; each longest row is another shape."""
    torch._dynamo.reset()
    model = tiny(GPT2LMHeadModel, GPT2Config, layers=1, max_position_embeddings=256)
    for new_tokens in range(4, 4 + 80):
        result = ours((model, model), [[1, 2, 3]], "none", max_new_tokens=new_tokens)
        assert result.tokens == [transformers_greedy(model, [1, 2, 3], new_tokens)]


# --- inductor -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded(embedded_pair, embedded_pair_folder):
    """The trained pair, some prompts, and transformers' greedy responses."""
    lines = (embedded_pair_folder / "prompts" / "test.jsonl").read_text().splitlines()[:6]
    prompts = [embedded_pair.tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    expected = [transformers_greedy(embedded_pair.target, prompt, 24, eos_token_id=2) for prompt in prompts]
    return (embedded_pair.target, embedded_pair.draft), prompts, expected


def compiled(embedded, policy, mode):
    models, prompts, _ = embedded
    return generate(*models, prompts, policy=policy, max_new_tokens=24, batch_size=2, compile=mode).tokens


@pytest.mark.slow
def test_inductor_decodes_the_embedded_pair_exactly(embedded):
    torch._dynamo.reset()
    assert compiled(embedded, "fixed:4", "default") == embedded[2]


@pytest.mark.slow
def test_max_autotune_decodes_the_embedded_pair_exactly_twice_in_one_process(embedded):
    """Frozen weights and tuned kernels; the second decoder has caches of its own."""
    torch._dynamo.reset()
    for policy in ("fixed:2", "fixed:4"):
        assert compiled(embedded, policy, "max-autotune") == embedded[2], policy
