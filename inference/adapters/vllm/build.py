"""From vLLM's configuration to a policy and its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head.origin import Checkpoint, origin_of
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.settings import (
    TESTED,
    Settings,
    check,
    installed_version,
    is_the_tested,
)
from accept_head.inference.costs.host import CPU_BLOCK, VLLM_V1, Host
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.reader import compile_reading
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policies.spec import DraftShape
from accept_head.inference.policy import DraftPolicy
from accept_head.version import VERSION


def build_policy(vllm_config: Any, device: torch.device, model: nn.Module | None = None) -> DraftPolicy | None:
    """The policy of vLLM's configuration; None if there is none. Raises InputError as `check` and `make_policy` do.

    model: the draft. Without it, before it is loaded, the policy serves only for these errors and its config.
    """
    settings = check(vllm_config)
    if settings is None:
        return None
    draft = vllm_config.speculative_config.draft_model_config
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM may have set another one to load models; heads keep their own
    try:
        vocab, hidden = draft.get_vocab_size(), draft.get_hidden_size()
        embeddings = torch.empty(vocab, hidden, device="meta") if model is None else input_embeddings(model, vocab)
        checkpoint = Checkpoint(draft.model, draft.revision)
        dtype = str(draft.dtype).removeprefix("torch.")
        policy = make_policy(settings.policy, DraftShape(hidden, device, embeddings, checkpoint, dtype))
    finally:
        torch.set_default_dtype(default)
    if model is not None:
        _check_use(policy, vllm_config)
        _announce(settings, vllm_config)
    return policy


def _announce(settings: Settings, vllm_config: Any) -> None:
    trims = vllm_config.speculative_config.enable_adaptive_verification
    how = ", for adaptive verification: its threshold and bounds are not used" if trims else ""
    _logger().info("accept-head %s: policy %s%s", VERSION, settings.policy, how)
    if not is_the_tested(version := installed_version()):
        _logger().warning("accept-head: vLLM %s is taken to be as %s, with which it was tested", version, TESTED)


def _check_use(policy: DraftPolicy, vllm_config: Any) -> None:
    """Check that the head was trained for this target, and for greedy or sampled drafts. Temperatures are not checked:
    each request has its own."""
    if (origin := origin_of(policy)) is not None:
        target = vllm_config.model_config
        origin.check_target(Checkpoint(target.model, target.revision))
        origin.check_mode(greedy=vllm_config.speculative_config.draft_sample_method == "greedy")


def input_embeddings(model: nn.Module, vocab: int) -> Tensor:
    """(vocab, hidden) the draft's input embedding matrix, before any scaling; under tensor parallelism a copy of all
    ranks' parts. Raises InputError when the model has no embedding layer of vLLM's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kind = VocabParallelEmbedding
    layers = [each for each in model.modules() if isinstance(each, kind) and not isinstance(each, ParallelLMHead)]
    if not layers:
        raise InputError(f"the draft, a {type(model).__name__}, has no {kind.__name__}, which heads may read")
    weight = layers[0].weight
    if layers[0].tp_size == 1 and weight.is_floating_point() and weight.dim() == 2:
        return weight.detach()[:vocab]
    ids = torch.arange(vocab, device=weight.device)
    return torch.cat([layers[0](chunk) for chunk in ids.split(1 << 14)])


def drafted_ids(model: nn.Module) -> Tensor | None:
    """(own,) the target's ids of the tokens that a drafter with a vocabulary of its own can propose; None: all, or it
    does not show the logits of its own, as vLLM's classes do."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is None or not (hasattr(model, "logits_processor") and hasattr(model, "lm_head")):
        return None
    return torch.arange(len(offsets), device=offsets.device) + offsets


def build_host(
    vllm_config: Any,
    device: torch.device,
    model: nn.Module,
    tenant_of: Callable[[str], str] | None = None,
    *,
    runner: Host = VLLM_V1,
) -> PolicyHost | None:
    """The host of the configured policy; None if there is none. model: the draft. tenant_of: as in PolicyHost. runner:
    what vLLM's model runner takes time for. Raises InputError as `build_policy` and PolicyHost do."""
    policy = build_policy(vllm_config, device, model)
    settings = Settings.of(vllm_config)
    if policy is None or settings is None:
        return None
    spec, tensor_parallel = vllm_config.speculative_config, vllm_config.parallel_config.tensor_parallel_size
    limit = spec.num_speculative_tokens
    host = PolicyHost(
        policy,
        host=replace(runner, block=CPU_BLOCK) if device.type == "cpu" else runner,
        rows=vllm_config.scheduler_config.max_num_seqs,
        limit=limit,
        device=device,
        greedy=spec.draft_sample_method == "greedy",
        agree=_broadcast if tensor_parallel > 1 else None,
        metrics=_metrics(settings, limit),
        tenant_of=tenant_of,
    )
    if host.metrics is not None:
        host.metrics.costs = host.drafting.learnt
    if settings.compile:
        own = drafted_ids(model) if runner is VLLM_V1 else None  # under the V2 runner the signals are read of all
        _compile(host, policy, spec, device, spec.draft_model_config.get_vocab_size() if own is None else len(own))
    if policy.max_draft_tokens < limit:
        _logger().warning(
            "accept-head: the policy drafts at most %d tokens, but num_speculative_tokens reserves cache for %d",
            policy.max_draft_tokens,
            limit,
        )
    return host


def _compile(host: PolicyHost, policy: DraftPolicy, spec: Any, device: torch.device, vocab: int) -> None:
    """Compile the work for each token now, so that no request waits for it. vocab: size of the logits."""
    draft = spec.draft_model_config
    ids = torch.arange(4, device=device)
    logits = (ids[:, None] * torch.linspace(-1, 1, vocab, device=device)).to(draft.dtype)
    hidden = torch.zeros(4, draft.get_hidden_size(), dtype=draft.dtype, device=device)
    sampled = spec.draft_sample_method == "probabilistic"
    compile_reading(host.reader, policy, logits, hidden, sampled=sampled, logger=_logger())


def head_of(policy: DraftPolicy) -> AcceptanceHead:
    """The head of a policy, for adaptive verification. Raises InputError when its score depends on the token that may
    be dropped."""
    if not isinstance(policy, HeadPolicy):
        raise InputError("adaptive verification takes a head: expected a policy like 'head:PATH'")
    if isinstance(policy, RecalibratedHeadPolicy):
        raise InputError(
            "adaptive verification recalibrates the head by vLLM's own fit; leave out calibration=true and online=true"
        )
    config = policy.head.config
    if config.reads != "before" or "draft_logprob" in config.signals or config.reads_embedding:
        raise InputError(
            "adaptive verification drops drawn tokens, so the head must not look at the token that it scores; expected "
            "one trained with packing 'prefix', without its embedding and without the signal draft_logprob"
        )
    return policy.head


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.accept_head")  # vLLM shows only its own loggers


def _metrics(settings: Settings, limit: int) -> DraftMetrics | None:
    """The metrics on rank 0, None on others: all ranks decide alike."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() != 0:
        return None
    return DraftMetrics(limit, logger=_logger(), log_every=settings.log_every)


def _broadcast(answer: Tensor) -> Tensor:
    """Rank 0's answer, on all ranks. Their own answers may differ, as sums can differ in the last bit; ranks that end a
    round at different tokens would wait for each other forever."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return group.broadcast(answer.to(torch.int64), src=0).to(answer.dtype)
