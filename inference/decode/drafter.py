"""What proposes: a draft model, which reads tokens alone, or a drafter that reads the target's states as well.

Both keep a cache of what they were fed. Between rounds the target has been fed all tokens of a row but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.inference.decode.rows import Rows
from accept_head.inference.engine.cache import FILL_TOKENS, CachedModel, Group
from accept_head.inference.engine.memory import FED_TOGETHER, WAITING_STATES
from accept_head.pair import Forward

# Tokens of a row that an EAGLE-3 drafter is fed in the forward that yields the first draw, as one forward is faster
# than two; or what a round can leave, if that is more.
BEGUN_TOGETHER = 8


class DraftModel:
    """A draft model. It may have been fed the drafted tokens of the last round, and keeps those that were accepted."""

    def __init__(self, cached: CachedModel, rows: Rows, call: Callable[..., Any], *, copy: bool):
        """call: of the steps of a run. copy: whether a forward's tensors are kept beyond the next one."""
        self.cached, self.rows, self.call, self.copy = cached, rows, call, copy

    def admit(self, target: CachedModel, taken: Sequence[int], ends: Sequence[int]) -> None:
        """Feed target and draft the tokens before `ends` of rows that were taken."""
        tokens, starts = self.rows.tokens, [0] * len(taken)
        target.fill(tokens, taken, starts, ends)
        self.cached.fill(tokens, taken, starts, ends)
        self.rows.mark_fed(taken)

    @property
    def behind(self) -> bool:
        """Whether it has missed so many tokens, in rounds without drafting, that it must `catch_up` before `begin`."""
        return self.rows.unfed > FED_TOGETHER

    def catch_up(self) -> None:
        """Feed the draft all tokens of the live rows but the last."""
        rows, live = self.rows, self.rows.live_rows
        ends = [rows.host_lengths[row] - 1 for row in live]
        self.cached.fill(rows.tokens, live, [rows.host_fed[row] for row in live], ends)
        rows.mark_fed(live)

    def begin(self) -> Forward:
        """Feed the draft the tokens it has not been fed: the last token, the one before it if all candidates were
        accepted, and that of a round without drafting → logits and hidden state at the last token,
        (batch, 1, …) each."""
        rows, width = self.rows, self.rows.unfed
        starts, window = self.call("draft window", rows.last, width, width)
        longest = max(0, rows.longest - width)
        wanted = rows.wanted(starts, width, rows.fed, rows.lengths) if self.cached.packs else None
        output = self.cached.forward(window, starts, longest, wanted=wanted, copy=self.copy)
        return output if width == 1 else at(output, rows.lengths - 1 - starts)

    def feed(self, token_ids: Tensor, depth: int, active: Tensor) -> Forward:
        """Feed (batch,) tokens drawn at `depth` → logits and hidden state at them, (batch, 1, …) each. active: (batch,)
        bool, the rows that draft on."""
        starts, longest = self.rows.lengths + depth - 1, self.rows.longest + depth - 1
        return self.cached.forward(token_ids[:, None], starts, longest, wanted=active[:, None], copy=self.copy)

    def hear(self, states: Tensor) -> None:
        """The target's states at the tokens it was just fed; empty here."""

    def accepted(self) -> None:
        """A round is over, and the rows have their new lengths."""

    def select(self, index: Tensor) -> None:
        self.cached.select(index)


class Eagle3(DraftModel):
    """A drafter whose slot i holds token i + 1 and the target's state of position i.

    What it was fed of drafted tokens it forgets, as it was fed with its own states: when it drafts again it is fed all
    new tokens, with the states that the target has given out meanwhile. It predicts from the last of them alone: of the
    others it only needs keys and values. While nothing is drafted they wait, as far as their states have room, and a
    request that ends first never costs any.
    """

    def __init__(self, cached: CachedModel, rows: Rows, call: Callable[..., Any], *, copy: bool):
        super().__init__(cached, rows, call, copy=copy)
        assert isinstance(cached.model, Eagle3Drafter)
        self.model = cached.model
        # (batch, ≥ unfed, layers × target width): what the target gave out for each token that it was not fed.
        batch, fc, device = len(rows.lengths), self.model.model.fc, rows.tokens.device
        self.states = torch.zeros(batch, 1, fc.in_features, dtype=self.model.dtype, device=device)
        # (batch, 1, hidden), its own output at the last slot.
        self.own = torch.zeros(batch, 1, fc.out_features, dtype=self.model.dtype, device=device)
        self.most = max(BEGUN_TOGETHER, WAITING_STATES // self.states.nbytes)  # tokens of a row that may wait
        self.begun = True  # whether it was fed all that `states` has
        self.waits = False  # whether this round's token waits behind earlier ones

    @property
    def behind(self) -> bool:
        return self.rows.unfed > max(BEGUN_TOGETHER, self.rows.spare)

    def catch_up(self) -> None:
        rows, last = self.rows, (self.rows.lengths - 1 - self._first_unfed).clamp(min=0)
        self._fill(rows.unfed - 1)
        self.states = self.states[torch.arange(len(last), device=last.device), last][:, None]
        rows.mark_fed(rows.live_rows)

    def admit(self, target: CachedModel, taken: Sequence[int], ends: Sequence[int]) -> None:
        rows = self.rows
        self.states[torch.tensor(taken, device=rows.tokens.device), 0] = 0  # what a prompt of one token has

        def feed(group: Group, states: Tensor) -> None:
            self.cached.fill_drafter(rows.tokens[:, 1:], group, self.model.project(states))
            row, start, end = group.spans.unbind(-1)
            last = (end - start).clamp(max=group.width) - 1
            self.states[row, 0] = states[torch.arange(len(row), device=row.device), last]

        target.fill(rows.tokens, taken, [0] * len(taken), ends, feed)
        rows.mark_fed(taken)

    def begin(self) -> Forward:
        rows, width, first = self.rows, self.rows.unfed, self._first_unfed
        index = first[:, None] + torch.arange(width, device=first.device)
        window = rows.tokens.gather(1, index.clamp(max=rows.tokens.shape[1] - 1))
        last, states = (rows.lengths - 1 - first).clamp(min=0), self._waiting(0, width)
        self.begun = True
        return self._kept(self.cached.forward(window, first - 1, rows.longest - 1, states=states, last=last))

    def feed(self, token_ids: Tensor, depth: int, active: Tensor) -> Forward:
        starts, longest = self.rows.lengths + depth - 2, self.rows.longest + depth - 2
        fed = self.cached.forward(token_ids[:, None], starts, longest, wanted=active[:, None], states=self.own)
        return self._kept(fed)

    def hear(self, states: Tensor) -> None:
        rows = self.rows
        self.waits = not self.begun and rows.unfed < self.most
        if self.waits:  # a round without drafting: one more token, behind those that were not fed
            if rows.unfed == self.states.shape[1]:
                more = min(max(BEGUN_TOGETHER, rows.unfed), self.most - rows.unfed)
                self.states = torch.nn.functional.pad(self.states, (0, 0, 0, more))
            place = rows.lengths - self._first_unfed
            self.states[torch.arange(len(place), device=place.device), place] = states[:, 0]
        else:
            if not self.begun:
                self._fill(rows.unfed)
            self.states = states if self.copy else states.clone()  # the next forward overwrites a graph's own
        self.begun = False

    def _fill(self, width: int) -> None:
        """Feed the first `width` tokens of each row that wait. What a row has fewer is overwritten before it is
        read."""
        first, tokens = self._first_unfed, self.rows.tokens[:, 1:]
        rows, step = torch.arange(len(first), device=first.device), max(1, FILL_TOKENS // len(first))
        for begin in range(0, width, step):
            end = min(begin + step, width)
            spans = torch.stack([rows, first - 1 + begin, first - 1 + end], dim=-1)
            self.cached.fill_drafter(tokens, Group(spans, end - begin, 0), self._waiting(begin, end))

    @property
    def _first_unfed(self) -> Tensor:
        """(batch,) the first token of each row that it was not fed; a row's first token has no slot."""
        return self.rows.fed.clamp(min=1)

    def _waiting(self, begin: int, end: int) -> Tensor:
        """The states of the tokens that wait, projected, (batch, end - begin, hidden)."""
        return self.model.project(self.states[:, begin:end].contiguous())  # torch takes ten times as long for a view

    def accepted(self) -> None:
        if not self.waits:
            self.rows.fed.copy_(self.rows.lengths - self.rows.round_accepted - 1)

    def select(self, index: Tensor) -> None:
        super().select(index)
        self.states, self.own = self.states[index], self.own[index]

    def _kept(self, output: Forward) -> Forward:
        assert output.own is not None
        self.own = output.own
        return output


def at(output: Forward, place: Tensor) -> Forward:
    """The output at one place of each row. place: (batch,) → (batch, 1, …) each."""
    row = torch.arange(len(place), device=place.device)
    return Forward(*(tensor[row, place][:, None] for tensor in output if tensor is not None))
