"""Toy models, the smallest of which can be enumerated, and transformers' own greedy decoding as a reference."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor
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

from accept_head import AcceptanceHead, HeadConfig, Pair, Sampling
from accept_head.inference.policies.online.signals import DEVIATION, MEAN
from accept_head.signals import SIGNALS

TOKENS = 5
VOCAB = 32
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}

Models = tuple[PreTrainedModel, PreTrainedModel]


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


def pair_of(target: PreTrainedModel, draft: PreTrainedModel) -> Pair:
    return Pair(target, draft, PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast), target.config.vocab_size)


def toy_pair() -> Pair:
    return pair_of(llama(0, layers=2, sharpness=6.0), llama(1, sharpness=6.0))


def random_head(
    hidden: int,
    *,
    depth: int = 1,
    signals: bool = False,
    base: bool = False,
    embeddings: Tensor | None = None,
    std: float = 1.0,
    **config: Any,
) -> AcceptanceHead:
    """An untrained head whose predictions vary. embeddings: (vocab, hidden) the draft's, if it is to read them.

    base: with one, and a residual on `width` components of the state; without a width the base is alone.
    """
    if base:
        config |= {"signals": SIGNALS, "signal_mean": MEAN, "signal_std": DEVIATION, "base": True, "reads": "before"}
        config |= {"residual": "width" in config, "standardised": "width" in config}
        depth = depth if "width" in config else 0
    elif signals:
        config |= {"signals": SIGNALS, "signal_mean": (-1.0, 1.0, 0.5), "signal_std": (1.0, 0.5, 0.2)}
    if embeddings is not None:
        config |= {"embedding_std": float(embeddings.square().mean().sqrt())}
    torch.manual_seed(2)
    head = AcceptanceHead(HeadConfig(hidden_size=hidden, depth=depth, **config)).attach(embeddings)
    for name, weight in head.named_parameters():
        if name in ("output.weight", "base.weight"):
            torch.nn.init.normal_(weight, std=std)
    return head.eval()


# From 5.21 on transformers caps attention scores whenever the config says so; before it, not under `sdpa`.
UNCAPPED = {"attn_logit_softcapping": None}


def tiny(model: type, config: type, *, layers: int, seed: int = 0, **extra: Any) -> PreTrainedModel:
    """A random model of any architecture: attention that matters, and logits far enough apart not to tie."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "max_position_embeddings": 64,
        "intermediate_size": 48,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return _sharpen(model(config(**{**common, **extra})), 20.0)


def two(model: type, config: type, *, noise: float = 0.04, **extra: Any) -> Models:
    """(target, draft) of one architecture: the draft is the target with noise on its weights, so that some is right."""
    target = tiny(model, config, layers=3, **extra)
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    for weight in draft.parameters():
        weight += noise * weight.std() * torch.randn(weight.shape)
    return target, draft


def one_layer_pair() -> Models:
    """(target, draft), the smallest that attend to their context: where operations are recorded, or runs are many."""
    target = tiny(LlamaForCausalLM, LlamaConfig, layers=1, num_key_value_heads=2)
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    for weight in draft.parameters():
        weight += 0.08 * weight.std() * torch.randn(weight.shape)
    return target, draft


def architectures() -> dict[str, Models]:
    return {
        "llama": two(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2),
        "qwen3": two(Qwen3ForCausalLM, Qwen3Config, **GROUPED),
        "gemma2": two(Gemma2ForCausalLM, Gemma2Config, layer_types=None, sliding_window=64, **UNCAPPED, **GROUPED),
        "gpt2": two(GPT2LMHeadModel, GPT2Config),
        "gpt_neox": two(GPTNeoXForCausalLM, GPTNeoXConfig),
    }


def ragged_prompts(count: int, *, vocab: int = VOCAB, longest: int = 24, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; lengths follow no order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + (7 * row) % longest for row in range(count)]
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def transformers_greedy(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """transformers' own loop on one prompt: no padding, and nothing of ours. options: of its `generate`."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
    return output[0, len(prompt) :].tolist()


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


def labels_by_tenant(policy):
    """Tokens that each tenant has taught a head with `online=true` whose half-life has no end; "" is nobody."""
    online = getattr(policy, "policy", policy).recalibration
    online._sum_up()
    labels = (online.sums.labels + online.fresh.labels).tolist()
    return {name: labels[place] for name, place in {"": 0, **online.places}.items()}
