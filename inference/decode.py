"""The decode loop: draft → verify → accept → rewind, for a batch of rows that each keep their own pace.

Losslessness: whatever a policy decides, each drawn token is verified, and every random number is used once (it belongs
to a row, a round, a slot and a purpose). Rewinding is forgetting: a row's next token is written where its accepted ones
end. Rows come and go; a row's tokens do not depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.inference.cache import CachedModel, Compile
from accept_head.inference.policy import DraftPolicy, DraftStep, Signal, VerifyOutcome, checked
from accept_head.inference.processing import Processing
from accept_head.inference.rows import Finished, Request, Rows
from accept_head.inference.stopping import Stopping
from accept_head.inference.verify import Verified, verify, verify_greedy
from accept_head.pair import Forward
from accept_head.randomness import uniforms
from accept_head.sampling import draw
from accept_head.signals import draft_entropy, draft_logprob, draft_max_prob

DRAFT, ACCEPT, REDRAW = range(3)  # what a random number is for


class Drafted(NamedTuple):
    """ids: (batch, k); probabilities: (batch, k, vocab), None when greedy; lengths: (batch,), each row's share of k."""

    ids: Tensor
    probabilities: Tensor | None
    lengths: Tensor


@dataclass(frozen=True)
class Round:
    """What a watcher of the loop sees after each round."""

    rows: Rows
    drafted: Drafted
    verified: Verified
    scores: Tensor  # the target's processed logits, (batch, k + 1, vocab)
    outcome: VerifyOutcome


class Decoder:
    """Two cached models that decode batches of up to `batch` rows of up to `max_length` tokens."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        *,
        batch: int,
        max_length: int,
        with_hidden: bool = True,
        compile: Compile = "none",
    ):
        self.batch, self.max_length = batch, max_length
        self.target = CachedModel(target, batch, max_length, compile=compile)
        self.draft = CachedModel(draft, batch, max_length, with_hidden=with_hidden, compile=compile)

    @torch.no_grad()
    def run(
        self,
        requests: Iterable[Request],
        *,
        policy: DraftPolicy,
        processing: Processing,
        stopping: Stopping,
        seed: int = 0,
        watch: Callable[[Round], None] | None = None,
    ) -> Iterator[Finished]:
        """Continue every request; each is handed out as it finishes, and a waiting one takes its place."""
        device = self.target.model.device
        self.policy, self.processing, self.seed = policy, processing, seed
        self.rows = Rows(self.batch, self.max_length, policy.max_draft_tokens + 1, device)
        for model in (self.target, self.draft):
            model.restore(self.batch)
        policy.start(self.batch, device)
        waiting = iter(requests)
        self._admit(waiting)
        while self.rows.live_rows:
            drafted = self._draft()
            verified, scores = self._verify(drafted)
            outcome = self.rows.accept(drafted.lengths, verified, stopping, drafted.ids.shape[1])
            policy.observe(outcome)
            if watch:
                watch(Round(self.rows, drafted, verified, scores, outcome))
            finished = self.rows.sync(stopping)
            yield from finished
            if finished:
                self._admit(waiting)
                self._compact()

    def _draft(self) -> Drafted:
        """Let each live row draft until its policy or its budget says stop.

        Host syncs: one for the round's largest budget, and, only if the policy can stop early, one a drafted token:
        whether any row goes on decides whether there is another forward, and only the host can launch one.
        """
        rows, policy = self.rows, self.policy
        # A round emits one token more than it accepts: the last token of a response needs no draft.
        budget = checked(policy, "start_round", policy.start_round(rows.live), len(rows.live))
        budget = torch.minimum(budget, rows.max_lengths - rows.lengths - 1).clamp(min=0) * rows.live
        most = int(budget.max())
        lengths = torch.zeros_like(budget)
        if most == 0:
            return Drafted(rows.tokens[:, :0], None, lengths)
        self.uniforms = self._uniforms(most)
        greedy, look_ahead = self.processing.sampling.greedy, Signal.DRAWN_HIDDEN in policy.needs
        active, ids, probabilities = budget > 0, [], []
        logits, hidden = self._feed_unfed()
        for depth in range(1, most + 1):
            scores = self.processing.scores(logits[:, None], rows, depth - 1)[:, 0]  # (batch, vocab)
            q = None if greedy else self.processing.probabilities(scores)
            ids.append(scores.argmax(-1) if q is None else draw(q, self.uniforms[:, DRAFT, depth - 1]))
            probabilities.append(q)
            rows.write_draft(depth, ids[-1])
            lengths, drew = lengths + active, active
            rows.draft_forwards += drew
            fed_hidden = hidden
            if look_ahead and depth < most:
                logits, hidden = self._feed(ids[-1], depth)
            if policy.stops_early and not (look_ahead and depth == most):
                step = self._step(depth, ids[-1], active, scores, q, fed_hidden, hidden)
                active = active & checked(policy, "keep_drafting", policy.keep_drafting(step), len(active))
            active = active & (lengths < budget)
            if look_ahead and depth < most:
                rows.draft_forwards += drew & ~active  # fed, and nothing drawn from it
            if depth == most or (policy.stops_early and not active.any()):
                break
            if not look_ahead:
                logits, hidden = self._feed(ids[-1], depth)
        return Drafted(torch.stack(ids, dim=1), None if greedy else torch.stack(probabilities, dim=1), lengths)

    def _verify(self, drafted: Drafted) -> tuple[Verified, Tensor]:
        """One target forward on the last token and the draft, then the ratio test."""
        rows, k = self.rows, drafted.ids.shape[1]
        window = rows.window(rows.lengths - 1, k + 1)
        logits = self.target.forward(window, rows.lengths - 1, rows.longest - 1).logits
        scores = self.processing.scores(logits, rows)
        if self.processing.sampling.greedy:
            return verify_greedy(scores.argmax(-1), drafted.ids, drafted.lengths), scores
        u = self.uniforms if k else self._uniforms(1)
        p = self.processing.probabilities(scores)
        q = drafted.probabilities if k else p[:, :0]
        assert q is not None
        return verify(p, q, drafted.ids, drafted.lengths, u[:, ACCEPT, :k], u[:, REDRAW, 0]), scores

    def _feed_unfed(self) -> tuple[Tensor, Tensor]:
        """Feed the draft what it has not seen: the last token, and an accepted one that it drew but was not fed."""
        rows = self.rows
        if rows.unfed > 2:  # rounds without drafting leave more
            live = rows.live_rows
            ends = [rows.host_lengths[row] - 1 for row in live]
            self.draft.fill(rows.tokens, live, [rows.host_fed[row] for row in live], ends)
            rows.mark_fed(live)
        width = rows.unfed
        starts = (rows.lengths - width).clamp(min=0)
        output = self.draft.forward(rows.window(starts, width), starts, max(0, rows.longest - width))
        last = rows.lengths - 1 - starts  # (batch,)
        return tuple(part[torch.arange(len(last), device=last.device), last] for part in output)

    def _feed(self, token_ids: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Feed (batch,) tokens drawn at `depth` → logits and hidden state, (batch, …) each."""
        output = self.draft.forward(token_ids[:, None], self.rows.lengths + depth - 1, self.rows.longest + depth - 1)
        return output.logits[:, 0], output.hidden[:, 0]

    def _step(
        self, depth: int, ids: Tensor, active: Tensor, scores: Tensor, q: Tensor | None, fed: Tensor, drawn: Tensor
    ) -> DraftStep:
        """What the policy asked to see of this step, and no more."""
        needs = self.policy.needs
        of_q = needs & {Signal.LOGPROB, Signal.ENTROPY, Signal.MAX_PROB}
        signal_q = self.processing.signal_probabilities(scores, q) if of_q else scores
        return DraftStep(
            depth=depth,
            token_ids=ids,
            active=active,
            fed_hidden=fed if Signal.FED_HIDDEN in needs else None,
            drawn_hidden=drawn if Signal.DRAWN_HIDDEN in needs else None,
            logprob=draft_logprob(signal_q, ids) if Signal.LOGPROB in needs else None,
            entropy=draft_entropy(signal_q) if Signal.ENTROPY in needs else None,
            max_prob=draft_max_prob(signal_q) if Signal.MAX_PROB in needs else None,
        )

    def _uniforms(self, slots: int) -> Tensor:
        """This round's random numbers, (batch, 3, slots)."""
        rows = self.rows
        slot, purpose = torch.arange(slots, device=rows.keys.device), torch.arange(3, device=rows.keys.device)
        return uniforms(self.seed, rows.keys[:, None, None], rows.rounds[:, None, None], slot, purpose[:, None])

    def _admit(self, waiting: Iterator[Request]) -> None:
        """Give idle rows to waiting requests and feed both models their prompts, but for the last token."""
        idle = self.rows.requests.count(None)
        requests = list(islice(waiting, idle))
        if not requests:
            return
        taken = self.rows.admit(requests)
        ends = [len(request.prompt) - 1 for request in requests]
        self.target.fill(self.rows.tokens, taken, [0] * len(taken), ends)
        if self.policy.max_draft_tokens:
            self.draft.fill(self.rows.tokens, taken, [0] * len(taken), ends)
            self.rows.mark_fed(taken)
        self.policy.admit(torch.tensor(taken, device=self.rows.keys.device))

    def _compact(self) -> None:
        """Drop idle rows when nobody waits for them and they are a quarter of the batch. Compiled shapes stay."""
        live = self.rows.live_rows
        if live and not self.target.static and 4 * len(live) <= 3 * len(self.rows.requests):
            index = torch.tensor(live, device=self.rows.keys.device)
            for part in (self.target, self.draft, self.policy):
                part.select(index)
            self.rows.select(index, live)
