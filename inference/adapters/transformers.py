"""transformers' `generate` with our decode loop:

    model.generate(**inputs, custom_generate=accept_head.inference.adapters.transformers.generate,
                   draft=draft_model, policy="head:PATH:0.5")

The generation config, logits processors and stopping criteria are those that `generate` prepares, and the result has
the form of `generate`'s. Any batch size works; transformers' own assisted generation allows 1 only. Random numbers come
from torch's generator, so `torch.manual_seed` makes a sampled call repeatable.

transformers does not pass `streamer=`, `tokenizer=` (which `stop_strings=` needs) and `assistant_model=` on to a
function: pass stop strings as stopping_criteria=[StopStringCriteria(tokenizer, [...])].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from accept_head.errors import InputError
from accept_head.inference.decode.generate import as_prompts, check_models, check_tenants, make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import DecodeStats, Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import output_size
from accept_head.sampling import Sampling

SAMPLING_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Options that need another decoding method, with the value that turns each off.
REFUSED = {"inputs_embeds": None, "num_beams": 1, "penalty_alpha": None, "dola_layers": None}


class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The result of `generate` with return_dict_in_generate=True, plus one DecodeStats a row.

    scores, logits: present with output_scores and output_logits, one (batch, vocab) a new token; finished rows hold
    zeros.
    """

    stats: list[DecodeStats] | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft: PreTrainedModel | None = None,
    policy: DraftPolicy | str = "fixed:4",
    batch_size: int | None = None,
    tenants: Sequence[str] | None = None,
    k_max: Sequence[int | None] | None = None,
    verifier: Verifier = "ratio",
    allow_lossy: bool = False,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The function to pass as `custom_generate`. input_ids: (batch, seq), padded on the left.

    draft: the draft model; `assistant_model=` cannot be used, as transformers drops it before the call. policy: a
    DraftPolicy or its SPEC. batch_size: rows decoded together; all rows when left out. tenants, k_max, verifier,
    allow_lossy: as in `accept_head.inference.generate`.

    Returns (batch, seq + new tokens) ids, padded after each row's end, or a SpeculativeOutput.
    Raises InputError (a ValueError) naming an option that speculative decoding does not support.
    """
    if draft is None:
        raise InputError(
            "no draft model: pass draft=... next to custom_generate=... (transformers drops assistant_model= when "
            "custom_generate is a function)"
        )
    config = generation_config
    _refuse(config, model_kwargs)
    check_models(model, draft)
    chosen = make_policy(policy, draft) if isinstance(policy, str) else policy
    penalty, others = _penalty(logits_processor)
    sampling, processors = _split(config, others)
    limits = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
    max_length = min(limits, default=config.max_length)
    check_tenants(chosen, tenants or [])
    requests = _requests(input_ids, model_kwargs.get("attention_mask"), max_length, tenants=tenants, k_max=k_max)
    decoder = make_decoder(model, draft, requests, chosen, batch_size=batch_size, greedy=sampling.greedy)
    record = _Recorder(len(requests), bool(config.output_scores), bool(config.output_logits), sampling)
    stopping = _stopping(stopping_criteria, input_ids.device)
    vocab_size = min(output_size(model), output_size(draft))
    processing = Processing(sampling, vocab_size, repetition_penalty=penalty, logits_processor=processors)
    finished = decoder.run(
        requests,
        policy=chosen,
        processing=processing,
        stopping=stopping,
        seed=int(torch.randint(1 << 62, ())) if not sampling.greedy else 0,
        verifier=verifier,
        allow_lossy=allow_lossy,
        watch=record.watch if record.wanted else None,
    )
    rows = {done.request.index: done for done in finished}
    tokens = [rows[index].token_ids for index in range(len(requests))]
    sequences = _sequences(input_ids, tokens, config)
    if not config.return_dict_in_generate:
        return sequences
    results: dict[str, Any] = {"sequences": sequences, **record.results(tokens)}
    output = SpeculativeOutput(**results)
    output.stats = [rows[index].stats for index in range(len(requests))]
    return output


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raises InputError for an option that needs another decoding method."""
    for name, neutral in REFUSED.items():
        value = model_kwargs.get(name, getattr(config, name, None))
        if value is not None and value != neutral:
            shown = "given" if isinstance(value, Tensor) else repr(value)
            raise InputError(f"{name} is {shown}: speculative decoding does not support it")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise InputError(f"{name} is not supported: a round's forwards hold rejected tokens too")
    for name in ("past_key_values", "cache"):  # the same: transformers renamed it in 5.24
        past = model_kwargs.get(name)
        if past is not None and past.get_seq_length():
            raise InputError(f"{name} holds tokens already: pass the whole prompt, the decode loop has its own cache")


def _penalty(processors: LogitsProcessorList) -> tuple[float, list[Any]]:
    """The repetition penalty and the other processors.

    From 5.23 on transformers' penalty leaves out the padding, with a length for each row of its batch. Our loop asks a
    processor for one row at a time, so it penalises by itself, before all other processors. Raises InputError when
    transformers applies it after another one.
    """
    by_row = [index for index, each in enumerate(processors) if isinstance(each, RepetitionPenaltyLogitsProcessor)
              and isinstance(each.prompt_ignore_length, Tensor)]  # fmt: skip
    if not by_row:
        return 1.0, list(processors)
    if by_row != [0]:
        raise InputError(
            f"a {type(processors[0]).__name__} stands before the repetition penalty: speculative decoding needs the "
            "penalty to be first; leave out one of them"
        )
    return processors[0].penalty, list(processors[1:])


def _split(config: GenerationConfig, processors: Sequence[Any]) -> tuple[Sampling, list[Any]]:
    """Split the processors into sampling settings of our loop and the remaining processors.

    The four warpers are taken out only if they stand at the end of the list, in the order in which `Sampling` applies
    them.
    """
    if not config.do_sample:
        return Sampling(temperature=0), list(processors)
    kept, settings, last = list(processors), {}, len(SAMPLING_WARPERS)
    while kept and type(kept[-1]) in SAMPLING_WARPERS[:last] and getattr(kept[-1], "min_tokens_to_keep", 1) == 1:
        warper = kept.pop()
        last = SAMPLING_WARPERS.index(type(warper))
        name = ("temperature", "top_k", "top_p", "min_p")[last]
        settings[name] = getattr(warper, name)
    return Sampling(**{"temperature": 1.0, "top_k": 0, **settings}), kept


def _requests(input_ids: Tensor, mask: Tensor | None, max_length: int, **of_each: Any) -> list[Request]:
    """of_each: for `make_requests`."""
    prompts = as_prompts(input_ids, mask)
    width = input_ids.shape[1]
    new_tokens = max_length - width
    if new_tokens < 1:
        raise InputError(f"max_length is {max_length}, but the input has {width} tokens; set max_new_tokens")
    left = [input_ids[index, : width - len(prompt)] for index, prompt in enumerate(prompts)]
    requests = make_requests(prompts, new_tokens, **of_each)
    return [replace(request, left=padding) for request, padding in zip(requests, left, strict=True)]


def _end_ids(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _stopping(criteria: StoppingCriteriaList, device: torch.device) -> Stopping:
    """Split the criteria: the loop itself handles end tokens and the longest length. A user's criterion for end tokens
    replaces the config's, so end tokens are read from the criteria."""
    ends = [int(token) for c in criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id]
    own = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    return Stopping(ends, own, device)


def _sequences(input_ids: Tensor, tokens: Sequence[Sequence[int]], config: GenerationConfig) -> Tensor:
    longest = max(len(row) for row in tokens)
    pad = config.pad_token_id if config.pad_token_id is not None else next(iter(_end_ids(config)), 0)
    new = torch.full((len(tokens), longest), int(pad), dtype=input_ids.dtype)
    for index, row in enumerate(tokens):
        new[index, : len(row)] = torch.tensor(row)
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


class _Recorder:
    """Keeps the target's logits or scores of each emitted token, if requested."""

    def __init__(self, rows: int, scores: bool, logits: bool, sampling: Sampling):
        self.want_scores, self.want_logits, self.sampling = scores, logits, sampling
        self.scores: list[list[Tensor]] = [[] for _ in range(rows)]
        self.logits: list[list[Tensor]] = [[] for _ in range(rows)]

    @property
    def wanted(self) -> bool:
        return self.want_scores or self.want_logits

    def watch(self, round_: Round) -> None:
        emitted = (round_.verified.accepted + 1).tolist()
        for row in round_.rows.live_rows:
            request = round_.rows.requests[row]
            assert request is not None
            slots = slice(None, emitted[row])
            if self.want_scores:
                scores = round_.scores[row, slots].float()
                warped = scores if self.sampling.greedy else self.sampling.filter(scores)
                self.scores[request.index] += warped.unbind(0)
            if self.want_logits:
                self.logits[request.index] += round_.logits[row, slots].float().unbind(0)

    def results(self, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
        longest = max(len(row) for row in tokens)
        wanted = (("scores", self.want_scores, self.scores), ("logits", self.want_logits, self.logits))
        # An end token may have cut a round's last tokens.
        cut = {
            name: [column[: len(row)] for column, row in zip(columns, tokens, strict=True)]
            for name, is_wanted, columns in wanted
            if is_wanted
        }
        return {name: _steps(columns, longest) for name, columns in cut.items()}


def _steps(rows: list[list[Tensor]], longest: int) -> tuple[Tensor, ...]:
    """One (batch, vocab) tensor a step; zeros for finished rows."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(longest))
