"""The one interface that every stopping policy has.

All tensors have a leading batch dimension; rows are sequences. To decide whether to draft *one more* token a policy may
look at anything that was drawn so far: what is drawn is submitted for verification (keep, then stop), which keeps
decoding lossless. A policy that `trims` drops drawn tokens, and then says under which verifiers it is still lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from accept_head.alternatives import Alternatives
from accept_head.errors import InputError
from accept_head.inference.kernels.signals import PlainSoftmax, signals_of
from accept_head.pair import Forward


class Signal(Enum):
    """What a policy reads of a draft step or of a verified round. The host computes what is asked for, nothing else."""

    FED_HIDDEN = auto()  # the draft's last hidden state at the token before Y: what Y was drawn from, so it is free
    DRAWN_HIDDEN = auto()  # the same at Y itself: known only after one more draft forward
    LOGPROB = auto()  # log q(Y)
    ENTROPY = auto()  # of q, nats
    MAX_PROB = auto()  # max q
    DIVERGENCE = auto()  # KL(p ‖ q), nats, of plain softmaxes at the sampling temperature, at verified positions
    ACCEPTANCE = auto()  # a(Y) = min(1, p(Y)/q(Y)) of verified tokens, from a host that tests it; else nothing is said
    ALTERNATIVES = auto()  # further draws Y' ∼ q of verified positions, with a(Y'); from the same hosts
    SECONDS = auto()  # that the round took


# How a candidate Y is verified: `ratio`, accepted with probability min(1, p(Y)/q(Y)); `match`, accepted if a token
# drawn from p is the same. Greedy decoding makes them one, and every policy lossless.
Verifier = Literal["ratio", "match"]
BOTH: frozenset[Verifier] = frozenset({"ratio", "match"})
OF_Q_IN_ORDER = (Signal.LOGPROB, Signal.ENTROPY, Signal.MAX_PROB)  # read from the draft's distribution; as SIGNALS
OF_Q = frozenset(OF_Q_IN_ORDER)


@dataclass(frozen=True)
class DraftStep:
    """The state after drawing Y_depth. Fields that the policy did not ask for are None. Its tensors are the host's: the
    next round writes over them, and the next forward over drawn_hidden. What is kept longer is copied.

    depth: 1 for the first token of the round. token_ids: (batch,) Y_depth; None before it is drawn. active: (batch,)
    bool, rows still drafting; what the others hold is arbitrary. fed_hidden, drawn_hidden: (batch, hidden);
    signals: (batch, 3), those three together in the order of signals.SIGNALS, from a host that has them so.
    scored: (batch,), or (batch, 2) of a head that looks ahead, what the policy's own score of Y is, from a host that
    works it out together with the signals.
    drawn_hidden is None at the last token that the round can have, where nothing depends on it. logprob, entropy,
    max_prob: (batch,), of the distribution Y_depth is drawn from; when decoding is greedy, of the draft's plain
    softmax.
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

    @classmethod
    def of(
        cls,
        needs: frozenset[Signal],
        depth: int,
        token_ids: Tensor | None,
        active: Tensor,
        q: Tensor | PlainSoftmax,
        fed: Forward,
        ahead: Forward | None,
    ) -> DraftStep:
        """What `needs` asks for, and no more. q: (batch, vocab), looked at only if a signal of it is needed. fed,
        ahead: the draft forwards on the token before Y and on Y itself, (batch, 1, …)."""
        logprob, entropy, max_prob, signals = _of_q(needs & OF_Q, q, token_ids)
        return cls(
            depth=depth,
            token_ids=token_ids,
            active=active,
            fed_hidden=fed.hidden[:, 0] if Signal.FED_HIDDEN in needs else None,
            drawn_hidden=ahead.hidden[:, 0] if Signal.DRAWN_HIDDEN in needs and ahead is not None else None,
            logprob=logprob,
            entropy=entropy,
            max_prob=max_prob,
            signals=signals,
        )


def _of_q(needs: frozenset[Signal], q: Tensor | PlainSoftmax, ids: Tensor | None) -> tuple[Tensor | None, ...]:
    """LOGPROB, ENTROPY, MAX_PROB, those that are needed, and all together where they come so."""
    if not needs:
        return None, None, None, None
    logprob, entropy, max_prob = (signal in needs for signal in OF_Q_IN_ORDER)
    return signals_of(q, ids, logprob=logprob, entropy=entropy, max_prob=max_prob)


@dataclass(frozen=True)
class VerifyOutcome:
    """What verification said. drafted, accepted: (batch,) tokens of this round; live: (batch,) bool, rows that took
    part; lengths: (batch,) tokens of each row now, its prompt included. submitted: (batch,) drafted tokens that were
    verified; all of them where nothing is said.

    divergence, acceptance: (batch, most drafted), of which the first min(submitted, accepted + 1) of a row count: what
    was drafted after a rejection follows a prefix that is not the text's. acceptance: a(Y), of which the outcome is a
    draw; None, too, where the test knows no more than the outcome (greedy, `match`, other hosts). alternatives: of the
    same positions, (batch, most drafted, DRAWS), and None where acceptance is. seconds: of the whole round. None if not
    asked for. Its tensors, too, are the host's, until the next round is verified.
    """

    drafted: Tensor
    accepted: Tensor
    live: Tensor
    lengths: Tensor
    divergence: Tensor | None = None
    seconds: float | None = None
    acceptance: Tensor | None = None
    alternatives: Alternatives | None = None
    submitted: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.submitted is None:
            object.__setattr__(self, "submitted", self.drafted)

    @property
    def judged(self) -> Tensor:
        """(batch,) drafted tokens of which verification tells whether they were accepted."""
        return torch.minimum(self.submitted, self.accepted + 1)

    def labels(self, depths: int) -> Tensor:
        """(batch, depths) what a predictor of each drafted token's acceptance should have said, as far as `judged`
        goes: a(Y), or 0 or 1, what came of it, which is a(Y) on average."""
        labels = (torch.arange(depths, device=self.accepted.device) < self.accepted[:, None]).float()
        if self.acceptance is not None:
            known = min(depths, self.acceptance.shape[1])
            labels[:, :known] = self.acceptance[:, :known]
        return labels


class DraftPolicy(Protocol):
    """Decides, per row, whether to draft one more token."""

    needs: frozenset[Signal]
    # `prefix`: scores depend on the prefix alone, so drawn tokens may even be dropped without bias; `proposal`: they
    # depend on the drawn token, which must then be kept.
    scores: Literal["prefix", "proposal"]
    max_draft_tokens: int
    # False: each row drafts exactly its budget, and the host need not ask after each token whether all have stopped.
    stops_early: bool
    # True: the host also asks `draw_next` before each token is drawn.
    peeks: bool
    # True: the host also asks `trim` when all rows have stopped drafting.
    trims: bool
    # The verifiers under which sampled output is distributed as the target's own. Trimming is unbiased under `ratio`
    # only if what is dropped depends neither on the token drawn there nor on anything drawn later in its request.
    lossless: frozenset[Verifier]
    # P̂(Y_i accepted | those before it were) of this round's tokens judged so far, (batch,) each, in order of depth;
    # empty for rules that do not predict acceptance.
    predicted: list[Tensor]
    # Beside them, β̂ of the token to be drawn after each; empty for policies that do not look ahead.
    predicted_next: list[Tensor]

    @property
    def by_tenant(self) -> bool:
        """Whether it goes by whose a row is, and is told with `set_tenants`."""
        ...

    @property
    def in_chunks(self) -> bool:
        """Whether it may be asked about tokens after all rows have stopped, which no row has: then nothing that it goes
        by in later rounds, or in `trim`, depends on that. The host then need not ask after each token whether any row
        goes on."""
        ...

    @property
    def carries(self) -> tuple[str, ...] | None:
        """The attributes that `start_round` makes anew and that `draw_next` and `keep_drafting` change, if these three
        are functions of tensors alone: they wait for nothing, and whatever else they read stays as it is, and where it
        is, from `start` on, but for what is in `inputs` and `learnt`. They can then be captured in CUDA graphs. None:
        they are not. Attributes of what it holds are named `held.name`."""
        ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """The attributes that these three only read, and that `observe`, `admit` and `select` may bind to other tensors
        between rounds; named as in `carries`. Of use where that is not None."""
        ...

    @property
    def keeps(self) -> tuple[str, ...]:
        """The attributes that these three do not read at all, and others bind to other objects, named alike."""
        ...

    @property
    def learnt(self) -> tuple[Tensor, ...] | None:
        """The tensors that `observe` changes in place, if it, too, is such a function, of what verification said and
        of what is carried. None: it is called as it is, and told the seconds."""
        ...

    def forget(self) -> None:
        """Be as if new, where what was captured of it expects it. Asked of policies whose steps can be captured."""
        ...

    def start(self, batch: int, device: torch.device) -> None:
        """A batch of this many rows begins; nothing is known of any."""
        ...

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        """These rows, (n,) int, hold new sequences from now on, prompts of (n,) tokens: forget the old ones."""
        ...

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        """Whose these rows, (n,) int, are, said after `admit`. Rows that nobody names are one tenant's, together."""
        ...

    def select(self, rows: Tensor) -> None:
        """From now on row i is what row rows[i], (m,) int, was; the batch may shrink."""
        ...

    def start_round(self, live: Tensor) -> Tensor:
        """(batch,) int: most tokens each row may draft now; 0 = do not speculate. live: (batch,) bool."""
        ...

    def draw_next(self, step: DraftStep) -> Tensor:
        """(batch,) bool, before Y_depth is drawn, if the policy peeks. `step` has what its distribution says, ENTROPY,
        MAX_PROB and FED_HIDDEN; its token_ids are not known yet. To stop here costs a draft forward for nothing."""
        ...

    def keep_drafting(self, step: DraftStep) -> Tensor:
        """(batch,) bool, after each drawn token, if the policy can stop early."""
        ...

    def trim(self, drafted: Tensor) -> Tensor:
        """(batch,) int: how many of each row's (batch,) drafted tokens to verify, if the policy trims; the rest of them
        is dropped."""
        ...

    def observe(self, outcome: VerifyOutcome) -> None:
        """Learn from a verified round."""
        ...


Method = TypeVar("Method", bound=Callable[..., Tensor])


def constant_budget(start_round: Method) -> Method:
    """Says of a `start_round` that it always answers `max_draft_tokens`: the host then knows without asking how far a
    round can go. One that overrides it says so itself, or is asked."""
    start_round.constant = True  # type: ignore[attr-defined]
    return start_round


class RowPolicy:
    """A policy's defaults: nothing needed, no state that outlives a round, drafts up to `max_draft_tokens`."""

    needs: frozenset[Signal] = frozenset()
    scores: Literal["prefix", "proposal"] = "prefix"
    stops_early = True
    peeks = False
    trims = False
    in_chunks = False
    carries: tuple[str, ...] | None = None
    inputs: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    learnt: tuple[Tensor, ...] | None = None
    lossless: frozenset[Verifier] = BOTH
    predicted: list[Tensor] = []  # noqa: RUF012 - never filled: a rule that predicts begins each round with its own
    predicted_next: list[Tensor] = []  # noqa: RUF012 - nor this
    by_tenant = False
    max_draft_tokens: int

    def start(self, batch: int, device: torch.device) -> None:
        pass

    def forget(self) -> None:
        pass

    def admit(self, rows: Tensor, lengths: Tensor) -> None:
        pass

    def set_tenants(self, rows: Tensor, keys: Sequence[str]) -> None:
        pass

    def select(self, rows: Tensor) -> None:
        pass

    @constant_budget
    def start_round(self, live: Tensor) -> Tensor:
        return torch.full_like(live, self.max_draft_tokens, dtype=torch.long)

    def draw_next(self, step: DraftStep) -> Tensor:
        return step.active

    def keep_drafting(self, step: DraftStep) -> Tensor:
        return step.active

    def trim(self, drafted: Tensor) -> Tensor:
        return drafted

    def observe(self, outcome: VerifyOutcome) -> None:
        pass


def checked(policy: DraftPolicy, method: str, answer: object, batch: int) -> Tensor:
    """`answer` itself, if it is a tensor as the interface asks for. Raises InputError naming policy and method."""
    dtype, kind = (torch.long, "int64") if method in ("start_round", "trim") else (torch.bool, "bool")
    if isinstance(answer, Tensor) and answer.shape == (batch,) and answer.dtype == dtype:
        return answer
    got = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
    raise InputError(f"policy {type(policy).__name__}: {method} returned {got}, expected a {kind} tensor ({batch},)")


def check_lossless(policy: DraftPolicy, verifier: Verifier, *, greedy: bool, allow_lossy: bool = False) -> None:
    """Raises InputError when the verifier is unknown, or when output sampled with it would not be the target's."""
    if verifier not in BOTH:
        raise InputError(f"verifier is {verifier!r}, expected one of {sorted(BOTH)}")
    if not (greedy or allow_lossy or verifier in policy.lossless):
        others = " or ".join(f"verifier={name!r}" for name in sorted(policy.lossless)) or "greedy decoding"
        raise InputError(
            f"policy {type(policy).__name__} drops drawn tokens by what was drawn: sampled output would not be the "
            f"target's under the {verifier} test; use {others}, or allow_lossy if that is wanted"
        )
