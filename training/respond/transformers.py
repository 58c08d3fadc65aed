"""Target responses by transformers' batched generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from accept_head.pair import Pair, end_ids, input_device, output_size
from accept_head.prompts import Prompt
from accept_head.sampling import Sampling
from accept_head.trace.config import TraceConfig
from accept_head.training.halving import Halving
from accept_head.training.respond.responder import Batch, in_batches, until_end


def generation_halving() -> Halving:
    return Halving("generating", "lower --max_new_tokens, or spread the target with --device_map auto")


class Said(NamedTuple):
    """One response: ids, and the logits (ids, vocab) that they were drawn from, in the target's dtype."""

    ids: list[int]
    logits: Tensor


def respond(*given: Any, **options: Any) -> list[list[int]]:
    """The ids of `respond_with_logits`."""
    return [said.ids for said in respond_with_logits(*given, **options)]


@torch.no_grad()
def respond_with_logits(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    seed: int,
    vocab_size: int | None = None,
    halving: Halving | None = None,
) -> list[Said]:
    """One response per prompt, without the prompt and with the end-of-sequence token if there is one.

    vocab_size: ids from here on are never generated; these outputs only pad the target's embedding matrix.

    The batch has one seed: the same prompts in the same batch with the same seed give the same responses, also when
    memory runs out and the batch is generated in parts (halving). In another batch, logits may round differently. A
    token then changes only if two tokens tie to within that rounding.

    Raises InputError when not even one prompt fits in memory.
    """
    width = max(len(prompt) for prompt in prompts)
    device = input_device(target)
    pad = tokenizer.pad_token_id
    # (batch, width), padded on the left as generation needs
    input_ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    ends = end_ids(target, tokenizer)
    padding = list(range(vocab_size or output_size(target), output_size(target)))
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad,
        suppress_tokens=padding or None,
        output_logits=True,
        return_dict_in_generate=True,
        **sampling.generation_kwargs(),
    )

    def generate(start: int, stop: int) -> list[Said]:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            with _draws_of(start, stop, len(prompts)):
                output = target.generate(  # type: ignore[operator]
                    input_ids[start:stop], attention_mask=attention_mask[start:stop], generation_config=config
                )
        ids = [until_end(row, ends) for row in output.sequences[:, width:].tolist()]
        steps = [step.to(target.dtype) for step in output.logits]  # generate has converted them to float32
        return [Said(each, torch.stack([step[row] for step in steps[: len(each)]])) for row, each in enumerate(ids)]

    # The model's own generation config may have top_p, penalties and more. Only the recorded settings may apply.
    saved, target.generation_config = target.generation_config, GenerationConfig()
    try:
        return (halving or generation_halving())(len(prompts), generate)
    finally:
        target.generation_config = saved


def _draws_of(start: int, stop: int, rows: int) -> AbstractContextManager[Any]:
    return nullcontext() if (start, stop) == (0, rows) else _PartOfBatch(start, stop, rows)


class _PartOfBatch(TorchFunctionMode):
    """Makes rows start to stop draw the same tokens as in a batch of `rows`: multinomial draws for the whole batch.

    A multinomial sample is the argmax of the row's probabilities divided by one exponential number per element. So it
    depends on the row's place in the batch, but not on other rows' probabilities.
    """

    def __init__(self, start: int, stop: int, rows: int):
        super().__init__()
        self.part, self.rows = slice(start, stop), rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.multinomial:
            return func(*args, **(kwargs or {}))
        part, *rest = args
        whole = part.new_ones(self.rows, part.shape[-1])
        whole[self.part] = part
        return torch.multinomial(whole, *rest, **(kwargs or {}))[self.part]


class TransformersResponder:
    """Generates each batch when it is asked for."""

    def __init__(self, pair: Pair, config: TraceConfig):
        self.pair, self.config, self.drawn_with = pair, config, config.sampling
        self.halving = generation_halving()

    def batches(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[Batch]:
        for batch in in_batches(prompts, self.config.batch_size):
            said = self.respond(batch)
            yield Batch(batch, [each.ids for each in said], [each.logits for each in said])

    def respond(self, batch: Sequence[Prompt]) -> list[Said]:
        # The seed includes the first prompt's index, so that no two batches share random numbers.
        seed = (self.config.seed * 1_000_003 + batch[0].index) % (1 << 63)
        return respond_with_logits(
            self.pair.target,
            self.pair.tokenizer,
            [prompt.ids for prompt in batch],
            self.config.sampling,
            max_new_tokens=self.config.max_new_tokens,
            seed=seed,
            vocab_size=self.pair.vocab_size,
            halving=self.halving,
        )

    def close(self) -> None:
        pass
