"""Decoding takes the planned memory: exactly where memory can be counted, otherwise within 10 %."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from accept_head import InputError, Sampling
from accept_head.inference import generate
from accept_head.inference.decode import generate as generation
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.engine import memory
from accept_head.inference.engine.proof import check_served
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.prompts import load_prompts
from tests.inference.support.live_memory import Live
from tests.inference.support.toy import GROUPED, architectures, ragged_prompts, tiny

BATCH, NEW_TOKENS = 16, 64
GREEDY, TOP_K, FILTERED = Sampling(temperature=0), Sampling(), Sampling(top_k=50, top_p=0.9, min_p=0.05)
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
# Grouped heads, windows on some layers, keys wider than values, and none of these.
MODELS = {name: target for name, (target, _) in architectures().items() if name in ("llama", "gpt2")} | {
    "gemma3": tiny(Gemma3ForCausalLM, Gemma3TextConfig, layers=3, sliding_window=5, **GROUPED),
    "deepseek": tiny(DeepseekV3ForCausalLM, DeepseekV3Config, layers=2, **LATENT, **EXPERTS),
}


def plan_of(target, draft, prompts, *, k=4, new_tokens=NEW_TOKENS, sampling=GREEDY, batch=BATCH):
    return memory.plan_memory(
        target,
        draft,
        batch=min(batch, len(prompts)),
        max_length=max(map(len, prompts)) + new_tokens,
        max_draft_tokens=k,
        vocab_size=target.get_output_embeddings().weight.shape[0],
        greedy=sampling.greedy,
        longest_prompt=max(map(len, prompts)),
    )


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def weights_of(*models):
    return sum(bytes_of([*model.parameters(), *model.buffers()]) for model in models)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_caches_are_exact(name):
    target, draft = MODELS[name], architectures()["llama"][1]
    prompts = ragged_prompts(5)
    plan = plan_of(target, draft, prompts, new_tokens=7)
    assert plan.weights == weights_of(target, draft)
    decoder = Decoder(target, draft, plan)
    tokens = torch.zeros(5, plan.max_length, dtype=torch.long)
    for model in (decoder.target, decoder.draft):
        model.fill(tokens, [0], [0], [3])
    assert plan.caches == decoder.target.bytes + decoder.draft.bytes
    layers = [*decoder.target.layers, *decoder.draft.layers]
    assert plan.caches == bytes_of(tensor for layer in layers for tensor in (layer.keys, layer.values))


def test_weights_that_are_shared_count_once_and_an_undrafted_rounds_need_no_draft_cache():
    target, draft = architectures()["llama"]
    prompts = ragged_prompts(3)
    assert plan_of(target, target, prompts).weights == weights_of(target)
    alone, both = plan_of(target, draft, prompts, k=0), plan_of(target, draft, prompts, k=1)
    assert alone.caches * 2 == both.caches  # the two toy models are of one shape
    assert both.total > alone.total


def measured_peak(target, draft, prompts, sampling, policy="fixed:4", new_tokens=NEW_TOKENS):
    check_served(target)
    check_served(draft)
    weights = [tensor for model in (target, draft) for tensor in (*model.parameters(), *model.buffers())]
    with Live(weights) as live:
        options = {"sampling": sampling, "max_new_tokens": new_tokens, "batch_size": BATCH}
        generate(target, draft, prompts, policy=policy, **options)
    return live.peak + weights_of(target, draft)


def test_the_peak_is_measured_right():
    with Live([]) as live:
        first = torch.zeros(1000)
        view = first[:10].view(2, 5)
        second = first + 1
        del first
        third = view.clone()  # the view keeps all of the first alive
        del view
        fourth = second * third[0, 0]
    assert live.peak == live.now == 4 * (2000 + 10)
    del fourth


@pytest.fixture(scope="module")
def prompts(embedded_pair, embedded_pair_folder):
    prompts = load_prompts(str(embedded_pair_folder / "prompts" / "test.jsonl"), embedded_pair.tokenizer)
    return [list(prompt.ids) for prompt in prompts[:BATCH]]


@pytest.mark.parametrize("sampling", [GREEDY, TOP_K], ids=["greedy", "top-k"])
def test_the_peak_of_a_batch_of_16_is_as_planned(embedded_pair, prompts, sampling):
    pair = embedded_pair
    plan = plan_of(pair.target, pair.draft, prompts, sampling=sampling)
    peak = measured_peak(pair.target, pair.draft, prompts, sampling)
    assert peak == pytest.approx(plan.total, rel=0.1), f"peak {peak / 1e6:.1f} MB; {plan}"


@pytest.mark.parametrize("sampling", [GREEDY, TOP_K, FILTERED], ids=["greedy", "top-k", "top-k, top-p, min-p"])
def test_the_peak_of_short_prompts_is_as_planned(embedded_pair, sampling):
    """Long prompts may take most where they are fed; with short ones the peak is in a round."""
    pair, prompts = embedded_pair, [[1, 3, token] for token in range(5, 5 + BATCH)]
    plan = plan_of(pair.target, pair.draft, prompts, sampling=sampling, new_tokens=16)
    peak = measured_peak(pair.target, pair.draft, prompts, sampling, new_tokens=16)
    assert peak == pytest.approx(plan.total, rel=0.1), f"peak {peak / 1e6:.1f} MB; {plan}"


def test_what_does_not_fit_is_refused_before_it_is_taken_and_both_numbers_are_named(monkeypatch):
    target, draft = architectures()["llama"]
    prompts = ragged_prompts(40)
    options = {"policy": "fixed:4", "max_new_tokens": 8, "end_token_ids": []}
    plan = plan_of(target, draft, prompts, batch=40, new_tokens=8)
    needed = plan.total - plan.weights
    assert needed > 1_000_000
    monkeypatch.setattr(memory, "available_bytes", lambda device: 123_456)
    with pytest.raises(InputError) as caught:
        generate(target, draft, prompts, **options)
    for words in (f"needs {needed / 1e6:.3g} MB on cpu", "123 kB are available", "smaller batch size"):
        assert words in str(caught.value)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    assert len(generate(target, draft, prompts, **options).tokens) == 40


def test_a_smaller_batch_fits_where_a_larger_one_does_not(monkeypatch):
    target, draft = architectures()["llama"]
    prompts, options = ragged_prompts(8), {"policy": "fixed:2", "max_new_tokens": 8, "end_token_ids": []}
    plan = plan_of(target, draft, prompts, k=2, new_tokens=8, batch=2)
    monkeypatch.setattr(memory, "available_bytes", lambda device: plan.total - plan.weights)
    with pytest.raises(InputError, match="this generation needs"):
        generate(target, draft, prompts, **options)
    assert len(generate(target, draft, prompts, batch_size=2, **options).tokens) == 8


def test_the_plan_is_the_one_of_the_run(embedded_pair, monkeypatch):
    seen = []
    monkeypatch.setattr(generation, "plan_memory", lambda *a, **k: seen.append(memory.plan_memory(*a, **k)) or seen[0])
    target, draft = embedded_pair.target, embedded_pair.draft
    prompts = [[1, 5, 6], [1, 7]]
    generate(target, draft, prompts, policy="fixed:3", max_new_tokens=4)
    assert seen == [plan_of(target, draft, prompts, k=3, new_tokens=4)]


def test_with_graphs_a_rounds_memory_stays_taken_while_prompts_are_fed():
    target, draft = architectures()["llama"]
    common = {"batch": 4, "max_length": 60, "max_draft_tokens": 3, "vocab_size": 32, "greedy": False}
    eager, graphs = (
        memory.plan_memory(target, draft, **common, longest_prompt=50, graphs=captured) for captured in (False, True)
    )
    assert eager.total == eager.weights + eager.caches + max(eager.logits, eager.fill)
    assert graphs.total == graphs.weights + graphs.caches + graphs.logits + graphs.fill + graphs.kept
    assert min(eager.logits, eager.fill, graphs.kept) > 0
    for plan, words in ((eager, ("logits", "prompt activations")), (graphs, ("logits", "prompt activations", "kept"))):
        assert sum(word in str(plan) for word in words) == len(words) - (plan is eager)


def test_heads_that_have_yet_to_be_packed_count_and_so_do_those_that_are_wrapped(monkeypatch):
    """Two heads, one of them in a policy that wraps it, and a rule without one; the longest draft is of a third."""
    target, draft = architectures()["llama"]
    sizes = {"first": 1_000_000, "second": 300_000, None: 0}
    monkeypatch.setattr(generation, "bytes_to_pack", lambda score, dtype: sizes[score])
    first = SimpleNamespace(max_draft_tokens=2, probability="first")
    wrapped = SimpleNamespace(max_draft_tokens=2, policy=SimpleNamespace(probability="second"))
    requests = generation.make_requests(ragged_prompts(2), 8)

    def plan(policy, *others):
        return generation.make_decoder(target, draft, requests, policy, others=others, batch_size=2, greedy=True).memory

    alone, all_of_them = plan(FixedPolicy(2)), plan(first, wrapped, FixedPolicy(5))
    assert (alone.head, all_of_them.head) == (0, 1_300_000)
    assert (alone.max_draft_tokens, all_of_them.max_draft_tokens) == (2, 5)
    assert all_of_them.total - alone.total == 1_300_000  # prompts take more than logits here
    assert str(all_of_them).endswith(" + head 1.3 MB") and "head" not in str(alone)
