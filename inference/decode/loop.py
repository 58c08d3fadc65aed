"""The decode loop: draft → verify → accept → rewind, for a batch of rows that each keep their own pace.

Losslessness: each drawn token is verified, whatever a policy decides (one that trims has to say that it is lossless),
and every random number is used once (it belongs to a row, a round, a slot and a purpose). Rewinding is forgetting: a
row's next token is written where its accepted ones end. Rows come and go; what they emit depends on no other row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.alternatives import DRAWS, Alternatives, draw_alternatives
from accept_head.errors import InputError
from accept_head.head_use import Checkpoint, check_use
from accept_head.inference.decode.chunks import Chunk, Chunks
from accept_head.inference.decode.drafted import Drafted, Drawn, Going
from accept_head.inference.decode.feeding import Feeding
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Finished, Request
from accept_head.inference.decode.steps import Steps
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.decode.waiting import Waiting
from accept_head.inference.engine.backends import Attention
from accept_head.inference.engine.cache import CachedModel, Compile
from accept_head.inference.engine.graphs import GraphBackend, graph_backend
from accept_head.inference.engine.memory import MemoryPlan
from accept_head.inference.kernels.sampling import draw
from accept_head.inference.kernels.verify import Verified, verify, verify_greedy, verify_match
from accept_head.inference.policy import (
    OF_Q,
    DraftPolicy,
    DraftStep,
    Signal,
    Verifier,
    VerifyOutcome,
    check_lossless,
    checked,
)
from accept_head.pair import Forward
from accept_head.randomness import uniforms

DRAFT, ACCEPT, REDRAW, MATCH, ALTERNATIVES = range(5)  # what a random number is for


class Decoder(Feeding):
    """Two cached models that decode as many rows, of as many tokens, as the memory was planned for.

    With compile="graphs" forwards are CUDA graphs, and so are the steps between them where policy and processing are
    functions of tensors alone: `self.call(name, function, …)` is then a replay, else a plain call, and so is `self.ask`
    for those that ask the policy. graphs: what captures, CUDA when left out.

    Caches, rows and graphs stay from run to run, and serve the next one as far as they fit it (see `Steps`); one run at
    a time. Their memory is the decoder's until `free`, or until nobody refers to it any more."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        memory: MemoryPlan,
        *,
        compile: Compile = "none",
        attention: Attention = "auto",
        chunk: Chunk = "auto",
        graphs: GraphBackend | None = None,
    ):
        self.memory, self.batch, self.max_length, self.chunk = memory, memory.batch, memory.max_length, chunk
        self.backend = graphs or graph_backend(target.device) if compile == "graphs" else None
        options: Any = {"compile": compile, "attention": attention, "graphs": self.backend}
        self.target = CachedModel(target, self.batch, self.max_length, **options)
        self.draft = CachedModel(draft, self.batch, self.max_length, with_hidden=True, **options)
        self.rows = self._new_rows(memory.max_draft_tokens)
        self.steps = Steps(self.backend, [part for part in (self.target.graphs, self.draft.graphs) if part])
        self.seconds: tuple[float, float] | None = None
        self.runs = 0

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
        the next one has not arrived yet. Raises InputError when sampled output would not be the target's, or when
        another run has begun before this one was over."""
        check_lossless(policy, verifier, greedy=processing.greedy, allow_lossy=allow_lossy)
        check_use(policy, Checkpoint.of(self.target.model), processing.sampling)
        self.policy, self.processing, self.ends = policy, processing, stopping
        self.seed, self.verifier = seed, verifier
        self.runs = number = self.runs + 1
        self._make_room(policy)
        policy.start(self.batch, self.target.model.device)
        self.chunks = Chunks(self.chunk, policy, self._seconds())
        self._choose_steps()
        waiting = Waiting(requests)
        while self.rows.live_rows or not waiting.done:
            self._admit(waiting)
            if not self.rows.live_rows:
                time.sleep(1e-3)  # before it looks again whether a request has arrived
                continue
            begin = time.perf_counter()
            drafted = self._draft()
            verified, logits, scores = self._verify(drafted)
            alternatives = self._alternatives(drafted, scores) if Signal.ALTERNATIVES in policy.needs else None
            outcome = self.call("accept", self._accept, drafted.counts, verified, mutates=self.rows.tensors)
            if Signal.DIVERGENCE in policy.needs:
                outcome = replace(outcome, divergence=drafted.divergence(scores, processing.sampling.temperature))
            if Signal.ACCEPTANCE in policy.needs:
                outcome = replace(outcome, acceptance=verified.acceptance)
            if alternatives is not None:
                outcome = replace(outcome, alternatives=alternatives)
            if watch:
                watch(Round(self.rows, drafted, verified, logits, scores, outcome))
            del drafted, verified, logits, scores  # a round's large tensors, before the next one makes its own
            finished = self.rows.sync(stopping)  # the device has done the round's work now
            if policy.learnt is None:
                policy.observe(replace(outcome, seconds=time.perf_counter() - begin))
            else:
                self.ask("learn", policy.observe, outcome, state=policy, mutates=policy.learnt)
            going = self.rows.live_rows or not waiting.done
            yield from finished
            if self.runs != number:  # the caller has begun another
                if going:
                    raise InputError("another run of this decoder has begun: rows and caches are its own now")
                return

    def free(self) -> None:
        """Give back the memory of caches, graphs and what they return, once a run is over. Another run takes it again,
        and captures anew."""
        self.steps.free()
        for model in (self.target, self.draft):
            model.free()

    def _draft(self) -> Drafted:
        """Let each live row draft until its policy, its budget or a drawn end token says stop.

        Host syncs: one for the round's largest budget, if the policy may choose it; and, only if the policy can stop
        early, one a chunk of drafted tokens: whether any row goes on decides whether there is another forward, and
        only the host can launch one.
        """
        rows, policy = self.rows, self.policy
        if not self.processing.greedy:
            self.call("random", self._set_uniforms, max(1, policy.max_draft_tokens))
        going = self.ask("begin", self._begin, state=policy, renews=True)
        known = getattr(policy.start_round, "constant", False)
        most = rows.room(policy.max_draft_tokens) if known else int(going.budget.max())
        drafted = Drafted(going.lengths, going.lengths, going.in_vain)
        if most == 0:
            return drafted
        looks_ahead = Signal.DRAWN_HIDDEN in policy.needs
        fed = self._feed_unfed()
        # A policy that does not peek is not asked when tokens are drawn: the step is that of all who need the same.
        call, peeked = (self.ask, policy) if policy.peeks else (self.call, None)
        shows = policy.needs, policy.stops_early
        for depth in range(1, most + 1):
            drawn, going = call(f"draw {depth}", self._draw, depth, fed, going, shows, state=peeked)
            drafted.append(drawn)
            # A policy that judges the state at the drawn token itself has it fed before it is asked.
            ahead = self._feed(drawn.ids, depth) if looks_ahead and depth < most else None
            if policy.stops_early:
                state = ahead.hidden[:, 0] if ahead else None
                going = self.ask(f"judge {depth}", self._judge, drawn.step, state, going, state=policy)
            if self.chunks.over(drafted, going, depth, most):
                break
            fed = ahead or self._feed(drawn.ids, depth)
        drafted.stop(going)
        if drafted.wasted:
            rows.wasted += drafted.wasted * rows.live
        if policy.trims:
            drafted.trim(checked(policy, "trim", policy.trim(drafted.lengths), len(drafted.lengths)))
        return drafted

    def _begin(self) -> Going:
        """What each row may draft in this round."""
        rows, policy = self.rows, self.policy
        live = rows.live.clone()
        # A round emits one token more than it accepts: the last token of a response needs no draft.
        budget = checked(policy, "start_round", policy.start_round(live), len(live))
        budget = torch.minimum(budget, rows.max_lengths - rows.lengths - 1).clamp(min=0) * live
        return Going(budget, budget > 0, torch.zeros_like(budget), torch.zeros_like(budget))

    def _draw(
        self, depth: int, fed: Forward, going: Going, shows: tuple[frozenset[Signal], bool]
    ) -> tuple[Drawn, Going]:
        """Draw the token at `depth` of every row; rows that have stopped draw one that nobody counts. shows: what the
        policy needs of it, and whether it is asked afterwards."""
        rows, policy, processing = self.rows, self.policy, self.processing
        needs, asks = shows
        scores = processing.scores(fed.logits, rows, depth - 1)[:, 0]  # (batch, vocab)
        q = None if processing.greedy else processing.probabilities(scores)
        signal_q = processing.signal_probabilities(scores, q) if needs & OF_Q else scores
        budget, active, lengths, in_vain = going
        if policy.peeks:
            step = DraftStep.of(needs, depth, None, active, signal_q, fed, None)
            declined = active & ~checked(policy, "draw_next", policy.draw_next(step), len(active))
            active, in_vain = active & ~declined, in_vain + declined
        ids = scores.argmax(-1) if q is None else draw(q, rows.uniforms[:, DRAFT, depth - 1])
        going = rows.go_on(depth, ids, Going(budget, active, lengths, in_vain), self.ends)
        asked = DraftStep.of(needs, depth, ids, going.active, signal_q, fed, None) if asks else None
        shown = scores if Signal.DIVERGENCE in needs else None
        return Drawn(ids, q, shown, asked), going

    def _judge(self, step: DraftStep, drawn_hidden: Tensor | None, going: Going) -> Going:
        """Ask the policy which rows go on. drawn_hidden: (batch, hidden), if it was fed the drawn token."""
        step = replace(step, drawn_hidden=drawn_hidden)
        keep = checked(self.policy, "keep_drafting", self.policy.keep_drafting(step), len(step.active))
        active = step.active & keep
        in_vain = going.in_vain if drawn_hidden is None else going.in_vain + (step.active & ~active)
        return going._replace(active=active, in_vain=in_vain)

    def _verify(self, drafted: Drafted) -> tuple[Verified, Tensor, Tensor]:
        """One target forward on the last token and the draft, then the test of each candidate."""
        rows, k = self.rows, drafted.slots
        starts, window = self.call("target window", rows.last, 1, self.target.padded(k + 1))
        logits = self.target.forward(window, starts, rows.longest - 1, lend=self.lends).logits[:, : k + 1]
        scores = self.processing.scores(logits, rows)  # (batch, k + 1, vocab)
        verified = self.call("test", self._test, scores, window, drafted.submitted, drafted.probabilities[:k])
        return verified, logits, scores

    def _test(self, scores: Tensor, window: Tensor, submitted: Tensor, drawn_from: list[Tensor]) -> Verified:
        """What becomes of the candidates, which stand in the window behind its first token. drawn_from: q of each slot,
        when sampling."""
        rows, k = self.rows, scores.shape[1] - 1
        candidates = window[:, 1 : k + 1]
        if self.processing.greedy:
            return verify_greedy(scores.argmax(-1), candidates, submitted)
        p = self.processing.probabilities(scores)
        if self.verifier == "match":
            # Numbers belong to the token's place in its text: whatever the policy, the row emits the same tokens.
            places = rows.lengths[:, None] + torch.arange(k + 1, device=p.device)
            return verify_match(p, candidates, submitted, uniforms(self.seed, rows.keys[:, None], places, 0, MATCH))
        q = torch.stack(drawn_from, dim=1) if k else p[:, :0]
        u = rows.uniforms
        return verify(p, q, candidates, submitted, u[:, ACCEPT, :k], u[:, REDRAW, 0])

    def _alternatives(self, drafted: Drafted, scores: Tensor) -> Alternatives | None:
        """What the ratio test would say of other draws at each slot. scores: (batch, k + 1, vocab), the target's."""
        if not drafted.slots or self.processing.greedy or self.verifier != "ratio":
            return None
        rows, q = self.rows, torch.stack(drafted.probabilities[: drafted.slots], dim=1)
        slot, number = (torch.arange(n, device=q.device) for n in (drafted.slots, DRAWS))
        keys, rounds = rows.keys[:, None, None], rows.rounds[:, None, None]
        random = uniforms(self.seed, keys, rounds, slot[:, None], ALTERNATIVES, number)
        return draw_alternatives(self.processing.probabilities(scores[:, :-1]), q, random)

    def _accept(self, drafted: Drafted, verified: Verified) -> VerifyOutcome:
        return self.rows.accept(drafted, verified, self.ends)

    def _set_uniforms(self, slots: int) -> None:
        """This round's random numbers, `slots` for each purpose of each row."""
        self.rows.set_uniforms(self.seed, slots)
