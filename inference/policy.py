"""The one interface that every stopping policy has, and the small ones that it may have besides.

All tensors have a leading batch dimension; rows are sequences. To decide whether to draft *one more* token a policy may
look at all that was drawn so far. What is drawn is submitted for verification, which keeps decoding lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from accept_head.alternatives import Alternatives


class Signal(Enum):
    """What a policy reads of a draft step or of a verified round. The host computes what is asked for, nothing else."""

    FED_HIDDEN = auto()  # the draft's last hidden state at the token before Y. Y was drawn from it, so it is free
    DRAWN_HIDDEN = auto()  # the same at Y itself: known only after one more draft forward
    LOGPROB = auto()  # log q(Y)
    ENTROPY = auto()  # of q, nats
    MAX_PROB = auto()  # max q
    DIVERGENCE = auto()  # KL(p ‖ q), nats, of plain softmaxes at the sampling temperature, at verified positions
    ACCEPTANCE = auto()  # a(Y) = min(1, p(Y)/q(Y)) of verified tokens; None from hosts that do not compute it
    ALTERNATIVES = auto()  # further draws Y' ∼ q at verified positions, with a(Y'); None from the same hosts
    SECONDS = auto()  # that the round took


# How a candidate Y is verified. `ratio`: accepted with probability min(1, p(Y)/q(Y)). `match`: accepted if a token
# drawn from p is the same. In greedy decoding both are one test, and every policy is lossless.
Verifier = Literal["ratio", "match"]
BOTH: frozenset[Verifier] = frozenset({"ratio", "match"})
OF_Q_IN_ORDER = (Signal.LOGPROB, Signal.ENTROPY, Signal.MAX_PROB)  # read from the draft's distribution; as SIGNALS
OF_Q = frozenset(OF_Q_IN_ORDER)


@dataclass(frozen=True)
class DraftStep:
    """The state after drawing Y_depth. Fields that the policy did not ask for are None. The tensors belong to the host,
    which writes over them: drawn_hidden at the next forward, all others in the next round. Copy what you keep.

    depth: 1 for the first token of the round. token_ids: (batch,) Y_depth; None before it is drawn. active: (batch,)
    bool, rows still drafting; what the others hold is arbitrary. fed_hidden, drawn_hidden: (batch, hidden); at the last
    token that the round can have drawn_hidden is None, as nothing depends on it. logprob, entropy, max_prob: (batch,),
    of the distribution that Y_depth is drawn from; in greedy decoding, of the draft's plain softmax. signals:
    (batch, 3), these three in the order of signals.SIGNALS, if the host has them in one tensor. scored: (batch,), or
    (batch, 2) for a head that looks ahead, the policy's own score of Y, if the host computes it with the signals.
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
    """What verification said. drafted, submitted, accepted: (batch,) tokens of this round; submitted is what was
    verified. live: (batch,) bool, rows that took part. lengths: (batch,) tokens of each row now, its prompt included.

    divergence, acceptance: (batch, most submitted). Of row r the first min(submitted, accepted + 1) are known: what was
    drafted after a rejection follows another text. acceptance: a(Y), whose draw the outcome is; None when the test only
    knows accepted or rejected (greedy, `match`, other hosts). alternatives: at the same positions, (batch, most
    submitted, DRAWS); None where acceptance is. seconds: of the whole round. None if not asked for. The tensors belong
    to the host until the next round is verified.
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

    @property
    def judged(self) -> Tensor:
        """(batch,) drafted tokens of which verification tells whether they were accepted."""
        return torch.minimum(self.submitted, self.accepted + 1)

    def labels(self, depths: int) -> Tensor:
        """(batch, depths) what a predictor of acceptance should have said of each token: a(Y), or else 1 for accepted
        and 0 for rejected, which is a(Y) on average. Only the first `judged` of a row mean anything."""
        labels = (torch.arange(depths, device=self.accepted.device) < self.accepted[:, None]).float()
        if self.acceptance is not None:
            known = min(depths, self.acceptance.shape[1])
            labels[:, :known] = self.acceptance[:, :known]
        return labels


class DraftPolicy(Protocol):
    """Decides, per row, how many tokens to draft. This is all that a policy needs."""

    needs: frozenset[Signal]
    max_draft_tokens: int

    def start_round(self, live: Tensor) -> Tensor:
        """(batch,) int: most tokens each row may draft now; 0 = do not speculate. live: (batch,) bool."""
        ...

    def keep_drafting(self, step: DraftStep) -> Tensor:
        """(batch,) bool, after each drawn token: may the row draft another?"""
        ...

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from a verified round."""
        ...


# --- what a policy may have besides: looked for once, when it is handed in -------------------------------------------


class FollowsRows(Protocol):
    """Has state for each row."""

    def start(self, batch: int, device: torch.device) -> None:
        """A batch of this many rows begins; nothing is known of any."""
        ...

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        """These rows, (n,) int, hold new sequences from now on, prompts of (n,) tokens: forget the old ones."""
        ...

    def select(self, rows: Tensor) -> None:
        """From now on row i is what row rows[i], (m,) int, was; the batch may shrink."""
        ...


class Peeks(Protocol):
    """Stops before a token is drawn, by what its distribution says."""

    def draw_next(self, step: DraftStep) -> Tensor:
        """(batch,) bool. step: ENTROPY, MAX_PROB and FED_HIDDEN of Y_depth, whose token_ids are not known yet. To stop
        here costs a draft forward for nothing."""
        ...


class Trims(Protocol):
    """Drops drawn tokens. lossless: the verifiers under which sampled output is still distributed as the target's. It
    is so under `ratio` only if what is dropped depends neither on the token drawn there nor on any drawn later in its
    request."""

    lossless: frozenset[Verifier]

    def trim(self, drafted: Tensor) -> Tensor:
        """(batch,) int: how many of each row's (batch,) drafted tokens to verify, once all rows have stopped."""
        ...


class Predicts(Protocol):
    """Says how likely acceptance is. predicted: P̂(Y_i accepted | those before it were) of this round's tokens judged so
    far, (batch,) each. predicted_next: beside them β̂ of the token after each; empty without a look ahead."""

    predicted: list[Tensor]
    predicted_next: list[Tensor]


class ByTenant(Protocol):
    """Tells rows apart by whose they are, where by_tenant is True."""

    @property
    def by_tenant(self) -> bool: ...

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        """Whose these rows, (n,) int, are, said after `admit`. Rows that nobody names are one tenant's, together."""
        ...


class InChunks(Protocol):
    """May be asked about further tokens after all rows have stopped, where in_chunks is True: nothing that later rounds
    or `trim` go by depends on that. The host then need not wait after each token to hear whether any row goes on."""

    @property
    def in_chunks(self) -> bool: ...


Method = TypeVar("Method", bound=Callable[..., Tensor])


def constant_budget(start_round: Method) -> Method:
    """Says of a `start_round` that it always answers `max_draft_tokens`: the host then knows how far a round can go
    without waiting for the answer."""
    start_round.constant = True  # type: ignore[attr-defined]
    return start_round


class RowPolicy:
    """A policy's defaults: nothing needed, nothing learnt, drafts `max_draft_tokens`."""

    needs: frozenset[Signal] = frozenset()
    max_draft_tokens: int

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        return torch.full_like(live, self.max_draft_tokens, dtype=torch.long)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        return step.active

    def observe(self, outcome: VerifyOutcome) -> None:
        pass
