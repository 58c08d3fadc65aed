"""Target responses by transformers' batched generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from accept_head.pair import end_ids, output_size
from accept_head.sampling import Sampling


@torch.no_grad()
def respond(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """One response a prompt, as ids, without the prompt and with the end-of-sequence token if one was produced.

    vocab_size: ids from here on are never generated: outputs that only pad the target's embedding matrix. The batch is
    seeded as a whole: the same prompts in the same batch with the same seed give the same responses.
    """
    width = max(len(prompt) for prompt in prompts)
    device = target.device
    pad = tokenizer.pad_token_id
    # (batch, width), padded on the left as generation needs
    input_ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    ends = end_ids(target, tokenizer)
    padding = list(range(vocab_size or output_size(target), output_size(target)))
    # The model's own generation config may bring top_p, penalties and more: only the recorded settings may apply.
    saved, target.generation_config = target.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            output = target.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=attention_mask,
                generation_config=GenerationConfig(
                    max_new_tokens=max_new_tokens,
                    eos_token_id=ends,
                    pad_token_id=pad,
                    suppress_tokens=padding or None,
                    **sampling.generation_kwargs(),
                ),
            )
    finally:
        target.generation_config = saved
    return [_until_end(row, ends) for row in output[:, width:].tolist()]


def _until_end(row: list[int], ends: list[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in ends:
            return row[: position + 1]
    return row
