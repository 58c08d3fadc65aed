"""Llama shapes with random weights, for questions whose answer does not depend on what the weights are."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from accept_head.pair import Pair, default_device

LLAMA_3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_32_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
SMALL_TARGET: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SMALL_DRAFT: dict[str, Any] = {**SMALL_TARGET, "hidden_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
CONTEXT_TOKENS = 4096


def build(shape: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PreTrainedModel:
    """A Llama of this shape, made where it will run: no copy of 16 GB through the host."""
    device = default_device()
    config = LlamaConfig(
        **shape,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def build_pair(tiny: bool, *, liger: bool = False) -> Pair:
    """Target and draft of the shapes of Llama 3 8B and Llama 3.2 1B, or tiny ones. There is no tokenizer. liger: with
    Liger's kernels."""
    if liger:  # from here on all Llamas of this process have them
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
    shapes = (SMALL_TARGET, SMALL_DRAFT) if tiny else (LLAMA_3_8B, LLAMA_32_1B)
    target, draft = (build(shape, seed=seed) for seed, shape in enumerate(shapes))
    return Pair(target, draft, None, shapes[0]["vocab_size"])  # type: ignore[arg-type]
