"""Attention that reads the ragged cache directly gives the same logits and tokens as with an explicit mask.

The two kernels need a GPU. Here their contracts replace them (attention_contracts.py), so that all our code is tested:
layouts, lengths, rows, windows, caps, and the choice of a backend.
"""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.engine import cache
from accept_head.inference.engine import proof as support
from accept_head.inference.engine.attention import choice
from accept_head.inference.engine.attention import varlen as our_varlen
from accept_head.inference.engine.attention.backend import KERNELS
from accept_head.inference.engine.attention.choice import choose
from accept_head.inference.engine.attention.flash import FLASH
from accept_head.inference.engine.attention.varlen import VARLEN
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.memory import plan_memory
from accept_head.inference.engine.proof import check_served
from tests.inference.support import attention_contracts
from tests.inference.support.cached import LENGTH, WINDOW, assert_close, at, ragged_logits, random_ids
from tests.inference.support.replayed import ReplayedGraphs
from tests.inference.support.toy import (
    GROUPED,
    UNCAPPED,
    VOCAB,
    architectures,
    ragged_prompts,
    tiny,
    transformers_greedy,
    two,
)

LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], **GROUPED}
WINDOWED = {"layers": 2, "sliding_window": WINDOW, **LOCAL_AND_GLOBAL}
PAIRS = architectures()
MODELS = {name: target for name, (target, _) in PAIRS.items()} | {
    "mistral window": tiny(MistralForCausalLM, MistralConfig, layers=2, sliding_window=WINDOW, **GROUPED),
    "gemma2 window": tiny(Gemma2ForCausalLM, Gemma2Config, **WINDOWED, **UNCAPPED),
    "gemma3 window": tiny(Gemma3ForCausalLM, Gemma3TextConfig, **WINDOWED),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The contracts in place of the kernels, here on a CPU in float32; → how often each was called."""
    calls = {"flash": 0, "varlen": 0}

    def counting(name, contract):
        def call(*arguments, **options):
            calls[name] += 1
            return contract(*arguments, **options)

        return call

    monkeypatch.setattr(choice, "DEVICES", ("cpu",))
    monkeypatch.setattr(choice, "DTYPES", (torch.float32,))
    contracts = {"flash": attention_contracts.flash_attn_with_kvcache, "varlen": attention_contracts.varlen_attn}
    for name, contract in contracts.items():
        monkeypatch.setitem(KERNELS, name, counting(name, contract))
    yield calls
    support._served.clear()  # what was proven with the contracts
    choice.declined.clear()


def assert_equal_logits(model, attention):
    for found, expected in zip(ragged_logits(model, attention), ragged_logits(model, "sdpa"), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("attention", ["flash", "varlen"])
@pytest.mark.parametrize("name", MODELS)
def test_ragged_forwards_equal_those_with_a_mask(name, attention, kernels):
    assert_equal_logits(MODELS[name], attention)
    forwards = 2 + 2 * 3  # two fills, and three rounds of two
    assert kernels == {"flash": 0, "varlen": 0, attention: forwards * MODELS[name].config.num_hidden_layers}


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3 window"])
def test_before_torch_2_13_keys_are_packed_not_paged(name, monkeypatch):
    operation = attention_contracts.flash_attention_forward
    packed = partial(our_varlen.packed_varlen, operation)
    monkeypatch.setitem(KERNELS, "varlen", packed)
    assert_equal_logits(MODELS[name], "varlen")
    wrong = partial(our_varlen.packed_varlen, lambda q, k, v, cu, first, *a, **o: operation(
        q, k, v, cu, first.roll(1), *a, **o
    ))  # fmt: skip
    monkeypatch.setitem(KERNELS, "varlen", wrong)
    with pytest.raises(AssertionError):
        assert_equal_logits(MODELS[name], "varlen")


def test_which_of_torchs_functions_it_is(monkeypatch):
    from torch.nn.attention import varlen

    assert our_varlen._varlen_kernel() is varlen.varlen_attn

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        """As in torch 2.11."""

    monkeypatch.setattr(varlen, "varlen_attn", older)
    kernel = our_varlen._varlen_kernel()
    assert kernel.func is our_varlen.packed_varlen
    names = {argument.name for argument in kernel.args[0].default._schema.arguments}
    assert set(inspect.signature(attention_contracts.flash_attention_forward).parameters) <= names


def test_a_model_that_caps_its_scores_is_served_by_flash_and_capped():
    plain = tiny(Gemma2ForCausalLM, Gemma2Config, **WINDOWED, **UNCAPPED)
    capped = tiny(Gemma2ForCausalLM, Gemma2Config, **WINDOWED, attn_logit_softcapping=0.5)
    capped.set_attn_implementation("eager")
    assert_equal_logits(capped, "flash")
    with pytest.raises(InputError, match=r"'varlen', but Gemma2ForCausalLM \(gemma2\) caps its attention scores"):
        choose(capped, "varlen")
    assert choose(capped) is None  # it keeps its own
    with pytest.raises(AssertionError):
        assert_close(ragged_logits(capped, "flash")[0], ragged_logits(plain, "flash")[0])


@pytest.mark.parametrize("attention", ["flash", "varlen"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_decoding_gives_the_same_greedy_tokens(name, attention, kernels):
    target, draft = PAIRS[name]
    prompts = ragged_prompts(6)
    options = {"policy": "fixed:4", "max_new_tokens": 12, "end_token_ids": [], "batch_size": 4}
    result = generate(target, draft, prompts, attention=attention, **options)
    assert result.tokens == [transformers_greedy(target, prompt, 12) for prompt in prompts]
    assert result.tokens == generate(target, draft, prompts, attention="sdpa", **options).tokens
    assert kernels[attention] > 100


@pytest.mark.parametrize("attention", ["flash", "varlen"])
@pytest.mark.parametrize(
    "wrong",
    [lambda length, new: 0, lambda length, new: length - new - 1, lambda length, new: length - new + 1],
    ids=["top left", "a key too few", "a key too many"],
)
def test_another_alignment_of_causality_would_show(attention, wrong, monkeypatch):
    monkeypatch.setattr(attention_contracts, "bottom_right", wrong)
    with pytest.raises(AssertionError):
        assert_equal_logits(MODELS["llama"], attention)
    with pytest.raises(InputError, match="other logits"):
        check_served(MODELS["llama"], attention)


@pytest.mark.parametrize("attention", ["flash", "varlen"])
def test_a_forward_past_the_end_of_the_cache_takes_the_mask(attention, kernels):
    """A kernel would need keys that the row has no slots for."""
    model, ids = MODELS["llama"], random_ids(2, LENGTH)
    cached = CachedModel(model, 2, LENGTH, attention=attention)
    cached.slots = LENGTH + 1  # of pages of 256 one would need longer rows to see it
    cached.fill(ids, [0, 1], [0, 0], [LENGTH - 2, 5])
    before = dict(kernels)
    starts = torch.tensor([LENGTH - 2, 5])
    with torch.no_grad():
        full = model(ids).logits
        padded = torch.nn.functional.pad(ids, (0, 4))
        output = cached.forward(at(padded, starts, 5), starts, LENGTH - 2).logits
    assert kernels == before and before[attention]
    assert_close(output[0, :2], full[0, -2:])
    assert_close(output[1], full[1, 5:10])


@pytest.mark.parametrize("attention", ["flash", "varlen"])
def test_graphs_of_static_widths_never_take_the_mask(attention, monkeypatch, kernels):
    """Which of the two it is may not depend on how long a row is: a captured graph would not know."""
    monkeypatch.setattr(cache, "compiled_call", lambda call, device, tuned: call)
    backend = choose(MODELS["llama"], attention)
    monkeypatch.setitem(backend.__dict__, "traced", True)
    model, ids = MODELS["llama"], random_ids(2, LENGTH)
    cached = CachedModel(model, 2, LENGTH, attention=attention, compile="default")
    no_masks = type("NoMasks", (), {"named": staticmethod(lambda full, _: full)})
    monkeypatch.setattr(cached, "kinds", no_masks)
    ends = torch.tensor([LENGTH - 1, 5])
    cached.fill(ids, [0, 1], [0, 0], ends.tolist())
    with torch.no_grad():
        full = model(ids).logits
        padded = torch.nn.functional.pad(ids, (0, 64))
        output = cached.forward(at(padded, ends, 65), ends, LENGTH - 1).logits
    assert_close(output[0, 0], full[0, -1])
    assert_close(output[1, : LENGTH - 5], full[1, 5:])


@torch.library.custom_op("accept_head_tests::kvcache", mutates_args=())
def kvcache(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    scale: float,
    left: int,
    right: int,
) -> Tensor:
    """The contract as one operation, which a capture does not look into, as it does not into a kernel."""
    options = {"cache_seqlens": lengths, "cache_batch_idx": rows, "softmax_scale": scale, "window_size": (left, right)}
    return attention_contracts.flash_attn_with_kvcache(q, keys, values, causal=True, **options)


@torch.library.custom_op("accept_head_tests::paged", mutates_args=())
def paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    lengths: Tensor,
    pages: Tensor,
    scale: float,
    left: int,
    right: int,
    gqa: bool,
) -> Tensor:
    options = {"seqused_k": lengths, "block_table": pages, "scale": scale, "window_size": (left, right)}
    return attention_contracts.varlen_attn(q, keys, values, cu_q, cu_k, max_q, max_k, enable_gqa=gqa, **options)


def as_operations(monkeypatch):
    def flash(q, keys, values, *, cache_seqlens, cache_batch_idx, softmax_scale, causal, window_size, softcap):
        assert causal and not softcap
        return kvcache(q, keys, values, cache_seqlens, cache_batch_idx, softmax_scale, *window_size)

    def varlen(q, keys, values, *cu, scale, window_size, enable_gqa, seqused_k, block_table):
        return paged(q, keys, values, *cu, seqused_k, block_table, scale, *window_size, enable_gqa)

    monkeypatch.setitem(KERNELS, "flash", flash)
    monkeypatch.setitem(KERNELS, "varlen", varlen)


@pytest.mark.parametrize("attention", ["flash", "varlen"])
@pytest.mark.parametrize("name", ["llama", "gemma3 window"])
def test_captured_graphs_follow_the_plan(name, attention, monkeypatch):
    """Nothing waits for the device, and one graph a width serves rows of all lengths."""
    as_operations(monkeypatch)
    graphs = ReplayedGraphs()
    found = ragged_logits(MODELS[name], attention, compile="graphs", graphs=graphs)
    for one, expected in zip(found, ragged_logits(MODELS[name], "sdpa"), strict=True):
        assert_close(one, expected)
    assert graphs.captures == 3 and graphs.replays >= 6  # widths 3, 1 and 5


def test_the_model_has_its_own_attention_again_even_after_an_error(monkeypatch):
    model, ids = MODELS["llama"], random_ids(1, 4)
    cached = CachedModel(model, 1, 4, attention="flash")
    cached.forward(ids[:, :2], torch.tensor([0]), 0)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setitem(KERNELS, "flash", None)
    with pytest.raises(TypeError):
        cached.forward(ids[:, :2], torch.tensor([2]), 2)
    assert model.config._attn_implementation == "sdpa"


def test_auto_takes_the_first_that_is_there_and_serves_the_model(monkeypatch):
    model = MODELS["llama"]
    assert choose(model) is FLASH
    assert choose(model, traced=True) is VARLEN  # torch.compile cannot trace through flash-attn
    monkeypatch.setitem(KERNELS, "flash", None)
    assert choose(model) is VARLEN
    monkeypatch.setattr(choice, "DTYPES", (torch.bfloat16, torch.float16))
    assert choose(model) is None and choose(model, "sdpa") is None
    monkeypatch.setattr(choice, "DEVICES", ("cuda",))
    assert choose(model) is None


def test_torch_compile_traces_what_varlen_asks_of_torch():
    """On an H100 it stopped at an import in the middle of it."""
    traced = torch.compile(lambda x: x + 1 if our_varlen._wants_key_offsets() else x, fullgraph=True, backend="eager")
    assert traced(torch.zeros(1)) == 1


def sinks():
    extra = {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"], **GROUPED}
    return tiny(GptOssForCausalLM, GptOssConfig, layers=2, sliding_window=WINDOW, **extra)


def with_own_flash():
    model = tiny(LlamaForCausalLM, LlamaConfig, layers=1)
    model.config._attn_implementation = "flash_attention_2"
    return model


REFUSED = {
    "not installed": (lambda: MODELS["llama"], "flash", "the package flash-attn is not there"),
    "traced": (lambda: MODELS["llama"], "flash", "torch.compile cannot trace through it"),
    "sinks": (sinks, "flash", "GptOssForCausalLM .* attention sinks"),
    "channels": (
        lambda: tiny(LlamaForCausalLM, LlamaConfig, layers=1, head_dim=12),
        "varlen",
        "heads of 12 channels, expected a multiple of 8 up to 256",
    ),
    "many channels": (
        lambda: tiny(LlamaForCausalLM, LlamaConfig, layers=1, head_dim=264, num_key_value_heads=1),
        "flash",
        "heads of 264 channels",
    ),
    "dtype": (lambda: tiny(LlamaForCausalLM, LlamaConfig, layers=1).double(), "flash", "is torch.float64"),
    "its own flash": (with_own_flash, "flash", "has attention implementation 'flash_attention_2'"),
    "unknown": (lambda: MODELS["llama"], "quick", "attention is 'quick', expected one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_that_cannot_serve_a_model_says_why(name, monkeypatch):
    make, attention, reason = REFUSED[name]
    model = make()
    if name == "not installed":
        monkeypatch.setitem(KERNELS, "flash", None)
    with pytest.raises(InputError, match=reason):
        CachedModel(model, 1, 4, attention=attention, compile="default" if name == "traced" else "none")


def test_auto_falls_back_when_what_it_chose_fails_and_an_explicit_choice_does_not(monkeypatch, caplog):
    target, draft = two(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2)

    def fails(*_, **__):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(KERNELS, "flash", fails)
    with pytest.raises(InputError, match="no kernel image"):
        generate(target, draft, [[1, 2]], policy="fixed:2", attention="flash")
    result = generate(target, draft, [[1, 2]], policy="fixed:2", max_new_tokens=6, end_token_ids=[])
    assert result.tokens == [transformers_greedy(target, [1, 2], 6)]
    assert choose(target) is VARLEN
    assert "not attention=flash" in caplog.text


@pytest.mark.parametrize("attention", ["flash", "varlen"])
def test_the_memory_of_its_cache_is_planned(attention):
    target, draft = PAIRS["llama"]
    plan = plan_memory(
        target,
        draft,
        batch=3,
        max_length=LENGTH,
        max_draft_tokens=4,
        vocab_size=VOCAB,
        greedy=True,
        attention=attention,
    )
    models = [CachedModel(model, 3, LENGTH, attention=attention) for model in (target, draft)]
    for model in models:
        model.fill(random_ids(3, 4), [0, 1, 2], [0, 0, 0], [4, 4, 4])
    assert plan.caches == sum(model.bytes for model in models)


def test_torch_has_the_function_whose_contract_this_is():
    """Same parameters, so that a newer torch which renames one fails here and not on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = [inspect.signature(each).parameters for each in (varlen_attn, attention_contracts.varlen_attn)]
    assert list(parameters[0]) == list(parameters[1])
    assert [each.kind for each in parameters[0].values()] == [each.kind for each in parameters[1].values()]
