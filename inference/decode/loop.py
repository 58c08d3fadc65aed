"""The decode loop: draft → verify → accept → observe, for a batch of rows that each have their own length.

Losslessness: each drawn token is verified, whatever a policy decides; a policy that trims has to declare itself
lossless. Every random number is used once. Rejected tokens need no rewind: a row's next token overwrites them. Rows
come and go; the tokens that a row emits depend on no other row.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.errors import InputError
from accept_head.head.origin import Checkpoint, check_use
from accept_head.inference.costs.host import PACKED, PADDED
from accept_head.inference.decode.admission import admit
from accept_head.inference.decode.captured import CapturedSteps
from accept_head.inference.decode.drafted import Drafted
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Finished, Request, Rows
from accept_head.inference.decode.run import Run
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.decode.waiting import Waiting
from accept_head.inference.engine.attention.choice import Attention
from accept_head.inference.engine.cache import CachedModel, Compile
from accept_head.inference.engine.cuda import GraphBackend, graph_backend
from accept_head.inference.engine.memory import MemoryPlan
from accept_head.inference.kernels.verify import Verified
from accept_head.inference.policies.drafting import Drafting, DraftProgress, check_lossless
from accept_head.inference.policies.reader import SignalReader, compile_reading
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import hidden_size


def draft(run: Run) -> Drafted:
    """Let each live row draft until its policy, its budget or a drawn end token stops it.

    Host syncs: one for the round's largest budget, if the policy may vary it, and one a token, if the policy can stop
    early. The host must know whether any row drafts on, because only the host can launch a forward.
    """
    drafting, progress = run.drafting, run.begin()
    drafted, most = Drafted.nothing(progress), run.longest_draft(progress)
    if most == 0:
        return drafted
    fed = run.feed_drafter()
    for depth in range(1, most + 1):
        drawn, progress = run.draw(depth, fed, progress)
        drafted.append(drawn)
        # A policy that reads the state at the drawn token is asked after the token is fed.
        ahead = run.drafter.feed(drawn.ids, depth, progress.active) if drafting.looks_ahead and depth < most else None
        if drafting.asks:
            progress = run.judge(depth, drawn, ahead, progress)
        if is_over(drafting, drafted, progress, last=depth == most):
            break
        fed = ahead or run.drafter.feed(drawn.ids, depth, progress.active)
    drafted.stop(progress)
    if drafting.trims:
        drafted.submit(drafting.trim(drafted.lengths))
    return drafted


def is_over(drafting: Drafting, drafted: Drafted, progress: DraftProgress, last: bool) -> bool:
    """Whether all rows have stopped. A slot that no row drew, as all of them stopped before the draw, is dropped."""
    if drafting.peeks:
        some, slots = torch.stack([progress.active.any().long(), progress.lengths.max()]).tolist()
        if not some:
            drafted.cut(slots)
        return not some
    return last or (drafting.stops_early and not bool(progress.active.any()))


def verify(run: Run, drafted: Drafted) -> tuple[Verified, Tensor, Tensor]:
    """Run the target on the last token and the draft, then test each candidate → the result, and the target's logits
    and scores, (batch, k + 1, vocab) each."""
    logits, scores, window = run.target_scores(drafted)
    return run.test(scores, window, drafted), logits, scores


class Decoder:
    """Two cached models that decode the number of rows, and of tokens a row, that the memory plan is for.

    With compile="graphs" forwards are CUDA graphs. So are the steps between them, if policy and processing are
    functions of tensors alone. graphs: what captures; CUDA when left out. With compile="steps", for a CPU, reading the
    draft's signals and scoring them by a head is one compiled call (policies/reader.py).

    Caches, rows, graphs and compiled calls are kept from run to run and reused as far as they fit the next run (see
    captured.py). Only one run at a time. `free` releases their memory, and so does deleting the decoder.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        memory: MemoryPlan,
        *,
        compile: Compile = "none",
        attention: Attention = "auto",
        graphs: GraphBackend | None = None,
    ):
        self.compiles_reading = compile == "steps"
        if self.compiles_reading and draft.device.type != "cpu":
            raise InputError(f"compile is 'steps', which is for a CPU, but the models are on {draft.device}")
        self.memory, self.batch, self.max_length = memory, memory.batch, memory.max_length
        self.backend = graphs or graph_backend(target.device) if compile == "graphs" else None
        options: Any = {"compile": compile, "attention": attention, "graphs": self.backend}
        read = draft.layers_read if isinstance(draft, Eagle3Drafter) else False
        self.target = CachedModel(target, self.batch, self.max_length, with_hidden=read, **options)
        self.draft = CachedModel(draft, self.batch, self.max_length, with_hidden=True, **options)
        self.rows = self._new_rows(memory.max_draft_tokens)
        also = [part.graphs for part in (self.target, self.draft) if part.graphs]
        self.captured = CapturedSteps(self.backend, also)
        # By policy: it, whether for greedy decoding, and what reads for it.
        self.readers: dict[int, tuple[weakref.ref[DraftPolicy], bool, SignalReader | None]] = {}
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
        """Continue every request. Yields each when it finishes; a waiting request takes its row. None in `requests`
        means that the next one has not arrived yet. Raises InputError when sampled output would not be the target's, or
        when another run has begun before this one was over."""
        check_lossless(policy, verifier, greedy=processing.greedy, allow_lossy=allow_lossy)
        check_use(policy, Checkpoint.of(self.target.model), processing.sampling)
        self.runs = number = self.runs + 1
        run, waiting = self._new_run(policy, processing, stopping, seed, verifier), Waiting(requests)
        while run.rows.live_rows or not waiting.done:
            admit(run, waiting)
            if not run.rows.live_rows:
                time.sleep(1e-3)  # until the next look for arrived requests
                continue
            drafted = draft(run)
            run.end_draft()
            verified, logits, scores = verify(run, drafted)
            outcome = run.accept(drafted, verified, scores)
            if watch:
                watch(Round(run.rows, drafted, verified, logits, scores, outcome))
            del drafted, verified, logits, scores  # free a round's large tensors before the next round makes its own
            finished = run.observe(outcome)
            more = run.rows.live_rows or not waiting.done
            yield from finished
            if self.runs != number:  # the caller has begun another run
                if more:
                    raise InputError("another run of this decoder has begun: rows and caches are its own now")
                return

    def free(self) -> None:
        """Release the memory of caches, graphs and their outputs; call it between runs. The next run allocates and
        captures anew."""
        self.captured.free()
        for model in (self.target, self.draft):
            model.free()

    def _new_run(
        self, policy: DraftPolicy, processing: Processing, stopping: Stopping, seed: int, verifier: Verifier
    ) -> Run:
        self._make_room(policy)
        drafting, device = Drafting(policy, host=PACKED if self.target.packs else PADDED), self.target.model.device
        drafting.start(self.batch, device)
        given = self.rows, self.target, self.draft, self.captured, policy, processing, stopping
        reader = self._reader_of(policy, processing) if self.compiles_reading and processing.plain else None
        return Run(*given, seed=seed, verifier=verifier, reader=reader)

    def _reader_of(self, policy: DraftPolicy, processing: Processing) -> SignalReader | None:
        """The policy's compiled reader; None if it has none that is faster."""
        known = self.readers.get(id(policy))
        if known and known[0]() is policy and known[1] is processing.greedy:
            return known[2]
        draft = self.draft.model
        vocab = processing.vocab_size
        if isinstance(draft, Eagle3Drafter) and draft.lacks_tokens:
            vocab = len(draft.d2t)
        logits = torch.linspace(-1, 1, 2 * vocab, device=draft.device).to(draft.dtype).view(2, vocab)
        hidden = logits.new_zeros(2, hidden_size(draft))
        reader = SignalReader(policy.needs)
        compiles = compile_reading(reader, policy, logits, hidden, sampled=not processing.greedy)
        found = reader if compiles else None
        self.readers = {key: each for key, each in self.readers.items() if each[0]() is not None}
        self.readers[id(policy)] = weakref.ref(policy), processing.greedy, found
        return found

    def _new_rows(self, max_draft_tokens: int) -> Rows:
        return Rows(self.batch, self.max_length, max_draft_tokens + 1, self.target.model.device)

    def _make_room(self, policy: DraftPolicy) -> None:
        """Reset rows and caches. New rows are made only if the last run left too few of them, or too few columns for
        this policy's drafts."""
        most = max(policy.max_draft_tokens, self.memory.max_draft_tokens)
        if self.rows.fit(self.batch, most + 1):
            self.rows.reset()
        else:
            self.captured.free()
            self.rows = self._new_rows(most)
        for model in (self.target, self.draft):
            model.restore(self.batch)
