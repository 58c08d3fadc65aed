"""The batch: rows that each hold one request at its own length, and come and go.

Device tensors hold the state of each row. The host keeps a copy of the few numbers that determine shapes; the one
transfer at the end of a round refreshes it.
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
    """One prompt to continue. index: its place in the caller's list. key: selects its random numbers. left: (n,) ids of
    transformers' left padding, which logits processors and stopping criteria see before the prompt, but the models do
    not. tenant: for policies that are `by_tenant`; "" = unnamed. k_max: the most tokens to draft in a round, whatever
    the policy says; 0 = no drafts; None = no such bound."""

    index: int
    prompt: Sequence[int]
    max_new_tokens: int
    key: int
    left: Tensor | None = None
    tenant: str = ""
    k_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """The cost of one response. drafted, submitted, accepted, discarded: tokens. submitted: the verified ones, which
    are all drafted tokens unless the policy trims. rounds: target forwards. draft_forwards: those that this row took
    part in, one per drafted token (more with a head at lag 0). seconds: from admission to the end; they overlap with
    those of other rows."""

    generated: int
    drafted: int
    submitted: int
    accepted: int
    rounds: int
    draft_forwards: int
    seconds: float

    @property
    def discarded(self) -> int:
        return self.drafted - self.accepted

    @property
    def forwards(self) -> int:
        """Forwards of both models, without the prefill."""
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


COUNTS = ("drafted", "submitted", "accepted", "rounds", "draft_forwards")


class Rows:
    """Each row's tokens so far, its length, and how many tokens the draft has been fed. Rounds and `reset` change the
    tensors in place, because captured graphs contain their addresses.

    Between rounds the target has been fed all tokens of a row but the last, and the draft the first `fed` tokens.
    """

    def __init__(self, batch: int, max_length: int, spare: int, device: torch.device):
        """max_length: longest row. spare: columns beyond it, for drafts that go past a row's end."""
        self.max_length, self.spare = max_length, spare
        self.tokens = torch.zeros(batch, max_length + spare, dtype=torch.long, device=device)
        self.lengths = torch.ones(batch, dtype=torch.long, device=device)
        zero = torch.zeros_like(self.lengths)
        self.max_lengths, self.k_max, self.fed, self.keys = (zero.clone() for _ in range(4))
        self.rounds, self.drafted, self.submitted = (zero.clone() for _ in range(3))
        self.accepted, self.draft_forwards = zero.clone(), zero.clone()
        self.round_accepted = zero
        # This round's random numbers by purpose and slot; at least one slot, as a row's next token needs one too.
        self.uniforms = torch.zeros(batch, 3, max(1, spare - 1), dtype=torch.float64, device=device)
        self.live = torch.zeros_like(self.lengths, dtype=torch.bool)
        self._forget_requests()

    def reset(self) -> None:
        """Back to the initial state, also after a run that was abandoned in the middle."""
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
        """Whether there are exactly `batch` rows and at least `spare` spare columns."""
        return len(self.requests) == batch and self.spare >= spare

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a round changes or reads."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    @property
    def live_rows(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is not None]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest live row."""
        return max(self.host_lengths[row] for row in self.live_rows)

    @property
    def unfed(self) -> int:
        """The largest number of tokens of a live row that the draft has not been fed."""
        return max(self.host_lengths[row] - self.host_fed[row] for row in self.live_rows)

    def room(self, most: int) -> int:
        """The most tokens, up to `most`, that any live row can draft. A round emits one token more than it accepts, so
        the last token of a response needs no draft."""
        left = 0
        for length, request in zip(self.host_lengths, self.requests, strict=True):
            if request is not None:
                own = len(request.prompt) + request.max_new_tokens - length - 1
                left = max(left, own if request.k_max is None else min(own, request.k_max))
        return min(most, left)

    def context(self, row: int, length: int) -> Tensor:
        """The first `length` tokens of a row, with the left padding that transformers has."""
        request = self.requests[row]
        own = self.tokens[row, :length]
        return own if request is None or request.left is None else torch.cat([request.left, own])

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Give idle rows to new requests → these rows. Raises InputError when a request is longer than a row."""
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
        values = [
            [len(r.prompt), len(r.prompt) + r.max_new_tokens, self.max_length if r.k_max is None else r.k_max, r.key]
            for r in requests
        ]
        new = torch.tensor(values, device=rows.device).unbind(-1)
        for tensor, value in zip((self.lengths, self.max_lengths, self.k_max, self.keys), new, strict=True):
            tensor[rows] = value
        for tensor in (self.fed, *(getattr(self, name) for name in COUNTS)):
            tensor[rows] = 0
        self.live[rows] = True
        return taken

    def mark_fed(self, rows: Sequence[int]) -> None:
        """Record that the draft has been fed all tokens of these rows but the last."""
        index = torch.tensor(rows, device=self.fed.device)
        self.fed[index] = self.lengths[index] - 1
        for row in rows:
            self.host_fed[row] = self.host_lengths[row] - 1

    @property
    def state(self) -> RowState:
        return RowState(*(getattr(self, name) for name in RowState._fields))

    def set_uniforms(self, seed: int, slots: int) -> None:
        """Set this round's random numbers, `slots` for each purpose of each row."""
        on_device.write_uniforms(self.uniforms, self.keys, self.rounds, seed, slots)

    def last(self, tokens: int, width: int) -> tuple[Tensor, Tensor]:
        """(batch,) where the last `tokens` tokens of each row begin, and the `width` ids from there, (batch, width)."""
        return on_device.last_tokens(self.tokens, self.lengths, tokens, width)

    def wanted(self, starts: Tensor, width: int, first: Tensor, end: Tensor) -> Tensor:
        """The tokens that a forward should feed, (batch, width) bool: of live rows those at positions `first` to
        `end` − 1. starts, first, end: (batch,) positions; row r is fed from starts[r] on."""
        positions = starts[:, None] + torch.arange(width, device=starts.device)
        return self.live[:, None] & (positions >= first[:, None]) & (positions < end[:, None])

    def place_drawn(self, depth: int, token_ids: Tensor, progress: DraftProgress, stopping: Stopping) -> DraftProgress:
        """Write (batch,) drafted tokens after the accepted ones → the new progress. The row's length does not count
        them until they are accepted.

        A row stops after a drafted end token. The token is kept, so this changes no distribution."""
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
        """Append the accepted tokens and the next one, cut after an end token."""
        accepted, next_ids, _ = verified
        counts = RoundCounts(accepted, next_ids, drafted.lengths, drafted.extra_forwards, drafted.submitted)
        return on_device.accept(self.state, counts, stopping.end_ids, drafted.slots, any_drawn=bool(drafted.ids))

    def sync(self, stopping: Stopping) -> list[Finished]:
        """Copy the rows' state to the host, the sync that ends a round → the finished requests."""
        before = list(self.host_lengths)
        state = torch.stack([self.lengths, self.fed, self.live.long()]).tolist()
        self.host_lengths, self.host_fed = state[0], state[1]
        done = [row for row in self.live_rows if not state[2][row]]
        if stopping.criteria:
            done = self._apply_criteria(stopping, before, done)
        return self._take(done) if done else []

    def _apply_criteria(self, stopping: Stopping, before: list[int], done: list[int]) -> list[int]:
        """Cut each row after the first new token at which a criterion holds → the rows that are done now."""
        done = list(done)
        for row in self.live_rows:  # criteria are Python functions of one sequence
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
        """Row i becomes what row rows[i] was. host_rows: the same numbers on the host."""
        state = ("tokens", "lengths", "max_lengths", "k_max", "fed", "keys", "live", "uniforms", "round_accepted")
        for name in (*state, *COUNTS):
            setattr(self, name, getattr(self, name)[rows])
        self.requests = [self.requests[row] for row in host_rows]
        self.started = [self.started[row] for row in host_rows]
        self.host_lengths = [self.host_lengths[row] for row in host_rows]
        self.host_fed = [self.host_fed[row] for row in host_rows]
