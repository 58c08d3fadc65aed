"""The target answers with our decode loop, and each position is scored when it is decoded.

The target's distribution at a position is at hand then. So the target runs once, and only the draft needs a pass of
its own: over the tokens of the response, WIDTH at a time, with its own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accept_head.errors import InputError
from accept_head.inference.decode.generate import check_models
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Finished, Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.memory import plan_memory
from accept_head.inference.engine.proof import check_served
from accept_head.inference.policies.registry import make_policy
from accept_head.pair import Pair, input_device
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig
from accept_head.training.collect.depths import DepthScoring
from accept_head.training.collect.score import score_positions
from accept_head.training.halving import REMEDY, half, ran_out_of_memory
from accept_head.training.plan.estimate import WIDTH


@dataclass
class Response:
    """What is known of one response. slot: its place in the buffer. scored: positions that are. pending: positions
    whose target logits wait in the buffer. columns: name → a tensor for each part, (positions, …)."""

    index: int
    slot: int
    scored: int = 0
    pending: int = 0
    columns: dict[str, list[Tensor]] = field(default_factory=dict)


class Scoring:
    """Scores the positions of all rows while they are decoded: the `watch` of a decoder's run.

    The bookkeeping is on the host, in loops over the rows: a shape depends on it, and a forward takes far longer.
    """

    def __init__(self, decoder: Decoder, config: TraceConfig, vocab_size: int, width: int):
        """width: positions of a row that are scored together, at least as many as a round emits."""
        self.draft, self.config, self.vocab_size, self.width = decoder.draft, config, vocab_size, width
        self.buffer: Tensor | None = None  # (batch, width, vocab): the target's logits of pending positions
        self.free = list(range(decoder.batch))  # slots
        self.responses: dict[int, Response] = {}  # by the index of the request

    def __call__(self, round: Round) -> None:
        rows = round.rows
        lengths, live = torch.stack([rows.lengths, rows.live.long()]).tolist()  # a sync, as each round ends with one
        emitted = {row: lengths[row] - rows.host_lengths[row] for row in rows.live_rows}
        known = {row: self._response(rows.requests[row]) for row in emitted}
        full = {row: each for row, each in known.items() if each.pending + emitted[row] > self.width}
        self._score(rows.tokens, full, rows.host_lengths)
        self._keep(round.logits, known, emitted)
        due = {row: each for row, each in known.items() if each.pending == self.width or not live[row]}
        self._score(rows.tokens, due, lengths)
        self.free += [each.slot for row, each in known.items() if not live[row]]

    def columns(self, done: Finished) -> dict[str, Any]:
        """The columns of a finished response."""
        parts = self.responses.pop(done.request.index).columns
        return {name: torch.cat(values).flatten().tolist() for name, values in parts.items()}

    def _response(self, request: Request | None) -> Response:
        assert request is not None
        if request.index not in self.responses:
            self.responses[request.index] = Response(request.index, self.free.pop())
        return self.responses[request.index]

    def _keep(self, logits: Tensor, known: dict[int, Response], emitted: dict[int, int]) -> None:
        """Copy the target's logits at the emitted tokens into the buffer. logits: (batch, k + 1, ≥ vocab)."""
        if self.buffer is None:
            self.buffer = logits.new_empty(len(self.free) + len(self.responses), self.width, self.vocab_size)
        places = [
            (response.slot, response.pending + step, row, step)
            for row, response in known.items()
            for step in range(emitted[row])
        ]
        slot, place, row, step = torch.tensor(places, device=logits.device).unbind(-1)
        self.buffer[slot, place] = logits[row, step, : self.vocab_size]
        for row_, response in known.items():
            response.pending += emitted[row_]

    def _score(self, tokens: Tensor, due: dict[int, Response], lengths: Sequence[int]) -> None:
        """Score the pending positions of these rows. tokens: (batch, capacity). lengths: of all rows, so far."""
        if not due:
            return
        assert self.buffer is not None
        rows, responses = list(due), list(due.values())
        ends = [lengths[row] - 1 for row in rows]  # the last token gives no position of this response
        starts = [end - response.pending for end, response in zip(ends, responses, strict=True)]
        new = {row: start for row, start, each in zip(rows, starts, responses, strict=True) if not each.scored}
        self.draft.fill(tokens, [*new], [0] * len(new), [*new.values()])  # the prompts, but for their last tokens
        q_logits = self.draft.read(tokens, rows, starts, ends).logits
        counts = [response.pending for response in responses]
        of_rows = [
            (each.slot, row, start, each.index, each.scored)
            for each, row, start in zip(responses, rows, starts, strict=True)
        ]
        which = torch.repeat_interleave(torch.tensor(counts)).to(q_logits.device)  # 0, 0, …, 1, 1, …
        place = torch.cat([torch.arange(count) for count in counts]).to(which.device)
        slot, row, start, index, scored = torch.tensor(of_rows, device=which.device)[which].unbind(-1)
        columns = score_positions(
            self.buffer[slot, place],
            q_logits[which, place, : self.vocab_size],
            tokens[row, start + place + 1],
            torch.stack([index, scored + place], dim=-1),
            self.config.sampling,
            seed=self.config.seed,
            alternatives=self.config.alternatives or 0,
        )
        for name, values in columns.items():
            for response, part in zip(responses, values.split(counts), strict=True):
                response.columns.setdefault(name, []).append(part)
        for response in responses:
            response.scored, response.pending = response.scored + response.pending, 0


class Decoding:
    """Answers prompts and scores the answers. The decoder is kept from shard to shard.

    A response depends on the seed and on its prompt's index, not on the policy, as every token is drawn from the
    target's own distribution (verifier `match`). draft_policy: how to speculate; `none` decodes with the target alone.

    Raises InputError when our decode loop cannot serve one of the models.
    """

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], config: TraceConfig, draft_policy: str = "none"):
        check_models(pair.target, pair.draft)
        for model in (pair.target, pair.draft):
            try:
                check_served(model)
            except InputError as error:
                raise InputError(f"{error}; --backend vllm or openai can answer instead of our loop") from None
        self.pair, self.config = pair, config
        self.policy = make_policy(draft_policy, pair)
        self.width = max(WIDTH, self.policy.max_draft_tokens + 1)
        self.longest = max(len(prompt.ids) for prompt in prompts)
        self.batch = min(config.batch_size, config.shard_size, len(prompts))
        self.decoder: Decoder | None = None

    def records(self, shard: int, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Each prompt with the columns of its response, as they finish. Finished rows are given to waiting prompts, but
        not to those of the next shard: then the batch, and the rounding, would depend on where a run was interrupted.

        Raises InputError when not even one prompt fits in memory.
        """
        left = {prompt.index: prompt for prompt in prompts}
        while left:
            try:
                for index, columns in self._run(list(left.values())):
                    yield left.pop(index), columns
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
            if left:
                self._shrink()

    def _run(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, dict[str, Any]]]:
        pair, config = self.pair, self.config
        if self.decoder is None:
            self.decoder = self._new_decoder()
        scoring: Scoring | DepthScoring
        if config.depths is None:
            scoring = Scoring(self.decoder, config, pair.vocab_size, self.width)
        else:
            scoring = DepthScoring(pair, config)
        for done in self.decoder.run(
            [Request(prompt.index, prompt.ids, config.max_new_tokens, key=prompt.index) for prompt in prompts],
            policy=self.policy,
            processing=Processing(config.sampling, pair.vocab_size),
            stopping=Stopping(config.end_token_ids, (), input_device(pair.target)),
            seed=config.seed,
            verifier="match",
            watch=scoring,
        ):
            yield done.request.index, scoring.columns(done)

    def _new_decoder(self) -> Decoder:
        target, draft = self.pair.target, self.pair.draft
        while True:
            plan = plan_memory(
                target,
                draft,
                batch=self.batch,
                max_length=self.longest + self.config.max_new_tokens,
                max_draft_tokens=self.policy.max_draft_tokens,
                vocab_size=self.pair.vocab_size,
                greedy=self.config.sampling.greedy,
                longest_prompt=self.longest,
                scored=self.width,
            )
            if plan.fits(input_device(target)):
                return Decoder(target, draft, plan)
            self._shrink()

    def _shrink(self) -> None:
        """Go on with half of the rows."""
        if self.decoder is not None:
            self.decoder.free()
        self.decoder, self.batch = None, half("generating", self.batch, REMEDY)

    def close(self) -> None:
        if self.decoder is not None:
            self.decoder.free()
