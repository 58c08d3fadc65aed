"""The batch: rows that each hold one request at its own length, come and go, and are told apart by nothing but data.

Device tensors say where each row is; the host keeps a copy of the few numbers that decide shapes, refreshed by the one
transfer that ends a round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accept_head.cost import DecodeCounts
from accept_head.errors import InputError
from accept_head.inference.decode.drafted import Drafted, DraftProgress
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.kernels import rows as on_device
from accept_head.inference.kernels.rows import Accepted, RoundCounts, RowState
from accept_head.inference.kernels.verify import Verified


@dataclass(frozen=True)
class Request:
    """One prompt to continue. index: its place in the caller's list. key: names its random numbers. left: (n,) ids that
    logits processors and stopping criteria see before the prompt, but the models do not: transformers' left padding.
    tenant: whose it is, for policies that go by that; "" = nobody has said."""

    index: int
    prompt: Sequence[int]
    max_new_tokens: int
    key: int
    left: Tensor | None = None
    tenant: str = ""


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """What one response cost. drafted, submitted, accepted, discarded: tokens; submitted are those that were verified,
    all of the drafted unless the policy trims. rounds: target forwards. draft_forwards: those that this row took part
    in, one a drafted token (more with a head read at lag 0), which do not depend on how often the host asks. wasted:
    those that the device ran besides, in this row's rounds, after all rows had stopped in the middle of a chunk.
    seconds: from admission to the end, so they overlap with those of the rows around."""

    generated: int
    drafted: int
    submitted: int
    accepted: int
    rounds: int
    draft_forwards: int
    seconds: float
    wasted: int = 0

    @property
    def discarded(self) -> int:
        return self.drafted - self.accepted

    @property
    def forwards(self) -> int:
        """Of both models; the prefill is not counted."""
        return self.draft_forwards + self.rounds

    @property
    def counts(self) -> DecodeCounts:
        return DecodeCounts(
            generated=self.generated,
            discarded=self.discarded,
            target_forwards=self.rounds,
            draft_forwards=self.draft_forwards,
        )


class Finished(NamedTuple):
    request: Request
    token_ids: list[int]
    stats: DecodeStats


COUNTS = ("drafted", "submitted", "accepted", "rounds", "draft_forwards", "wasted")


class Rows:
    """Tokens so far, each row's length, and how much of a row the draft has been fed. Rounds and `reset` change its
    tensors in place: where they lie is part of captured graphs.

    Between rounds the target has been fed all tokens of a row but the last, the draft the first `fed` of them.
    """

    def __init__(self, batch: int, max_length: int, spare: int, device: torch.device):
        """max_length: longest row. spare: columns beyond it, for drafts that outrun a row's end."""
        self.max_length, self.spare = max_length, spare
        self.tokens = torch.zeros(batch, max_length + spare, dtype=torch.long, device=device)
        self.lengths = torch.ones(batch, dtype=torch.long, device=device)
        zero = torch.zeros_like(self.lengths)
        self.max_lengths, self.fed, self.keys = zero.clone(), zero.clone(), zero.clone()
        self.rounds, self.drafted, self.submitted = (zero.clone() for _ in range(3))
        self.accepted, self.draft_forwards, self.wasted = (zero.clone() for _ in range(3))
        self.round_accepted = zero
        # Of this round, by purpose and slot: a row's next token is drawn with one, even if there is no draft.
        self.uniforms = torch.zeros(batch, 3, max(1, spare - 1), dtype=torch.float64, device=device)
        self.live = torch.zeros_like(self.lengths, dtype=torch.bool)
        self._forget_requests()

    def reset(self) -> None:
        """As new: whatever a run that ended, or that was given up in the middle, has left."""
        for tensor in self.tensors:
            tensor.zero_()
        self.lengths.fill_(1)
        self._forget_requests()

    def _forget_requests(self) -> None:
        batch = len(self.lengths)
        self.requests: list[Request | None] = [None] * batch
        self.started = [0.0] * batch
        self.host_lengths, self.host_fed = [1] * batch, [0] * batch

    def fit(self, batch: int, spare: int) -> bool:
        """Whether there are so many rows, and so many columns beyond the longest or more."""
        return len(self.requests) == batch and self.spare >= spare

    @property
    def tensors(self) -> list[Tensor]:
        """All that a round changes, and what it reads."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    @property
    def live_rows(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is not None]

    @property
    def longest(self) -> int:
        """Tokens of the longest live row."""
        return max(self.host_lengths[row] for row in self.live_rows)

    @property
    def unfed(self) -> int:
        """Most tokens of a live row that the draft has not been fed."""
        return max(self.host_lengths[row] - self.host_fed[row] for row in self.live_rows)

    def room(self, most: int) -> int:
        """Of up to `most` tokens, so many can some live row draft: a round emits one more than it accepts, so that the
        last token of a response needs no draft."""
        left = 0
        for length, request in zip(self.host_lengths, self.requests, strict=True):
            if request is not None:
                left = max(left, len(request.prompt) + request.max_new_tokens - length - 1)
        return min(most, left)

    def context(self, row: int, length: int) -> Tensor:
        """The first `length` tokens of a row as transformers would see them, left padding included."""
        request = self.requests[row]
        own = self.tokens[row, :length]
        return own if request is None or request.left is None else torch.cat([request.left, own])

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Give idle rows to new requests; returns the rows. Raises InputError when one is longer than a row."""
        for request in requests:
            if (needed := len(request.prompt) + request.max_new_tokens) > self.max_length:
                raise InputError(
                    f"prompt {request.index} has {len(request.prompt)} tokens, {needed} with its response, but the "
                    f"cache holds {self.max_length}"
                )
        idle = [row for row, request in enumerate(self.requests) if request is None]
        taken = idle[: len(requests)]
        for row, request in zip(taken, requests, strict=True):
            self.requests[row], self.started[row] = request, time.perf_counter()
            self.host_lengths[row], self.host_fed[row] = len(request.prompt), 0
            self.tokens[row, : len(request.prompt)] = torch.tensor(request.prompt, device=self.tokens.device)
        rows = torch.tensor(taken, device=self.lengths.device)
        values = [[len(r.prompt), len(r.prompt) + r.max_new_tokens, r.key] for r in requests]
        new = torch.tensor(values, device=rows.device).unbind(-1)
        for tensor, value in zip((self.lengths, self.max_lengths, self.keys), new, strict=True):
            tensor[rows] = value
        for tensor in (self.fed, *(getattr(self, name) for name in COUNTS)):
            tensor[rows] = 0
        self.live[rows] = True
        return taken

    def mark_fed(self, rows: Sequence[int]) -> None:
        """The draft has been fed all tokens of these rows but the last."""
        index = torch.tensor(rows, device=self.fed.device)
        self.fed[index] = self.lengths[index] - 1
        for row in rows:
            self.host_fed[row] = self.host_lengths[row] - 1

    @property
    def state(self) -> RowState:
        return RowState(*(getattr(self, name) for name in RowState._fields))

    def set_uniforms(self, seed: int, slots: int) -> None:
        """This round's random numbers, `slots` for each purpose of each row."""
        on_device.write_uniforms(self.uniforms, self.keys, self.rounds, seed, slots)

    def last(self, tokens: int, width: int) -> tuple[Tensor, Tensor]:
        """(batch,) where the last so many tokens of each row begin, and what stands from there on, (batch, width)."""
        return on_device.last_tokens(self.tokens, self.lengths, tokens, width)

    def place_drawn(self, depth: int, token_ids: Tensor, progress: DraftProgress, stopping: Stopping) -> DraftProgress:
        """Put (batch,) drafted tokens behind the accepted ones, where nobody counts them until they are accepted → how
        far the rows are, and which of them go on.

        What is drawn is kept, so not drafting beyond an end token changes no distribution."""
        active, drawn = on_device.write_drawn(
            self.tokens,
            self.lengths,
            depth,
            token_ids,
            stopping.end_ids,
            progress.budget,
            progress.active,
            progress.lengths,
        )
        return progress._replace(active=active, lengths=drawn)

    def accept(self, drafted: Drafted, verified: Verified, stopping: Stopping) -> Accepted:
        """Keep the accepted tokens and the next one, cut after an end token."""
        accepted, next_ids, _ = verified
        counts = RoundCounts(accepted, next_ids, drafted.lengths, drafted.extra_forwards, drafted.submitted)
        return on_device.accept(self.state, counts, stopping.end_ids, drafted.slots, any_drawn=bool(drafted.ids))

    def sync(self, stopping: Stopping) -> list[Finished]:
        """Tell the host where the rows are, the sync that ends a round, and hand out those that are finished."""
        before = list(self.host_lengths)
        state = torch.stack([self.lengths, self.fed, self.live.long()]).tolist()
        self.host_lengths, self.host_fed = state[0], state[1]
        done = [row for row in self.live_rows if not state[2][row]]
        if stopping.criteria:
            done = self._apply_criteria(stopping, before, done)
        return self._take(done) if done else []

    def _apply_criteria(self, stopping: Stopping, before: list[int], done: list[int]) -> list[int]:
        """Cut each row after the first new token at which a criterion holds; returns the rows that are done now."""
        done = list(done)
        for row in self.live_rows:  # criteria are Python on one sequence; only those who give any pay for it
            for length in range(before[row] + 1, self.host_lengths[row] + 1):
                if stopping.holds(self.context(row, length)):
                    self.host_lengths[row] = length
                    self.accepted[row] -= (self.round_accepted[row] - (length - before[row])).clamp(min=0)
                    done = done if row in done else [*done, row]
                    break
        return done

    def _take(self, done: list[int]) -> list[Finished]:
        index = torch.tensor(done, device=self.lengths.device)
        self.live[index] = False
        counts = torch.stack([getattr(self, name) for name in COUNTS], dim=-1)[index].tolist()
        tokens, now = self.tokens[index].tolist(), time.perf_counter()
        finished = []
        for row, ids, counted in zip(done, tokens, counts, strict=True):
            request = self.requests[row]
            assert request is not None
            generated = ids[len(request.prompt) : self.host_lengths[row]]
            stats = DecodeStats(
                generated=len(generated), seconds=now - self.started[row], **dict(zip(COUNTS, counted, strict=True))
            )
            finished.append(Finished(request, generated, stats))
            self.requests[row] = None
            self.host_lengths[row], self.host_fed[row] = 1, 0
        self.lengths[index], self.fed[index] = 1, 0
        return finished

    def select(self, rows: Tensor, host_rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; host_rows are the same numbers."""
        for name in ("tokens", "lengths", "max_lengths", "fed", "keys", "live", "uniforms", "round_accepted", *COUNTS):
            setattr(self, name, getattr(self, name)[rows])
        self.requests = [self.requests[row] for row in host_rows]
        self.started = [self.started[row] for row in host_rows]
        self.host_lengths = [self.host_lengths[row] for row in host_rows]
        self.host_fed = [self.host_fed[row] for row in host_rows]
