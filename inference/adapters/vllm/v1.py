"""vLLM's V1 model runner: rounds that end early, and drafts of different lengths, passed as lists."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn

# Allows a sync where vLLM's debug mode reports them.
from vllm.utils.gpu_sync_debug import gpu_sync_allowed as host_reads
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from accept_head.inference.adapters.vllm.build import build_host, build_policy, drafted_ids
from accept_head.inference.adapters.vllm.cpu_fix import apply as fix_cpu_sampling
from accept_head.inference.adapters.vllm.host import Ending, EndOfRound, PolicyHost, Verdict
from accept_head.inference.adapters.vllm.settings import K_MAX, TENANT, check_hooks
from accept_head.inference.adapters.vllm.unfed import Span, Unfed, catching_up
from accept_head.inference.profile.device import finish
from accept_head.sampling import likeliest

HOOKS = (
    "load_model",
    "propose",
    "_sample_draft_tokens",
    "_sample_from_logits",
    "prepare_inputs_padded",
    "take_last_draft_probs",
)


class PolicyRounds(SpecDecodeBaseProposer):
    """What both proposers of vLLM do, with our policy if accept_head is set. vLLM's loop is not copied: we override the
    sampling after each of its forwards, and leave the loop by an exception."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.host: PolicyHost | None = None
        self.verified: tuple[list[int], Tensor] | None = None  # drafted tokens of each request, and sampled ones
        self.own_ids: Tensor | None = None  # as `drafted_ids`
        limit = self.max_num_tokens - self.max_batch_size  # of vLLM's buffers; a draft model takes one more a request
        self.unfed = Unfed(limit, reads_states=self.pass_hidden_states_to_model)
        if build_policy(vllm_config, device) is not None:
            check_hooks(type(self), HOOKS)
            fix_cpu_sampling()

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.host = build_host(self.vllm_config, self.device, self.model, self.tenant_of)
        self.own_ids = drafted_ids(self.model)
        if self.host is not None:
            self.runner.rejection_sampler = Sampler(self.runner.sampler, self.speculative_config, self.device)

    def tenant_of(self, request: str) -> str:
        """A request's tenant, "" if it names none."""
        name = self.asked(request, TENANT)
        return "" if name is None else str(name)

    def asked(self, request: str, name: str) -> Any:
        """What a request's vllm_xargs say; None if nothing."""
        sampling = self.runner.requests[request].sampling_params
        return ((sampling and sampling.extra_args) or {}).get(name)

    def ending_of(self, request: str) -> Ending:
        state = self.runner.requests[request]
        sampling = state.sampling_params
        ids = {*(sampling.stop_token_ids or ()), sampling.eos_token_id} - {None}  # None, too, with ignore_eos
        most = self.asked(request, K_MAX)
        # A user's mistake must not stop the server: what is no number of tokens is no bound.
        said = isinstance(most, int) and not isinstance(most, bool) and most >= 0
        return Ending(state.num_prompt_tokens + sampling.max_tokens, ids, *([most] if said else []))

    def prepare_inputs_padded(
        self, common_attn_metadata: Any, spec_decode_metadata: Any, valid_sampled_tokens_count: Tensor
    ) -> Any:
        """Called before `propose` whenever drafts were verified. valid_sampled_tokens_count: (batch,), 0 for a request
        whose prompt is not fed yet."""
        self.verified = spec_decode_metadata.num_draft_tokens, valid_sampled_tokens_count
        return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)

    def propose(self, num_speculative_tokens: int, **inputs: Any) -> Tensor | list[list[int]]:
        """Draft → with a policy, one list of drafted ids a request; else vLLM's own result."""
        verified, self.verified = self.verified, None
        if self.host is None:
            return super().propose(num_speculative_tokens, **inputs)
        with host_reads():
            lengths, verdict = _lengths_and_verdict(inputs["common_attn_metadata"], verified)
            # vLLM also drafts requests whose prompt is not fed yet. Their drafts do not count and must not prolong it.
            live = (~self.runner.discard_request_mask.np[: len(lengths)]).tolist()
            requests = self.runner.input_batch.req_ids
            ends = [self.ending_of(request) for request in requests]
            most = self.host.begin(requests, live, lengths, num_speculative_tokens, verdict, ends)
        self.drawn_ids: list[Tensor] = []
        self.drawn_from: list[Tensor] = []
        counts = self.host.end(self._feed(most, inputs, may_wait=verified is None or not any(verified[0])))
        self._last_draft_probs = self._spread(torch.stack(self.drawn_from, dim=1)) if self.drawn_from else None
        self.drawn_from = []  # vLLM's memory plan has room for one of them
        with host_reads():
            return _ragged(self.drawn_ids, counts)

    def _feed(self, most: int, inputs: dict[str, Any], *, may_wait: bool) -> int:
        """Feed the drafter and let it draft at most so many tokens → its forwards from which no token could be drawn.
        may_wait: it need not be fed if no token is wanted, as the target was fed nothing that it rejected."""
        metadata, batch = inputs["common_attn_metadata"], self.runner.input_batch
        ends = metadata.seq_lens_cpu_upper_bound.tolist()
        counts = metadata.query_start_loc_cpu.diff().tolist()
        spans = [
            Span(request, end - count, end) for request, end, count in zip(batch.req_ids, ends, counts, strict=False)
        ]
        may_wait = may_wait and not most and not self.uses_mrope and not self.supports_mm_inputs
        if may_wait and self.unfed.put_off(spans, inputs["target_hidden_states"], self.runner.requests):
            return 0
        if missed := self.unfed.take(spans):
            assert self.host is not None
            began = self._finished()
            super().propose(0, **catching_up(missed, batch.token_ids_cpu, inputs, self.block_size))
            self.host.leave_out(self._finished() - began)
        with contextlib.suppress(EndOfRound):
            super().propose(most, **inputs)
        return int(not most)

    def _finished(self) -> float:
        """The time when the device has finished all its work, seconds."""
        finish(self.device)
        return time.perf_counter()

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        """Called once a draft forward. hidden_states: (batch, hidden), after the final norm."""
        host = self.host
        if host is None:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        with host_reads():
            if not host.advance(hidden_states):
                raise EndOfRound
        logits = self._own_logits(hidden_states)
        greedy = sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs
        # For greedy requests or a greedy draft the logits stay unscaled, and there is no q.
        places, probs = (likeliest(logits), None) if greedy else self._sample_from_logits(logits, sampling_metadata)
        ids = places if self.own_ids is None else self.own_ids[places]
        self.drawn_ids.append(ids)
        if probs is not None:
            self.drawn_from.append(probs)
        with host_reads():
            if not host.drawn(ids, probs, logits=logits, temperature=sampling_metadata.temperature, places=places):
                raise EndOfRound
        return ids, probs

    def _own_logits(self, hidden_states: Tensor) -> Tensor:
        """(batch, vocab), of the tokens that the drafter can propose. vLLM spreads them over the target's vocabulary
        and draws from that, which is several times as large."""
        if self.own_ids is None:
            return self.model.compute_logits(hidden_states)
        return self.model.logits_processor(self.model.lm_head, hidden_states)

    def _spread(self, q: Tensor) -> Tensor:
        """q of the tokens that the drafter can propose, (batch, slots, own), → (batch, slots, vocab), of all."""
        if self.own_ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.model.config.vocab_size).index_copy_(-1, self.own_ids, q)


class Sampler(RejectionSampler):
    """vLLM's, but a round in which no request has a draft is sampled as without speculation. vLLM's V2 runner does so,
    too; its V1 runner draws noise for a whole vocabulary a request, for nothing."""

    def forward(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        if any(metadata.num_draft_tokens):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)  # logits: (batch, vocab)


class AcceptHeadProposer(PolicyRounds, DraftModelProposer):
    """The proposer of draft models."""


class AcceptHeadEagleProposer(PolicyRounds, EagleProposer):
    """The proposer of drafters that read the target's states."""


def _lengths_and_verdict(metadata: Any, verified: tuple[list[int], Tensor] | None) -> tuple[list[int], Verdict | None]:
    """(tokens of each request now, verdict on its draft). Only the number of sampled tokens is read from the device;
    the host knows the rest."""
    lengths = [fed + 1 for fed in metadata.seq_lens_cpu_upper_bound[: metadata.batch_size()].tolist()]
    if verified is None:
        return lengths, None
    submitted, sampled = verified[0], verified[1].tolist()
    # With synchronous scheduling the bound is the length if the whole draft was accepted; subtract the rejected tokens.
    rejected = [drafted + 1 - tokens if drafted else 0 for drafted, tokens in zip(submitted, sampled, strict=True)]
    lengths = [length - tokens for length, tokens in zip(lengths, rejected, strict=True)]
    return lengths, Verdict(submitted, [max(0, tokens - 1) for tokens in sampled])


def _ragged(drawn: list[Tensor], counts: list[int]) -> list[list[int]]:
    """The kept ids of each row. drawn: (batch,) ids of each step. counts: number of ids that each row keeps."""
    if not drawn:
        return [[] for _ in counts]
    steps = torch.stack(drawn).tolist() if drawn[0].is_cuda else [ids.tolist() for ids in drawn]
    return [list(row[:count]) for row, count in zip(zip(*steps, strict=True), counts, strict=True)]
