"""`generate`: prompts in, tokens and statistics out. Checks all inputs before any model runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, get_args

from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.head.origin import innermost
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import DecodeStats, Request
from accept_head.inference.decode.stopping import Stopping, stop_strings_criteria
from accept_head.inference.engine.attention.choice import Attention
from accept_head.inference.engine.cache import Compile
from accept_head.inference.engine.memory import plan_memory
from accept_head.inference.engine.proof import check_served
from accept_head.inference.kernels.head import bytes_to_pack
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import context_tokens, end_ids, output_size
from accept_head.prompts import check_k_max
from accept_head.sampling import Sampling

Prompts = Tensor | Sequence[Sequence[int]]
GREEDY = Sampling(temperature=0)


class Generated(NamedTuple):
    """tokens: new token ids of each prompt, with the end token. stats: the cost of each response, in the same order."""

    tokens: list[list[int]]
    stats: list[DecodeStats]


def generate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    input_ids: Prompts,
    *,
    policy: DraftPolicy | str,
    attention_mask: Tensor | None = None,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 128,
    batch_size: int | None = None,
    repetition_penalty: float = 1.0,
    logits_processor: Sequence[LogitsProcessor] = (),
    end_token_ids: Sequence[int] | None = None,
    stop_strings: str | Sequence[str] = (),
    stopping_criteria: Sequence[StoppingCriteria] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
    tenants: Sequence[str] | None = None,
    k_max: Sequence[int | None] | None = None,
    verifier: Verifier = "ratio",
    allow_lossy: bool = False,
    compile: Compile = "none",
    attention: Attention = "auto",
    watch: Callable[[Round], None] | None = None,
) -> Generated:
    """Decode prompts speculatively; each response is distributed as the target's own, and greedy ones equal it.

    input_ids: a list of prompts (token ids) of any lengths, or (batch, seq) with an attention_mask that is 0 at
    padding. policy: a DraftPolicy or its SPEC (`fixed:4`, `head:PATH:0.5`, …). batch_size: rows decoded together;
    further prompts take the rows of finished ones; all prompts at once when left out. end_token_ids: the target's own
    when left out. stop_strings: need `tokenizer`. compile: see CachedModel. attention: `sdpa`, `flash`, `varlen`, or
    `auto`, the fastest available one that supports the models (see engine/attention). watch: called after
    every round.

    seed, row_ids: a row's random numbers depend only on the seed and on its id. Without row_ids the id is a hash of the
    prompt plus the number of equal prompts before it. So a prompt gives the same tokens alone, in a batch and in
    another order.

    tenants: the tenant of each prompt, for policies that use it (`per_tenant`, `tenant_share`); "" = unnamed.
    k_max: the most tokens to draft in a round for each prompt, whatever the policy says; 0 = none, None = no bound.

    verifier: how candidates are tested when sampling. `ratio` accepts with probability min(1, p/q). `match` accepts a
    token that equals one drawn from p: fewer are accepted, but any policy is lossless, and a prompt's tokens do not
    depend on the policy. allow_lossy: allow a policy that is not lossless under the verifier.

    Raises InputError when a value makes no sense, when prompt and response do not fit the models' context, when the
    batch does not fit in memory, when the decode loop cannot serve a model, or when a policy would be lossy.
    """
    check_models(target, draft)
    prompts = as_prompts(input_ids, attention_mask)
    vocab_size = min(output_size(target), output_size(draft))
    for index, prompt in enumerate(prompts):
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise InputError(f"prompt {index} has a token id outside 0 to {vocab_size - 1}, the models' vocabulary")
    requests = make_requests(prompts, max_new_tokens, row_ids, tenants, k_max)
    policy = make_policy(policy, draft) if isinstance(policy, str) else policy
    check_tenants(policy, tenants or [])
    processing = Processing(
        sampling, vocab_size, repetition_penalty=repetition_penalty, logits_processor=logits_processor
    )
    ends = end_ids(target, tokenizer) if end_token_ids is None else end_token_ids
    stop_strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    criteria = [*stop_strings_criteria(stop_strings, tokenizer), *stopping_criteria]
    decoder = make_decoder(
        target,
        draft,
        requests,
        policy,
        batch_size=batch_size,
        greedy=sampling.greedy,
        compile=compile,
        attention=attention,
    )
    tokens: list[list[int]] = [[] for _ in requests]
    stats: dict[int, DecodeStats] = {}
    stopping = Stopping(ends, criteria, target.device)
    for done in decoder.run(
        requests,
        policy=policy,
        processing=processing,
        stopping=stopping,
        seed=seed,
        verifier=verifier,
        allow_lossy=allow_lossy,
        watch=watch,
    ):
        tokens[done.request.index] = done.token_ids
        stats[done.request.index] = done.stats
    return Generated(tokens, [stats[index] for index in range(len(requests))])


def make_decoder(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    requests: Sequence[Request],
    policy: DraftPolicy,
    *,
    batch_size: int | None,
    greedy: bool,
    compile: Compile = "none",
    attention: Attention = "auto",
    others: Sequence[DraftPolicy] = (),
) -> Decoder:
    """A decoder that all requests fit into. others: further policies that will run on it; the memory plan covers them
    too. Raises InputError when the models' context or the memory is too small."""
    if compile not in get_args(Compile):
        raise InputError(f"compile is {compile!r}, expected one of {get_args(Compile)}")
    if compile in ("default", "max-autotune") and isinstance(draft, Eagle3Drafter):
        raise InputError(
            f"compile is {compile!r}, expected none, steps or graphs: torch.compile does not take an EAGLE-3 drafter"
        )
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size is {batch_size}, expected a positive integer")
    batch = min(batch_size or len(requests), len(requests))
    policies = [policy, *others]
    most = max(each.max_draft_tokens for each in policies)
    for model, role in ((target, "target"), (draft, "draft")):
        if role == "target" or most:
            check_served(model, attention)
            _check_context(model, role, requests)
    max_length = max(len(request.prompt) + request.max_new_tokens for request in requests)
    plan = plan_memory(
        target,
        draft,
        batch=batch,
        max_length=max_length,
        max_draft_tokens=most,
        vocab_size=min(output_size(target), output_size(draft)),
        greedy=greedy,
        longest_prompt=max(len(request.prompt) for request in requests),
        attention=attention,
        graphs=compile == "graphs",
        head=sum(bytes_to_pack(score, draft.dtype) for score in map(_score_of, policies)),
    )
    plan.check_fits(target.device)
    return Decoder(target, draft, plan, compile=compile, attention=attention)


def check_tenants(policy: DraftPolicy, tenants: Iterable[str]) -> None:
    """Raises InputError when the policy is `by_tenant` and no prompt names a tenant: all would count as one tenant.
    tenants: of the prompts."""
    if Drafting(policy).by_tenant and not any(tenants):
        raise InputError(
            "the policy goes by tenants (per_tenant, tenant_share), but nobody says whose a prompt is; expected a "
            "field 'tenant' in the prompts' records, or `tenants` in Python"
        )


def _score_of(policy: DraftPolicy) -> object:
    """The score function of the policy's head, or of the wrapped policy's head; None if there is no head."""
    return getattr(innermost(policy), "probability", None)


def _check_context(model: PreTrainedModel, role: str, requests: Sequence[Request]) -> None:
    room = context_tokens(model)
    for request in requests:
        if (needed := len(request.prompt) + request.max_new_tokens) > room:
            raise InputError(
                f"prompt {request.index} has {len(request.prompt)} tokens, {needed} with its response, but the "
                f"{role}'s context has {room}"
            )


def check_models(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raises InputError when the models differ in device or dtype."""
    if draft.device != target.device:
        raise InputError(f"the draft is on {draft.device} and the target on {target.device}; put both on one device")
    if draft.dtype != target.dtype:
        raise InputError(f"the draft is {draft.dtype} and the target {target.dtype}; load both in one dtype")


def as_prompts(input_ids: Prompts, attention_mask: Tensor | None = None) -> list[list[int]]:
    """Token ids of each prompt, without padding. Raises InputError when there is no prompt or one is empty."""
    if isinstance(input_ids, Tensor):
        if input_ids.ndim != 2:
            raise InputError(f"input_ids has shape {tuple(input_ids.shape)}, expected (batch, seq)")
        if attention_mask is None:
            prompts = input_ids.tolist()
        elif attention_mask.shape != input_ids.shape:
            raise InputError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, expected that of input_ids, "
                f"{tuple(input_ids.shape)}"
            )
        else:
            prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
    else:
        if not all(isinstance(prompt, Sequence | Tensor) and not isinstance(prompt, str) for prompt in input_ids):
            raise InputError("input_ids is not a list of prompts, expected one list of token ids a prompt")
        prompts = [prompt.tolist() if isinstance(prompt, Tensor) else list(prompt) for prompt in input_ids]
    if not prompts:
        raise InputError("there are no prompts")
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise InputError(f"prompt {empty[0]} is empty: each needs at least one token")
    return prompts


def make_requests(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    row_ids: Sequence[int] | None = None,
    tenants: Sequence[str] | None = None,
    k_max: Sequence[int | None] | None = None,
) -> list[Request]:
    """One request a prompt. Raises InputError when max_new_tokens is below 1, when the number of row_ids, tenants or
    k_max differs, or when one of these makes no sense."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected a positive integer")
    row_ids = content_ids(prompts) if row_ids is None else row_ids
    tenants = [""] * len(prompts) if tenants is None else tenants
    k_max = [None] * len(prompts) if k_max is None else k_max
    for name, values in (("row_ids", row_ids), ("tenants", tenants), ("k_max", k_max)):
        if len(values) != len(prompts):
            raise InputError(f"there are {len(values)} {name} and {len(prompts)} prompts; expected one a prompt")
    return [
        Request(index, prompt, max_new_tokens, key, tenant=tenant, k_max=check_k_max(most, f"prompt {index}"))
        for index, (prompt, key, tenant, most) in enumerate(zip(prompts, row_ids, tenants, k_max, strict=True))
    ]


def content_ids(prompts: Sequence[Sequence[int]]) -> list[int]:
    """An id per prompt, from its tokens and the number of equal prompts before it; fits an int64."""
    seen: Counter[bytes] = Counter()
    ids = []
    for prompt in prompts:
        digest = hashlib.sha256(b"".join(int(token).to_bytes(4, "little") for token in prompt)).digest()
        ids.append((int.from_bytes(digest[:8], "little") >> 2) + seen[digest])
        seen[digest] += 1
    return ids
