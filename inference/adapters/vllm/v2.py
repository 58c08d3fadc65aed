"""vLLM's V2 model runner, the default on CUDA.

With synchronous scheduling rounds end early and drafts have different lengths. With asynchronous scheduling every
draft's length is fixed beforehand; the head's logit is then used in vLLM's adaptive verification (adaptive.py).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode

# Allows a sync where vLLM's debug mode reports them.
from vllm.utils.gpu_sync_debug import gpu_sync_allowed as host_reads
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from accept_head.eagle3.saved import LAYERS
from accept_head.inference.adapters.vllm.adaptive import HeadAcceptanceEstimator
from accept_head.inference.adapters.vllm.build import (
    build_host,
    build_policy,
    head_of,
)
from accept_head.inference.adapters.vllm.host import EndOfRound, PolicyHost, Verdict
from accept_head.inference.adapters.vllm.ragged import check_handler, leave_lengths
from accept_head.inference.adapters.vllm.settings import check_hooks
from accept_head.inference.costs.host import VLLM_V2

HOOKS = ("propose", "sample_draft", "compute_draft_logits", "load_model", "_maybe_predict_acceptance")


class PolicyRounds(DraftModelSpeculator):
    """What both speculators of vLLM do, with our policy if accept_head is set. vLLM's loop is not copied: see v1.py."""

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        self.host: PolicyHost | None = None
        policy = build_policy(vllm_config, device)
        if policy is not None:
            check_hooks(type(self), HOOKS)
            check_handler()
            read_named_layers(self.draft_model_config.hf_config)
            if self.enable_adaptive_verification:
                head_of(policy)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        if not self.enable_adaptive_verification:
            self.host = build_host(self.vllm_config, self.device, self.model, runner=VLLM_V2)
        elif policy := build_policy(self.vllm_config, self.device, self.model):
            self.acceptance_estimator = HeadAcceptanceEstimator(
                head_of(policy), self.max_num_reqs, self.num_speculative_steps, self.device
            )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Rounds that may end after any token cannot be captured."""
        super().init_cudagraph_manager(cudagraph_mode if self.host is None else CUDAGraphMode.NONE)

    def propose(self, input_batch: Any, *inputs: Any, **options: Any) -> Tensor:
        """Draft → (batch, steps) ids, as in vLLM. The lengths of the drafts are stored on the batch for `ragged`."""
        if self.host is None:
            return super().propose(input_batch, *inputs, **options)
        if options.get("dummy_run"):  # vLLM times itself, with no requests
            host, self.host = self.host, None
            try:
                return super().propose(input_batch, *inputs, **options)
            finally:
                self.host = host
        # inputs[:4]: attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states.
        num_sampled, num_rejected = inputs[4], inputs[5]
        rows = self.rows = input_batch.num_reqs
        wanted = options.get("num_speculative_tokens")
        limit = self.num_speculative_steps if wanted is None else wanted
        with host_reads():
            numbers = (num_sampled[:rows], num_rejected[:rows], input_batch.seq_lens[:rows])
            sampled, rejected, fed = torch.stack([each.long() for each in numbers]).tolist()
            accepted = [max(0, tokens - 1) for tokens in sampled]
            submitted = [taken + refused for taken, refused in zip(accepted, rejected, strict=True)]
            lengths = [tokens - refused + 1 for tokens, refused in zip(fed, rejected, strict=True)]
            live = [tokens > 0 for tokens in sampled]  # a request whose prompt is not fed yet samples nothing
            self.host.begin(input_batch.req_ids, live, lengths, limit, Verdict(submitted, accepted))
        with contextlib.suppress(EndOfRound):
            super().propose(input_batch, *inputs, **options)
        leave_lengths(input_batch, self.host.end())
        return self.draft_tokens[:rows]  # columns that no row reached hold older drafts; the lengths exclude them

    def sample_draft(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """Called once a draft forward. hidden_states: (batch, hidden), after the final norm."""
        host = self.host
        if host is None:
            self.fed_hidden = hidden_states
            return super().sample_draft(hidden_states, *inputs, **options)
        with host_reads():
            if not host.advance(hidden_states):
                raise EndOfRound
        ids = super().sample_draft(hidden_states, *inputs, **options)
        self.draft_tokens[: self.rows, host.depth] = ids  # the caller does it only if no exception ends the loop
        temperature = self.temperature[self.idx_mapping[: self.rows]] if host.reads_q else None
        with host_reads():
            if not host.drawn(ids, logits=self.logits, temperature=temperature):
                raise EndOfRound
        return ids

    def compute_draft_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        self.logits = super().compute_draft_logits(hidden_states, spec_step_idx)
        return self.logits

    def _maybe_predict_acceptance(self, logits: Tensor, idx_mapping: Tensor, draft_step: Tensor) -> None:
        estimator = self.acceptance_estimator
        if isinstance(estimator, HeadAcceptanceEstimator):
            estimator.predict_by_head(
                self.fed_hidden, logits, self.temperature, idx_mapping, draft_step, self.draft_token_confidence_probs
            )
        else:
            super()._maybe_predict_acceptance(logits, idx_mapping, draft_step)


def read_named_layers(drafter: Any) -> None:
    """Let vLLM read the layers of the target that an EAGLE-3 drafter's config names in eagle_config, as most do. By
    itself only its V1 runner does; V2 would feed the drafter its default layers."""
    named = (getattr(drafter, "eagle_config", None) or {}).get(LAYERS)
    if named and not getattr(drafter, LAYERS, None):
        setattr(drafter, LAYERS, named)


def with_policy(speculator: type[DraftModelSpeculator]) -> type[DraftModelSpeculator]:
    """vLLM's speculator with our rounds. It is made here, as importing vLLM's own class is what calls for it."""
    return type(f"AcceptHead{speculator.__name__}", (PolicyRounds, speculator), {})
