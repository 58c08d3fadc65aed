"""From vLLM's configuration to a policy and its host."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.head import AcceptanceHead
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.adapters.vllm.settings import Settings, check
from accept_head.inference.policies.batch_stop import VLLM
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.specs import DraftShape, make_policy
from accept_head.inference.policy import DraftPolicy
from accept_head.version import VERSION

GREEDY_BELOW = 1e-5  # temperatures that vLLM takes for 0


def build_policy(vllm_config: Any, device: torch.device) -> DraftPolicy | None:
    """None where none is asked for. Raises InputError as `check` and `make_policy` do."""
    settings = check(vllm_config)
    if settings is None:
        return None
    draft = vllm_config.speculative_config.draft_model_config
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # vLLM may be loading models of another; heads stay as they were trained
    try:
        policy = make_policy(settings.policy, DraftShape(draft.get_hidden_size(), device), host=VLLM)
    finally:
        torch.set_default_dtype(default)
    _logger().info("accept-head %s: policy %s", VERSION, settings.policy)
    return policy


def build_host(vllm_config: Any, device: torch.device) -> PolicyHost | None:
    policy = build_policy(vllm_config, device)
    settings = Settings.of(vllm_config)
    if policy is None or settings is None:
        return None
    spec, tensor_parallel = vllm_config.speculative_config, vllm_config.parallel_config.tensor_parallel_size
    limit = spec.num_speculative_tokens
    host = PolicyHost(
        policy,
        rows=vllm_config.scheduler_config.max_num_seqs,
        limit=limit,
        device=device,
        greedy=spec.draft_sample_method == "greedy",
        agree=_broadcast if tensor_parallel > 1 else None,
        metrics=_metrics(settings, limit, device),
    )
    if policy.max_draft_tokens < limit:
        _logger().warning(
            "accept-head: the policy drafts at most %d tokens, but num_speculative_tokens reserves cache for %d",
            policy.max_draft_tokens,
            limit,
        )
    return host


def head_of(policy: DraftPolicy) -> AcceptanceHead:
    """The head of a policy, for adaptive verification. Raises InputError when its score would look at the token that it
    may drop."""
    if not isinstance(policy, HeadPolicy):
        raise InputError("adaptive verification takes a head: expected a policy like 'head:PATH'")
    config = policy.head.config
    if config.reads != "before" or "draft_logprob" in config.signals:
        raise InputError(
            "adaptive verification drops drawn tokens, so the head must not look at the token that it scores; expected "
            "one trained with packing 'prefix' and without the signal draft_logprob"
        )
    return policy.head


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.accept_head")  # only vLLM's own names are shown


def _metrics(settings: Settings, limit: int, device: torch.device) -> DraftMetrics | None:
    """Rank 0 counts for all: they decide alike."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() != 0:
        return None
    return DraftMetrics(limit, device=device, logger=_logger(), log_every=settings.log_every)


def _broadcast(answer: Tensor) -> Tensor:
    """What rank 0 decided: ranks that ended a round at different tokens would wait for each other for ever, and their
    sums may differ in the last bit."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return group.broadcast(answer.to(torch.int64), src=0).to(answer.dtype)


def draft_distribution(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """(batch, vocab) float32, as heads are trained on: at the sampling temperature, and plain where that is 0.

    temperature: (batch,); None = all greedy.
    """
    if temperature is None:
        return logits.softmax(-1, dtype=torch.float32)
    scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    return (logits.float() / scale).softmax(-1)


def host_reads() -> AbstractContextManager[None]:
    """Where the host may wait for the device although vLLM looks out for that."""
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    return gpu_sync_allowed()
