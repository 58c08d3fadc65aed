"""A toy pair on a handful of tokens, small enough to enumerate every response exactly."""

from __future__ import annotations

import itertools

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from accept_head import Pair, Sampling

TOKENS = 5


def llama(seed: int, vocab: int = TOKENS, layers: int = 1, sharpness: float = 1.0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return _sharpen(LlamaForCausalLM(config), sharpness)


def architectures(vocab: int = 32) -> dict[str, tuple[PreTrainedModel, PreTrainedModel]]:
    """name → (target, draft): random weights, but logits far enough apart that greedy decoding has no ties."""
    common = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "intermediate_size": 48,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }

    def two(model: type, config: type, **extra: object) -> tuple[PreTrainedModel, PreTrainedModel]:
        models = []
        for seed, layers in ((0, 3), (1, 1)):
            torch.manual_seed(seed)
            models.append(_sharpen(model(config(**{**common, "num_hidden_layers": layers, **extra})), 20.0))
        return models[0], models[1]

    grouped = {"num_key_value_heads": 2, "head_dim": 8}
    return {
        "llama": two(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2),
        "qwen3": two(Qwen3ForCausalLM, Qwen3Config, **grouped),
        "gemma2": two(Gemma2ForCausalLM, Gemma2Config, layer_types=None, sliding_window=64, **grouped),
        "gpt2": two(GPT2LMHeadModel, GPT2Config),
        "gpt_neox": two(GPTNeoXForCausalLM, GPTNeoXConfig),
    }


def pair_of(target: PreTrainedModel, draft: PreTrainedModel) -> Pair:
    return Pair(target, draft, PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast), target.config.vocab_size)


def toy_pair() -> Pair:
    return pair_of(llama(0, layers=2, sharpness=6.0), llama(1, sharpness=6.0))


@torch.no_grad()
def exact_distribution(model: PreTrainedModel, prompt: list[int], length: int, sampling: Sampling) -> torch.Tensor:
    """P(response) of every response of `length` tokens, by the chain rule, in itertools.product order."""
    vocab = model.config.vocab_size
    responses = list(itertools.product(range(vocab), repeat=length))
    ids = torch.tensor([[*prompt, *response] for response in responses])
    p = sampling.probabilities(model(ids).logits[:, len(prompt) - 1 : -1]).double()
    return p.gather(-1, ids[:, len(prompt) :, None]).squeeze(-1).prod(-1)


def _sharpen(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Random models are nearly uniform; larger output weights make them disagree."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape) * factor * 0.2)
    return model.eval().requires_grad_(False)
