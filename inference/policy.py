"""The interface that every stopping policy implements, and the small optional ones.

All tensors have a leading batch dimension; rows are sequences. A policy may use everything drawn so far to decide
whether to draft *one more* token. Every drawn token is submitted for verification, which keeps decoding lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from accept_head.alternatives import Alternatives


class Signal(Enum):
    """What a policy reads from a draft step or from a verified round. The host computes only the signals in `needs`."""

    FED_HIDDEN = auto()  # the draft's last hidden state at the token before Y; free, as Y was drawn from it
    DRAWN_HIDDEN = auto()  # the same at Y itself; costs one more draft forward
    LOGPROB = auto()  # log q(Y)
    ENTROPY = auto()  # entropy of q, nats
    MAX_PROB = auto()  # max q
    DIVERGENCE = auto()  # KL(p ‖ q) at verified positions, nats; plain softmaxes at the sampling temperature
    ACCEPTANCE = auto()  # a(Y) = min(1, p(Y)/q(Y)) of verified tokens; None if the host does not compute it
    ALTERNATIVES = auto()  # further draws Y' ∼ q at verified positions, with a(Y'); None if acceptance is None
    SECONDS = auto()  # duration of the round, and of drafting


# How a candidate Y is verified. `ratio`: accepted with probability min(1, p(Y)/q(Y)). `match`: accepted if it equals a
# token drawn from p. In greedy decoding both are the same test, and every policy is lossless.
Verifier = Literal["ratio", "match"]
BOTH: frozenset[Verifier] = frozenset({"ratio", "match"})
OF_Q_IN_ORDER = (Signal.LOGPROB, Signal.ENTROPY, Signal.MAX_PROB)  # signals read from q, in the order of SIGNALS
OF_Q = frozenset(OF_Q_IN_ORDER)


@dataclass(frozen=True)
class DraftStep:
    """The state after drawing Y_depth. Fields whose signal is not in `needs` are None. The host owns the tensors and
    overwrites them: drawn_hidden at the next forward, all others in the next round. Copy what you keep.

    depth: 1 for the first token of the round. token_ids: (batch,) Y_depth; None before it is drawn. active: (batch,)
    bool, rows still drafting; values of other rows are arbitrary. fed_hidden, drawn_hidden: (batch, hidden). At the
    last possible token of the round drawn_hidden is None, as nothing depends on it. logprob, entropy, max_prob:
    (batch,), of the distribution that Y_depth is drawn from; in greedy decoding, of the draft's plain softmax. signals:
    (batch, 3), these three in the order of signals.SIGNALS; None if the host does not keep them in one tensor. scored:
    the policy's own score of Y, if the host computes it with the signals: (batch,), or (batch, 2) for a head that looks
    ahead.
    """

    depth: int
    token_ids: Tensor | None
    active: Tensor
    fed_hidden: Tensor | None = None
    drawn_hidden: Tensor | None = None
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    max_prob: Tensor | None = None
    scored: Tensor | None = None
    signals: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyOutcome:
    """The result of verifying a round. drafted, submitted, accepted: (batch,) token counts of this round; submitted
    counts the verified tokens. live: (batch,) bool, rows that took part. lengths: (batch,) tokens of each row now, with
    its prompt.

    divergence, acceptance: (batch, most submitted). Only the first min(submitted, accepted + 1) of a row are known:
    tokens drafted after a rejection follow a text that was dropped. acceptance: a(Y), the probability with which Y was
    accepted; None when the test only knows accepted or rejected (greedy, `match`, other hosts). alternatives: at the
    same positions, (batch, most submitted, DRAWS); None where acceptance is None. seconds, draft_seconds: duration of
    the whole round, and of its drafting. draft_forwards: (), that drafting took. Fields whose signal is not in `needs`
    are None. The host overwrites the tensors when it verifies the next round.
    """

    drafted: Tensor
    submitted: Tensor
    accepted: Tensor
    live: Tensor
    lengths: Tensor
    divergence: Tensor | None = None
    acceptance: Tensor | None = None
    alternatives: Alternatives | None = None
    seconds: float | None = None
    draft_seconds: float | None = None
    draft_forwards: Tensor | int | None = None

    @classmethod
    def of_host(cls, counts: np.ndarray, device: torch.device, **more: Any) -> VerifyOutcome:
        """The outcome of a round whose counts the host knows. counts: as `on_host`. more: the other fields."""
        live, lengths, drafted, submitted, accepted = torch.from_numpy(counts).to(device).unbind()
        found = cls(drafted=drafted, submitted=submitted, accepted=accepted, live=live.bool(), lengths=lengths, **more)
        found.__dict__["on_host"] = counts  # where cached_property keeps it
        return found

    @cached_property
    def on_host(self) -> np.ndarray:
        """(5, batch) int64: live, lengths, drafted, submitted and accepted. The first to ask waits for the device."""
        numbers = self.live, self.lengths, self.drafted, self.submitted, self.accepted
        return torch.stack([each.long() for each in numbers]).cpu().numpy()

    @property
    def judged(self) -> Tensor:
        """(batch,) number of drafted tokens that verification accepted or rejected."""
        return torch.minimum(self.submitted, self.accepted + 1)

    def labels(self, depths: int) -> Tensor:
        """(batch, depths) labels for a predictor of acceptance: a(Y) where known, else 1 for accepted and 0 for
        rejected, which is a(Y) on average. Only the first `judged` of a row mean anything."""
        labels = (torch.arange(depths, device=self.accepted.device) < self.accepted[:, None]).float()
        if self.acceptance is not None:
            known = min(depths, self.acceptance.shape[1])
            labels[:, :known] = self.acceptance[:, :known]
        return labels


class DraftPolicy(Protocol):
    """Decides, per row, how many tokens to draft. A policy needs nothing else."""

    needs: frozenset[Signal]
    max_draft_tokens: int

    def start_round(self, live: Tensor) -> Tensor:
        """(batch,) int: the most tokens each row may draft now; 0 = do not speculate. live: (batch,) bool."""
        ...

    def keep_drafting(self, step: DraftStep) -> Tensor:
        """(batch,) bool: whether the row may draft another token. Called after each drawn token."""
        ...

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from a verified round."""
        ...


# --- optional protocols: a policy is checked for them once, when it is handed in -------------------------------------


class FollowsRows(Protocol):
    """Keeps state for each row."""

    def start(self, batch: int, device: torch.device) -> None:
        """A batch of this many rows begins; nothing is known of any."""
        ...

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        """These rows, (n,) int, hold new sequences from now on: forget the old ones. lengths: (n,) prompt tokens."""
        ...

    def select(self, rows: Tensor) -> None:
        """From now on row i is what row rows[i] was. rows: (m,) int; the batch may shrink."""
        ...


class Peeks(Protocol):
    """Stops before a token is drawn, based on its distribution."""

    def draw_next(self, step: DraftStep) -> Tensor:
        """(batch,) bool: whether to draw Y_depth. step: has ENTROPY, MAX_PROB and FED_HIDDEN, but no token_ids yet. A
        row that stops here has wasted a draft forward."""
        ...


class Trims(Protocol):
    """Drops drawn tokens. lossless: the verifiers under which sampled output is still distributed as the target's.
    `ratio` is one of them only if dropping a token depends neither on that token nor on any drawn later in its
    request."""

    lossless: frozenset[Verifier]

    def trim(self, drafted: Tensor) -> Tensor:
        """(batch,) int: how many tokens of each row to verify, once all rows have stopped. drafted: (batch,) counts."""
        ...


class Predicts(Protocol):
    """Predicts acceptance, if predicts is True. predicted: P̂(Y_i accepted | those before it were) of this round's
    tokens judged so far, (batch,) each. predicted_next: β̂ of the token after each of them; empty for a policy that does
    not look ahead."""

    predicts: bool
    predicted: list[Tensor]
    predicted_next: list[Tensor]


class Plans(Protocol):
    """Does a part of its work on the host before a round, so that `start_round` need not wait for the device."""

    def plan(self, live: Sequence[bool]) -> None:
        """A round with these rows begins. Called before `start_round`, outside of captured steps."""
        ...


class Rests(Protocol):
    """Drafts nothing now and then, for many rounds. If may_rest is True, a host need not ask it in each of them, nor
    tell it those in which it was not asked: asking takes time that a round without drafts does not win back."""

    may_rest: bool


class ByTenant(Protocol):
    """Distinguishes the tenants that rows belong to, if by_tenant is True."""

    @property
    def by_tenant(self) -> bool: ...

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        """Name the tenants of these rows, (n,) int; called after `admit`. Unnamed rows together count as one tenant."""
        ...


Method = TypeVar("Method", bound=Callable[..., Tensor])


def constant_budget(start_round: Method) -> Method:
    """Declares that a `start_round` always returns `max_draft_tokens`. The host then knows the longest possible draft
    without waiting for the result."""
    start_round.constant = True  # type: ignore[attr-defined]
    return start_round


class RowPolicy:
    """Defaults of a policy: it needs no signal, learns nothing and drafts `max_draft_tokens`."""

    needs: frozenset[Signal] = frozenset()
    max_draft_tokens: int

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        return torch.full_like(live, self.max_draft_tokens, dtype=torch.long)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        return step.active

    def observe(self, outcome: VerifyOutcome) -> None:
        pass
