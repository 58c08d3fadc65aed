"""The decode loop with recorded acceptance: all its work is done, and then the record says what was accepted.

Draft forwards, signals, the head, sampling, verification and bookkeeping run as always, on models of any weights.
Only two numbers are replaced, where they come out: how many candidates verification accepted, and what the head's P̂
is, before it goes through the policy's own rule. Each is one lookup on the device, which counts as the loop's
overhead.
"""

from __future__ import annotations

from typing import Any

import torch
from recorded_rounds import RecordedRounds
from torch import Tensor

from accept_head.head.network import AcceptanceHead
from accept_head.head_config import HeadConfig
from accept_head.inference.decode.drafted import Drafted
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.rows import Request
from accept_head.inference.decode.run import Run
from accept_head.inference.engine.capture import Capture
from accept_head.inference.kernels.verify import Verified
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import DraftStep, constant_budget
from accept_head.pair import hidden_size, input_embeddings
from accept_head.signals import SIGNALS

HEAD_DEPTH, HEAD_WIDTH = 2, 1024  # of the default recipe, for a draft of this size or larger


class RecordedDecoder(Decoder):
    """Accepts what the record accepts. A row's key is the position at which its response starts in the record."""

    record: RecordedRounds
    prompt_tokens: int

    def places(self) -> Tensor:
        """(batch,) the position in the record at which each row's round starts."""
        rows = self.rows
        return (rows.keys + rows.lengths - self.prompt_tokens).clamp(min=0, max=len(self.record.leading) - 1)

    def _new_run(self, *given: Any) -> Run:
        run = super()._new_run(*given)
        test = run.test

        def recorded(scores: Tensor, window: Tensor, drafted: Drafted) -> Verified:
            accepted = torch.minimum(self.record.leading[self.places()], drafted.submitted)
            return test(scores, window, drafted)._replace(accepted=accepted)

        run.test = recorded  # type: ignore[method-assign]
        return run


class RecordedHead(HeadPolicy):
    """A real head, with all its work and its rule, whose P̂ is then replaced by the record's."""

    capture = Capture(carried=(*(HeadPolicy.capture or Capture()).carried, "now"))  # compile="graphs" captures it, too

    def __init__(self, head: AcceptanceHead, threshold: float, decoder: RecordedDecoder, *, k_min: int, k_max: int):
        super().__init__(head, threshold, k_min=k_min, k_max=k_max)
        self.decoder = decoder
        self.now = torch.empty(0)  # this round's scores, (batch, K)

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        self.now = self.decoder.record.scores[self.decoder.places()]
        return super().start_round(live)

    def score(self, step: DraftStep) -> Tensor:
        own = super().score(step)
        # A probability is never below −1; but nothing that compiles this knows, so nothing drops the head's work.
        return torch.where(own < -1, own, self.now[:, step.depth - 1])


def random_head(draft: Any, *, depth: int = HEAD_DEPTH, width: int = HEAD_WIDTH, seed: int = 0) -> AcceptanceHead:
    """An untrained head of the default recipe for this draft: state before the token, signals and its embedding."""
    size, embeddings = hidden_size(draft), input_embeddings(draft)
    config = HeadConfig(
        hidden_size=size,
        depth=depth,
        reads="before",
        signals=SIGNALS,
        signal_mean=(-3.0, 3.0, 0.4),
        signal_std=(3.0, 2.0, 0.3),
        embedding_std=max(float(embeddings.float().square().mean().sqrt()), 1e-6),
        width=None if size <= width else width,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = AcceptanceHead(config)
    return head.to(draft.device).attach(embeddings).eval().requires_grad_(False)


def recorded_requests(
    record: RecordedRounds, rows: int, *, prompt_tokens: int, vocab_size: int, first: int = 0
) -> list[Request]:
    """Random prompts, continued along the record's responses from number `first` on; they recur if rows are more."""
    prompts = torch.randint(3, vocab_size, (rows, prompt_tokens), generator=torch.Generator().manual_seed(first))
    return [
        Request(first + row, prompt, record.tokens, (first + row) % record.responses * record.tokens)
        for row, prompt in enumerate(prompts.tolist())
    ]
