"""What the loop does around drafting and verification: rows are given to requests, and models fed what they have not
seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accept_head.inference.decode import chunks
from accept_head.inference.decode.chunks import Chunk
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import Rows
from accept_head.inference.decode.steps import Steps
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.decode.waiting import Waiting
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.graphs import GraphBackend, run_directly
from accept_head.inference.engine.memory import MemoryPlan
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import Forward


class Feeding:
    """A part of `Decoder`, which sets all this."""

    memory: MemoryPlan
    batch: int
    max_length: int
    target: CachedModel
    draft: CachedModel
    chunk: Chunk
    seconds: tuple[float, float] | None
    rows: Rows
    steps: Steps
    policy: DraftPolicy
    processing: Processing
    ends: Stopping
    seed: int
    verifier: Verifier
    backend: GraphBackend | None

    def _new_rows(self, max_draft_tokens: int) -> Rows:
        return Rows(self.batch, self.max_length, max_draft_tokens + 1, self.target.model.device)

    def _make_room(self, policy: DraftPolicy) -> None:
        """Rows and caches as if nothing had run before: the old ones, unless the last run left too few rows, or its
        policy drafted less."""
        most = max(policy.max_draft_tokens, self.memory.max_draft_tokens)
        if self.rows.fit(self.batch, most + 1):
            self.rows.reset()
        else:
            self.steps.free()
            self.rows = self._new_rows(most)
        for model in (self.target, self.draft):
            model.restore(self.batch)

    def _choose_steps(self) -> None:
        """Set `call`, how this run calls the steps between its forwards, and `ask`, how those that ask the policy: as
        graphs, where they can be captured; and `lends`, whether forwards may lend what they return, because the steps
        that read it copy what they keep."""
        self.call: Callable[..., Any] = run_directly
        self.ask: Callable[..., Any] = run_directly
        self.lends = False
        if self.backend is None or not self.processing.plain:
            return
        graphs, self.ends = self.steps.everybodys(self.processing, self.ends, self.verifier, self.seed)
        graphs.keep(*self.rows.tensors)
        self.call, self.lends = partial(graphs, optional=True), True
        if self.policy.carries is not None:
            self.ask = partial(self.steps.of(self.policy), optional=True)

    def _seconds(self) -> tuple[float, float] | None:
        """What `Chunks` goes by, measured once, as no row holds anything yet; None where it needs none."""
        device = self.target.model.device
        if self.seconds is None and chunks.needs_seconds(self.chunk, self.policy, device):
            self.seconds = chunks.measured_seconds(self.draft, self.batch)
        return self.seconds

    def _admit(self, waiting: Waiting) -> None:
        """Give idle rows to waiting requests and feed both models their prompts, but for the last token."""
        requests = waiting.take(self.rows.requests.count(None))
        if not requests:
            return self._compact() if waiting.done else None
        taken = self.rows.admit(requests)
        ends = [len(request.prompt) - 1 for request in requests]
        self.target.fill(self.rows.tokens, taken, [0] * len(taken), ends)
        if self.policy.max_draft_tokens:
            self.draft.fill(self.rows.tokens, taken, [0] * len(taken), ends)
            self.rows.mark_fed(taken)
        index = torch.tensor(taken, device=self.rows.keys.device)
        self.policy.admit(index, self.rows.lengths[index])
        named = [(row, request.tenant) for row, request in zip(taken, requests, strict=True) if request.tenant]
        if self.policy.by_tenant and named:
            rows, keys = zip(*named, strict=True)
            self.policy.set_tenants(torch.tensor(rows, device=index.device), keys)

    def _compact(self) -> None:
        """Drop idle rows, which nobody will want, when they are a quarter of the batch. Compiled shapes stay."""
        live = self.rows.live_rows
        if live and not self.target.static and 4 * len(live) <= 3 * len(self.rows.requests):
            index = torch.tensor(live, device=self.rows.keys.device)
            for part in (self.target, self.draft, self.policy):
                part.select(index)
            self.rows.select(index, live)

    def _feed_unfed(self) -> Forward:
        """Feed the draft what it has not seen, the last token and an accepted one that it drew but was not fed → logits
        and hidden state at the last token, (batch, 1, …) each."""
        rows = self.rows
        if rows.unfed > 2:  # rounds without drafting leave more
            live = rows.live_rows
            ends = [rows.host_lengths[row] - 1 for row in live]
            self.draft.fill(rows.tokens, live, [rows.host_fed[row] for row in live], ends)
            rows.mark_fed(live)
        width = rows.unfed
        starts, window = self.call("draft window", rows.last, width, width)
        output = self.draft.forward(window, starts, max(0, rows.longest - width), lend=self.lends)
        if width == 1:
            return output
        row, last = torch.arange(len(starts), device=starts.device), rows.lengths - 1 - starts
        return Forward(output.logits[row, last][:, None], output.hidden[row, last][:, None])

    def _feed(self, token_ids: Tensor, depth: int) -> Forward:
        """Feed (batch,) tokens drawn at `depth` → the same at them."""
        starts, longest = self.rows.lengths + depth - 1, self.rows.longest + depth - 1
        return self.draft.forward(token_ids[:, None], starts, longest, lend=self.lends)
