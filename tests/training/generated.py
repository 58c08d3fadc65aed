"""Responses by transformers' own generation: the reference for those of our loop and of other engines."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from accept_head.pair import end_ids
from accept_head.training.respond.responder import until_end
from tests.examples import generation_kwargs


def generated(model, tokenizer, prompts, sampling, *, max_new_tokens, seed=0, vocab_size=None):
    """One response per prompt, each generated alone, by the recorded settings only."""
    outputs, ends = model.get_output_embeddings().weight.shape[0], end_ids(model, tokenizer)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=list(range(vocab_size or outputs, outputs)) or None,
        **generation_kwargs(sampling),
    )
    saved, model.generation_config = model.generation_config, GenerationConfig()
    responses = []
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for prompt in prompts:
                ids = torch.tensor([list(prompt)])
                out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
                responses.append(until_end(out[0, ids.shape[1] :].tolist(), ends))
    finally:
        model.generation_config = saved
    return responses
