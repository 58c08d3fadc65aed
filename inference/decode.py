"""The decode loop: draft → verify → accept → rewind, for a batch of rows that each keep their own pace.

Losslessness: each drawn token is verified, whatever a policy decides (one that trims has to say that it is lossless),
and every random number is used once (it belongs to a row, a round, a slot and a purpose). Rewinding is forgetting: a
row's next token is written where its accepted ones end. Rows come and go; what they emit depends on no other row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.head_use import Checkpoint, check_use
from accept_head.inference.cache import CachedModel, Compile
from accept_head.inference.drafted import Drafted
from accept_head.inference.memory import MemoryPlan
from accept_head.inference.policy import OF_Q, DraftPolicy, DraftStep, Signal, Verifier, check_lossless, checked
from accept_head.inference.processing import Processing
from accept_head.inference.round import Round
from accept_head.inference.rows import Finished, Request, Rows
from accept_head.inference.stopping import Stopping
from accept_head.inference.verify import Verified, verify, verify_greedy, verify_match
from accept_head.inference.waiting import Waiting
from accept_head.pair import Forward
from accept_head.randomness import uniforms
from accept_head.sampling import draw

DRAFT, ACCEPT, REDRAW, MATCH = range(4)  # what a random number is for


class Decoder:
    """Two cached models that decode as many rows, of as many tokens, as the memory was planned for."""

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, memory: MemoryPlan, *, compile: Compile = "none"
    ):
        self.memory, self.batch, self.max_length = memory, memory.batch, memory.max_length
        self.target = CachedModel(target, self.batch, self.max_length, compile=compile)
        self.draft = CachedModel(draft, self.batch, self.max_length, with_hidden=True, compile=compile)

    @torch.no_grad()
    def run(
        self,
        requests: Iterable[Request | None],
        *,
        policy: DraftPolicy,
        processing: Processing,
        stopping: Stopping,
        seed: int = 0,
        verifier: Verifier = "ratio",
        allow_lossy: bool = False,
        watch: Callable[[Round], None] | None = None,
    ) -> Iterator[Finished]:
        """Continue every request; each is handed out as it finishes, and a waiting one takes its place. None says that
        the next one has not arrived yet. Raises InputError when sampled output would not be the target's."""
        check_lossless(policy, verifier, greedy=processing.greedy, allow_lossy=allow_lossy)
        check_use(policy, Checkpoint.of(self.target.model), processing.sampling)
        device = self.target.model.device
        self.policy, self.processing, self.stopping = policy, processing, stopping
        self.seed, self.verifier = seed, verifier
        self.rows = Rows(self.batch, self.max_length, policy.max_draft_tokens + 1, device)
        for model in (self.target, self.draft):
            model.restore(self.batch)
        policy.start(self.batch, device)
        waiting = Waiting(requests)
        while self.rows.live_rows or not waiting.done:
            self._admit(waiting)
            if not self.rows.live_rows:
                time.sleep(1e-3)  # before it looks again whether a request has arrived
                continue
            begin = time.perf_counter()
            drafted = self._draft()
            verified, logits, scores = self._verify(drafted)
            outcome = self.rows.accept(drafted, verified, stopping)
            if Signal.DIVERGENCE in policy.needs:
                outcome = replace(outcome, divergence=drafted.divergence(scores, processing.sampling.temperature))
            if watch:
                watch(Round(self.rows, drafted, verified, logits, scores, outcome))
            del drafted, verified, logits, scores  # a round's large tensors, before the next one makes its own
            finished = self.rows.sync(stopping)  # the device has done the round's work now
            policy.observe(replace(outcome, seconds=time.perf_counter() - begin))
            yield from finished

    def _draft(self) -> Drafted:
        """Let each live row draft until its policy, its budget or a drawn end token says stop.

        Host syncs: one for the round's largest budget, and, only if the policy can stop early, one a drafted token:
        whether any row goes on decides whether there is another forward, and only the host can launch one.
        """
        rows, policy, processing = self.rows, self.policy, self.processing
        # A round emits one token more than it accepts: the last token of a response needs no draft.
        budget = checked(policy, "start_round", policy.start_round(rows.live), len(rows.live))
        budget = torch.minimum(budget, rows.max_lengths - rows.lengths - 1).clamp(min=0) * rows.live
        most = int(budget.max())
        drafted = Drafted(lengths=torch.zeros_like(budget), submitted=torch.zeros_like(budget))
        if most == 0:
            return drafted
        self.uniforms = self._uniforms(most)
        look_ahead = Signal.DRAWN_HIDDEN in policy.needs
        active, in_vain = budget > 0, torch.zeros_like(budget)
        fed = self._feed_unfed()
        for depth in range(1, most + 1):
            scores = processing.scores(fed.logits, rows, depth - 1)[:, 0]  # (batch, vocab)
            q = None if processing.greedy else processing.probabilities(scores)
            signal_q = processing.signal_probabilities(scores, q) if policy.needs & OF_Q else scores
            if policy.peeks:
                step = DraftStep.of(policy.needs, depth, None, active, signal_q, fed, None)
                declined = active & ~checked(policy, "draw_next", policy.draw_next(step), len(active))
                active, in_vain = active & ~declined, in_vain + declined
                if not active.any():
                    break
            ids = scores.argmax(-1) if q is None else draw(q, self.uniforms[:, DRAFT, depth - 1])
            rows.write_draft(depth, ids)
            drafted.append(ids, q, active, scores if Signal.DIVERGENCE in policy.needs else None)
            # A policy that judges the state at the drawn token itself has it fed before it is asked.
            ahead = self._feed(ids, depth) if look_ahead and depth < most else None
            # What is drawn is kept, so not drafting beyond an end token changes no distribution.
            drew = active = active & ~self.stopping.is_end(ids) & (drafted.lengths < budget)
            if policy.stops_early:
                step = DraftStep.of(policy.needs, depth, ids, active, signal_q, fed, ahead)
                active = active & checked(policy, "keep_drafting", policy.keep_drafting(step), len(active))
            if ahead:
                in_vain += drew & ~active
            if depth == most or (policy.stops_early and not active.any()):
                break
            fed = ahead or self._feed(ids, depth)
        rows.draft_forwards += drafted.lengths + in_vain
        if policy.trims:
            drafted.trim(checked(policy, "trim", policy.trim(drafted.lengths), len(active)))
        return drafted

    def _verify(self, drafted: Drafted) -> tuple[Verified, Tensor, Tensor]:
        """One target forward on the last token and the draft, then the test of each candidate."""
        rows, k, submitted = self.rows, drafted.slots, drafted.submitted
        window = rows.window(rows.lengths - 1, k + 1)
        logits = self.target.forward(window, rows.lengths - 1, rows.longest - 1).logits
        scores = self.processing.scores(logits, rows)  # (batch, k + 1, vocab)
        if self.processing.greedy:
            return verify_greedy(scores.argmax(-1), window[:, 1:], submitted), logits, scores
        p = self.processing.probabilities(scores)
        if self.verifier == "match":
            # Numbers belong to the token's place in its text: whatever the policy, the row emits the same tokens.
            places = rows.lengths[:, None] + torch.arange(k + 1, device=p.device)
            u = uniforms(self.seed, rows.keys[:, None], places, 0, MATCH)
            return verify_match(p, window[:, 1:], submitted, u), logits, scores
        q = torch.stack(drafted.probabilities[:k], dim=1) if k else p[:, :0]
        u = self.uniforms if k else self._uniforms(1)
        return verify(p, q, window[:, 1:], submitted, u[:, ACCEPT, :k], u[:, REDRAW, 0]), logits, scores

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
        starts = (rows.lengths - width).clamp(min=0)
        output = self.draft.forward(rows.window(starts, width), starts, max(0, rows.longest - width))
        row, last = torch.arange(len(starts), device=starts.device), rows.lengths - 1 - starts
        return Forward(output.logits[row, last][:, None], output.hidden[row, last][:, None])

    def _feed(self, token_ids: Tensor, depth: int) -> Forward:
        """Feed (batch,) tokens drawn at `depth` → the same at them."""
        return self.draft.forward(token_ids[:, None], self.rows.lengths + depth - 1, self.rows.longest + depth - 1)

    def _uniforms(self, slots: int) -> Tensor:
        """This round's random numbers, (batch, 3, slots)."""
        rows = self.rows
        slot, purpose = torch.arange(slots, device=rows.keys.device), torch.arange(3, device=rows.keys.device)
        return uniforms(self.seed, rows.keys[:, None, None], rows.rounds[:, None, None], slot, purpose[:, None])

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

    def _compact(self) -> None:
        """Drop idle rows, which nobody will want, when they are a quarter of the batch. Compiled shapes stay."""
        live = self.rows.live_rows
        if live and not self.target.static and 4 * len(live) <= 3 * len(self.rows.requests):
            index = torch.tensor(live, device=self.rows.keys.device)
            for part in (self.target, self.draft, self.policy):
                part.select(index)
            self.rows.select(index, live)
