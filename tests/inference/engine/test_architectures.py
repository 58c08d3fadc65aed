"""Sliding windows work beyond their size. Architectures that the ragged cache cannot serve are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.engine import proof
from accept_head.inference.engine.attention.kinds import AttentionKinds
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.proof import check_served
from accept_head.pair import load_pair
from tests.inference.support.toy import GROUPED, VOCAB, ragged_prompts, tiny, transformers_greedy, two

WINDOW, NEW_TOKENS = 5, 20
ONE = {"num_key_value_heads": 2}
SLIDING = {"sliding_window": WINDOW}
LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# name → (target, draft) for the config's sliding_window
WINDOWED = {
    "mistral": lambda **w: two(MistralForCausalLM, MistralConfig, **GROUPED, **w),
    "gemma2": lambda **w: two(Gemma2ForCausalLM, Gemma2Config, **LOCAL_AND_GLOBAL, **GROUPED, **w),
    "gemma3": lambda **w: two(Gemma3ForCausalLM, Gemma3TextConfig, **LOCAL_AND_GLOBAL, **GROUPED, **w),
    "qwen2": lambda **w: two(Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, max_window_layers=1, **ONE, **w),
    "phi3": lambda **w: two(Phi3ForCausalLM, Phi3Config, **ONE, **w),
    "cohere2": lambda **w: two(Cohere2ForCausalLM, Cohere2Config, **LOCAL_AND_GLOBAL, **GROUPED, **w),
    "gpt_oss": lambda **w: two(
        GptOssForCausalLM, GptOssConfig, num_local_experts=4, **LOCAL_AND_GLOBAL, **GROUPED, **w
    ),
}


def greedy(target, draft, prompts, policy="fixed:4", **options):
    options = {"max_new_tokens": NEW_TOKENS, "end_token_ids": [], **options}
    return generate(target, draft, prompts, policy=policy, **options)


def references(model, prompts):
    return [transformers_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", WINDOWED)
def test_models_with_sliding_windows_decode_exactly_beyond_the_window(name):
    """Prompts of 1 to 24 tokens and responses of 20, through windows of 5."""
    target, draft = WINDOWED[name](sliding_window=WINDOW)
    prompts = ragged_prompts(9)
    expected = references(target, prompts)
    result = greedy(target, draft, prompts, batch_size=4)
    assert result.tokens == expected
    assert sum(row.accepted for row in result.stats) > 0.2 * sum(row.drafted for row in result.stats)
    everything_seen, _ = WINDOWED[name](sliding_window=64)
    assert references(everything_seen, prompts) != expected  # the window matters


def test_the_kinds_of_layers_are_those_of_the_config():
    kinds = {name: AttentionKinds.of(make(sliding_window=WINDOW)[0]) for name, make in WINDOWED.items()}
    assert {kind.window for kind in kinds.values()} == {WINDOW}
    assert {name for name, kind in kinds.items() if not kind.full} == {"mistral", "phi3"}


def opt():
    return two(OPTForCausalLM, OPTConfig, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3)


def test_opt_decodes_exactly_as_a_target():
    """Its positions are looked up, and start at 2."""
    target, draft = opt()[0], two(LlamaForCausalLM, LlamaConfig)[1]
    prompts = ragged_prompts(9)
    assert greedy(target, draft, prompts, batch_size=4).tokens == references(target, prompts)


def test_opt_decodes_exactly_as_a_draft():
    """OPTForCausalLM runs its decoder, not its base model: the last hidden state has to be found all the same."""
    target, draft = opt()
    prompts = ragged_prompts(9)
    result = greedy(target, draft, prompts, batch_size=4)
    assert result.tokens == references(target, prompts)
    assert sum(row.accepted for row in result.stats) > 0.2 * sum(row.drafted for row in result.stats)


@pytest.mark.parametrize("longest", [8, 24])
def test_frequencies_that_depend_on_the_longest_row_are_refused_or_harmless(longest):
    """LongRoPE turns differently once any row of a batch is past the original context, here 32 tokens."""
    longrope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    longrope |= {"original_max_position_embeddings": 32}
    target, draft = two(
        Phi3ForCausalLM, Phi3Config, rope_parameters=longrope, original_max_position_embeddings=32, **ONE
    )
    prompts = ragged_prompts(8, longest=longest)
    try:
        tokens = greedy(target, draft, prompts).tokens
    except InputError as error:
        assert longest == 24 and "Phi3" in str(error)
    else:
        assert tokens == references(target, prompts)


REFUSED = {
    "mamba": (lambda: MambaForCausalLM(MambaConfig(**SMALL, state_size=4)), "recurrent state"),
    "jamba": (
        lambda: JambaForCausalLM(JambaConfig(**SMALL, **ONE, num_experts=2, use_mamba_kernels=False)),
        "recurrent state",
    ),
    "recurrent_gemma": (
        lambda: RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SMALL, num_key_value_heads=1, lru_width=32)),
        "recurrent state",
    ),
    "bloom": (lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)), "position"),
    "falcon": (lambda: FalconForCausalLM(FalconConfig(**SMALL, alibi=True)), "ragged cache"),
    "llama4": (
        lambda: Llama4ForCausalLM(
            Llama4TextConfig(**SMALL, **GROUPED, attention_chunk_size=8, intermediate_size_mlp=48, num_local_experts=2)
        ),
        "chunked attention",
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        "encoder-decoder",
    ),
}
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_by_name_and_reason(name, role):
    make, reason = REFUSED[name]
    served, model = two(LlamaForCausalLM, LlamaConfig)[0], make().eval()
    models = (model, served) if role == "target" else (served, model)
    with pytest.raises(InputError, match=f"{type(model).__name__}.*{reason}"):
        greedy(*models, [[1, 2, 3]])


def test_an_attention_that_takes_no_explicit_mask_is_refused():
    model = tiny(LlamaForCausalLM, LlamaConfig, layers=1)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2"):
        AttentionKinds.of(model).masks(torch.tensor([[0]]), 1)


class IgnoresPositions(LlamaForCausalLM):
    def forward(self, *arguments, position_ids=None, **options):
        return super().forward(*arguments, **options)


class IgnoresMask(LlamaForCausalLM):
    def forward(self, *arguments, attention_mask=None, position_ids=None, **options):
        return super().forward(*arguments, position_ids=position_ids, **options)


class SeesNoCache(LlamaForCausalLM):
    def forward(self, *arguments, attention_mask=None, position_ids=None, past_key_values=None, **options):
        if attention_mask is not None:
            keys = torch.arange(attention_mask.shape[-1])
            attention_mask = attention_mask & (keys >= position_ids[:, :1, None].unsqueeze(1))
        options |= {"attention_mask": attention_mask, "past_key_values": past_key_values}
        return super().forward(*arguments, position_ids=position_ids, **options)


class SeesOneSlotTooMany(LlamaForCausalLM):
    def forward(self, *arguments, attention_mask=None, position_ids=None, **options):
        if attention_mask is not None:
            attention_mask = attention_mask | attention_mask.roll(1, -1)
        return super().forward(*arguments, attention_mask=attention_mask, position_ids=position_ids, **options)


@pytest.mark.parametrize("broken", [IgnoresPositions, IgnoresMask, SeesNoCache, SeesOneSlotTooMany])
def test_a_model_whose_attention_is_silently_wrong_is_caught(broken):
    """Nothing in its config tells; alone and without a cache it is right."""
    model, sound = tiny(broken, LlamaConfig, layers=2), tiny(LlamaForCausalLM, LlamaConfig, layers=2)
    ids = torch.tensor(ragged_prompts(1, longest=1)[0] * 8)[None]
    assert torch.equal(model(ids).logits, sound(ids).logits)
    check_served(sound)
    with pytest.raises(InputError, match=broken.__name__):
        check_served(model)
    with pytest.raises(InputError, match=broken.__name__):
        greedy(sound, model, [[1, 2, 3]])


@pytest.mark.parametrize("broken", [IgnoresPositions, IgnoresMask])
def test_a_trained_model_whose_attention_is_silently_wrong_is_caught(broken, embedded_pair):
    model = broken(embedded_pair.draft.config).eval()
    model.load_state_dict(embedded_pair.draft.state_dict())
    with pytest.raises(InputError, match=broken.__name__):
        check_served(model)


def test_a_drafter_that_is_fed_other_states_is_caught(embedded_pair_folder, monkeypatch):
    """Also where it lacks most of the target's tokens, whose logits are -inf."""

    def drafter():
        path = embedded_pair_folder / "eagle3"
        return load_pair(embedded_pair_folder / "target", path, device="cpu", dtype="float32").draft

    check_served(drafter())
    fill = CachedModel.fill_drafter
    monkeypatch.setattr(
        CachedModel, "fill_drafter", lambda self, ids, group, states: fill(self, ids, group, states.flip(0))
    )
    with pytest.raises(InputError, match="gives other logits"):
        check_served(drafter())


def test_rounding_of_many_logits_is_none_of_it():
    """In bfloat16 the largest of 130,000 differences from float32 is 0.14 of the spread; an H100 was refused for it."""
    random = torch.Generator().manual_seed(0)
    expected, noise = (torch.randn(2, 3, 1 << 17, generator=random) for _ in range(2))
    rounded = expected + 0.027 * noise
    assert (rounded - expected).abs().max() > 0.1
    assert proof._difference(rounded, expected) == pytest.approx(0.027, rel=0.01)
    assert proof._tolerance(torch.float32) < 0.027 < proof._tolerance(torch.bfloat16) < 0.1
    assert proof._difference(rounded.roll(1, -1), expected) > 1
    rounded[1, 2] += 0.2 * noise[0, 0]  # one token of six is wrong
    assert proof._difference(rounded, expected) > proof._tolerance(torch.bfloat16)
