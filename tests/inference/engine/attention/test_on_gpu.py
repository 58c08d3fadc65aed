"""The attention kernels in bfloat16 on a GPU. test_backends.py tests everything else."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from accept_head.inference.engine.attention.choice import BACKENDS, choose, refusal
from accept_head.inference.engine.proof import check_served
from tests.inference.support.cached import WINDOW, ragged_logits
from tests.inference.support.toy import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GROUPED = {"num_key_value_heads": 2, "head_dim": 64}
LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, **GROUPED}
MAKE = {
    "llama": lambda: tiny(LlamaForCausalLM, LlamaConfig, layers=2, **GROUPED),
    "mistral": lambda: tiny(MistralForCausalLM, MistralConfig, layers=2, sliding_window=WINDOW, **GROUPED),
    "gemma2": lambda: tiny(Gemma2ForCausalLM, Gemma2Config, layers=2, **LOCAL_AND_GLOBAL),
    "gemma2 capped": lambda: tiny(
        Gemma2ForCausalLM, Gemma2Config, layers=2, attn_logit_softcapping=2.0, **LOCAL_AND_GLOBAL
    ),
}


@pytest.mark.parametrize("compile", ["none", "graphs"])
@pytest.mark.parametrize("attention", ["flash", "varlen"])
@pytest.mark.parametrize("name", MAKE)
def test_a_kernel_is_as_near_to_float32_as_sdpa_is(name, attention, compile):
    exact, model = MAKE[name](), MAKE[name]().to("cuda", torch.bfloat16)
    if "capped" in name:
        for each in (exact, model):
            each.set_attn_implementation("eager")
    backend = next(each for each in BACKENDS if each.name == attention)
    if reason := refusal(backend, model):
        pytest.skip(reason)
    check_served(model, attention)
    expected = ragged_logits(exact, "sdpa")
    found = ragged_logits(model, attention, compile=compile)
    baseline = ragged_logits(model, "sdpa")
    for right, one, other in zip(expected, found, baseline, strict=True):
        allowed = 2 * (other.float().cpu() - right).abs().mean() + 1e-3
        assert (one.float().cpu() - right).abs().mean() <= allowed


def test_auto_finds_one_on_a_recent_gpu():
    if torch.cuda.get_device_capability() < (8, 0) or torch.version.cuda is None:
        pytest.skip("an older GPU, or one of another make")
    assert choose(MAKE["llama"]().to("cuda", torch.bfloat16)) is not None
