"""One run of the decode loop: the objects that stay the same in all its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.inference.decode.captured import CapturedSteps
from accept_head.inference.decode.drafted import Drafted, Drawn
from accept_head.inference.decode.drafter import DraftModel, Eagle3
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.rows import Finished, Rows
from accept_head.inference.decode.steps import Steps
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.capture import capture_of
from accept_head.inference.engine.graphs import run_directly
from accept_head.inference.kernels.verify import Verified
from accept_head.inference.policies.drafting import Drafting, DraftProgress
from accept_head.inference.policies.reader import SignalReader
from accept_head.inference.policy import DraftPolicy, Signal, Verifier, VerifyOutcome
from accept_head.pair import Forward


class Run:
    """Rows, models and a policy. The steps between forwards are plain calls; if they can be captured as CUDA graphs, a
    call is a replay.

    stopping: the caller's. reader: a compiled one, if there is any.
    """

    def __init__(
        self,
        rows: Rows,
        target: CachedModel,
        draft: CachedModel,
        captured: CapturedSteps,
        policy: DraftPolicy,
        processing: Processing,
        stopping: Stopping,
        *,
        seed: int,
        verifier: Verifier,
        reader: SignalReader | None = None,
    ):
        self.rows, self.target = rows, target
        self.policy, self.processing, self.stopping = policy, processing, stopping
        self.drafting = Drafting(policy)
        call: Callable[..., Any] = run_directly
        ask: Callable[..., Any] = run_directly
        ends, capture = stopping, capture_of(policy)
        captures = captured.backend is not None and processing.plain
        self.copies = not captures  # captured steps copy what they keep of a forward
        if captures:
            graphs, ends = captured.shared_by_all(processing, stopping, verifier, seed)
            graphs.keep(*rows.tensors)
            call = partial(graphs, optional=True)
            if capture is not None:
                ask = partial(captured.of(policy), optional=True)
        eagle3 = draft.model if isinstance(draft.model, Eagle3Drafter) else None
        lacking = eagle3 if eagle3 and eagle3.lacks_tokens else None
        steps = Steps(rows, self.drafting, processing, ends, lacking, seed=seed, verifier=verifier, reader=reader)
        self._call, self._ask, self._steps = call, ask, steps
        self.drafter = (Eagle3 if eagle3 else DraftModel)(draft, rows, call, copy=self.copies)
        self._backend, self._captures = captured.backend, 0
        self._began = self._drafted = 0.0
        self._most, self._rests = 0, False  # of the last round

    # --- drafting ----------------------------------------------------------------------------------------------------

    def begin(self) -> DraftProgress:
        """Begin a round → what each row may draft."""
        self._began, self._captures = time.perf_counter(), self.captures
        if not self.processing.greedy:
            self._call("random", self._steps.set_uniforms, max(1, self.drafting.max_draft_tokens))
        self._rests = self.drafting.prepare([request is not None for request in self.rows.requests], self._most > 0)
        if self._rests:
            return self.drafting.begin(self.rows.live, 0, rests=True)
        progress: DraftProgress = self._ask("begin", self._steps.begin, state=self.policy, renews=True)
        return progress

    def end_draft(self) -> None:
        """Drafting is over."""
        if Signal.SECONDS in self.drafting.needs:
            self._drafted = self._seconds()

    def longest_draft(self, progress: DraftProgress) -> int:
        """The most tokens that any row may draft. A sync, unless the policy rests or its budget is constant."""
        if self.drafting.constant:
            self._most = self.rows.room(self.drafting.max_draft_tokens)
        else:
            self._most = 0 if self._rests else int(progress.budget.max())
        return self._most

    def feed_drafter(self) -> Forward:
        """Feed the drafter what it has not been fed → its output at each row's last token. What it has missed over many
        rounds is no part of this round's seconds: learnt costs are of drafting alone."""
        if self.drafter.behind:
            before = self._seconds()
            self.drafter.catch_up()
            self._began += self._seconds() - before
        return self.drafter.begin()

    def draw(self, depth: int, fed: Forward, progress: DraftProgress) -> tuple[Drawn, DraftProgress]:
        """Draw the token at `depth` of every row → it, and the new progress."""
        # Without a peek the step does not ask the policy, so policies with equal `needs` share it.
        call, state = (self._ask, self.policy) if self.drafting.peeks else (self._call, None)
        given = depth, fed, progress, self.drafting.needs, self.drafting.asks
        drawn: tuple[Drawn, DraftProgress] = call(f"draw {depth}", self._steps.draw, *given, state=state)
        return drawn

    def judge(self, depth: int, drawn: Drawn, ahead: Forward | None, progress: DraftProgress) -> DraftProgress:
        """Ask the policy which rows draft on → the new progress. ahead: the draft forward on the drawn token, if it was
        fed."""
        hidden = ahead.hidden[:, 0] if ahead else None
        given = drawn.step, hidden, progress
        judged: DraftProgress = self._ask(f"judge {depth}", self._steps.judge, *given, state=self.policy)
        return judged

    # --- verification ------------------------------------------------------------------------------------------------

    def target_scores(self, drafted: Drafted) -> tuple[Tensor, Tensor, Tensor]:
        """Run the target on each row's last token and the submitted ones → logits, scores (the logits after
        processors), (batch, slots + 1, vocab) each, and the fed tokens."""
        rows, slots = self.rows, drafted.slots
        width = self.target.padded(slots + 1)
        starts, window = self._call("target window", rows.last, 1, width)
        ends = rows.lengths + drafted.submitted
        wanted = rows.wanted(starts, width, starts, ends) if self.target.packs else None
        output = self.target.forward(window, starts, rows.longest - 1, wanted=wanted, copy=self.copies)
        if self.drafting.max_draft_tokens:
            self.drafter.hear(output.hidden[:, : slots + 1])
        logits = output.logits[:, : slots + 1]
        return logits, self.processing.scores(logits, rows), window

    def test(self, scores: Tensor, window: Tensor, drafted: Drafted) -> Verified:
        """Test the candidates → which are accepted, and the token that follows them."""
        q = drafted.probabilities[: drafted.slots]
        verified: Verified = self._call("test", self._steps.test, scores, window, drafted.submitted, q)
        return verified

    def accept(self, drafted: Drafted, verified: Verified, scores: Tensor) -> VerifyOutcome:
        """Append the accepted tokens and the next one to the rows. scores: (batch, k + 1, vocab), the target's."""
        needs, sampling = self.drafting.needs, self.processing.sampling
        alternatives = self._steps.alternatives(drafted, scores) if Signal.ALTERNATIVES in needs else None
        steps, rows = self._steps, self.rows
        accepted, live, lengths = self._call(
            "accept", rows.accept, drafted.counts, verified, steps.stopping, mutates=rows.tensors
        )
        self.drafter.accepted()
        return VerifyOutcome(
            drafted=drafted.lengths,
            submitted=drafted.submitted,
            accepted=accepted,
            live=live,
            lengths=lengths,
            divergence=drafted.divergence(scores, sampling.temperature) if Signal.DIVERGENCE in needs else None,
            acceptance=verified.acceptance if Signal.ACCEPTANCE in needs else None,
            alternatives=alternatives,
            seconds=self._seconds() if Signal.SECONDS in needs else None,
            draft_seconds=self._drafted if Signal.SECONDS in needs else None,
            draft_forwards=drafted.forwards if Signal.SECONDS in needs else None,
        )

    def observe(self, outcome: VerifyOutcome) -> list[Finished]:
        """Let the policy learn from the round → the finished responses."""
        finished = self.rows.sync(self.stopping)
        if self._rests:
            return finished
        if self.captures == self._captures:  # else the round took a hundred times as long
            self.drafting.learn_costs(outcome)
        self.policy.observe(outcome)
        return finished

    @property
    def captures(self) -> int:
        """How many graphs were made so far."""
        return self._backend.captures if self._backend else 0

    def _seconds(self) -> float:
        """Seconds since the round began; waits for the device."""
        if self.rows.tokens.is_cuda:
            torch.cuda.synchronize(self.rows.tokens.device)
        return time.perf_counter() - self._began
