"""Rounds of a policy with no model around: what is drawn is given, and `Drafting` asks, as every host does.

`compare` plays many rounds of a batch whose rows come, go and change places, and holds the policy to a scalar
reference that is written from its formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import pytest
import torch

from accept_head.inference.decode.captured import read_by_steps
from accept_head.inference.engine.capture import capture_of
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policy import DraftStep, RowPolicy, Signal, VerifyOutcome

CPU = torch.device("cpu")
KNOWN_LATE = ("logprob", "drawn_hidden")  # of a token that is not drawn yet


def begin(policy, lengths, device=CPU):
    """A batch of rows with texts of so many tokens."""
    drafting = Drafting(policy)
    drafting.start(len(lengths), device)
    drafting.admit(torch.arange(len(lengths), device=device), torch.as_tensor(lengths, device=device))
    return policy


def one_round(policy, live, shown=None, room=99):
    """→ (rows,) tokens drafted, and how many of them are submitted. shown: what each row draws, (rows, depths), by its
    name in DraftStep; as "states" the draft's hidden states at the last token and at each drawn one, (rows, depths + 1,
    hidden). The policy is shown what it needs, no more. room: most tokens that each row may draft."""
    drafting, live = Drafting(policy), torch.as_tensor(live)
    tables = {name: torch.as_tensor(values, dtype=torch.float32) for name, values in (shown or {}).items()}
    room = torch.as_tensor(room).expand(len(live))
    if tables:
        room = room.clamp(max=min(table.shape[1] - (name == "states") for name, table in tables.items()))
    drafting.prepare(live.tolist(), drafted=True)
    going = drafting.begin(live, room)
    most = int(going.budget.max())
    for depth in range(1, most + 1):
        if drafting.peeks:
            going = drafting.peek(step_of(drafting, depth, going, tables, most, peek=True), going)
        going = drafting.drew(going)
        if drafting.asks:
            going = drafting.judge(step_of(drafting, depth, going, tables, most), going)
        if not going.active.any():
            break
    return going.lengths, drafting.trim(going.lengths) if drafting.trims and most else going.lengths


def step_of(drafting, depth, going, tables, most, peek=False):
    values = {name: table[:, depth - 1] for name, table in tables.items() if name != "states"}
    if "states" in tables:
        values["fed_hidden"] = tables["states"][:, depth - 1]
        values["drawn_hidden"] = tables["states"][:, depth] if depth < most else None
    wanted = {signal.name.lower() for signal in drafting.needs} - set(KNOWN_LATE if peek else ())
    ids = None if peek else torch.zeros(len(going.active), dtype=torch.long)
    return DraftStep(depth, ids, going.active, **{name: values[name] for name in wanted & values.keys()})


def outcome(drafted, accepted, live=None, *, submitted=None, lengths=None, **read):
    """Of lists, arrays or tensors. Rows are live, and verified as they were drafted, where nothing else is said."""
    drafted, accepted = (torch.as_tensor(values).long() for values in (drafted, accepted))
    return VerifyOutcome(
        drafted=drafted,
        submitted=drafted if submitted is None else torch.as_tensor(submitted).long(),
        accepted=accepted,
        live=torch.ones_like(drafted, dtype=torch.bool) if live is None else torch.as_tensor(live),
        lengths=torch.zeros_like(drafted) if lengths is None else torch.as_tensor(lengths).long(),
        **read,
    )


# --- a policy whose predictions are given ---------------------------------------------------------------------------


class Told(RowPolicy):
    """Predicts what it is told, by way of max q; a row stops when the product is below the threshold. What it says of
    the next token, if it looks ahead, is told by way of the entropy."""

    needs, predicts = frozenset({Signal.MAX_PROB}), True

    def __init__(self, k_max=8, threshold=0.0):
        self.max_draft_tokens, self.threshold = k_max, threshold

    def start_round(self, live):
        self.predicted, self.predicted_next, self.product = [], [], torch.ones(live.shape)
        return super().start_round(live)

    def keep_drafting(self, step):
        self.predicted.append(step.max_prob)
        if step.entropy is not None:
            self.predicted_next.append(step.entropy)
        self.product = self.product * step.max_prob
        return step.active & (self.product >= self.threshold)


class Foretelling(Told):
    needs = frozenset({Signal.MAX_PROB, Signal.ENTROPY})


def shown(told, ahead=None):
    """What Told reads, of signals of what is drawn, (rows, depths)."""
    return {"max_prob": told, "entropy": np.ones(np.shape(told)) if ahead is None else ahead}


# --- many rounds, against a reference --------------------------------------------------------------------------------


@dataclass
class Given:
    """A round. shown, room: as in one_round. wins: (rows, depths) bool, what would be accepted. divergence: (rows,
    depths). tokens_per_second: of its live rows. cut: (rows,) the most tokens that the host submits. known: (rows,)
    bool, whether the outcome is ever known; None: of all."""

    live: np.ndarray
    wins: np.ndarray
    shown: dict[str, np.ndarray] = field(default_factory=dict)
    room: np.ndarray | int = 99
    divergence: np.ndarray | None = None
    tokens_per_second: float = 1.0
    cut: np.ndarray | int = 99
    known: np.ndarray | None = None

    def of(self, row):
        """(what this row is shown, its room)."""
        room = np.broadcast_to(self.room, self.live.shape)
        return {name: values[row].tolist() for name, values in self.shown.items()}, int(room[row])


class Reference:
    """What a policy of the batch should do, in scalars. Rows go by their places."""

    def start(self):
        """A batch begins."""

    def admit(self, row, length):
        """A request begins."""

    def select(self, order):
        """Rows change places."""

    def drafts(self, live, given, lengths):
        """live: places of rows, lengths: tokens of theirs → for each how many it drafts, or (drafts, submits)."""
        raise NotImplementedError

    def as_good(self, row, said, expected):
        return said == expected

    def verified(self, rounds):
        """rounds: of each live row, Verified."""

    def state(self):
        """Attributes of the policy, and what they should be."""
        return {}


@dataclass
class Verified:
    row: int
    drafted: int
    submitted: int
    accepted: int
    divergence: list[float] = field(default_factory=list)  # of tokens that were judged
    seconds: float | None = None


class Rowwise(Reference):
    """Of rows that do not look at each other. make: builds the reference of one, with `drafts(shown, room)` and
    `verified(round)`; names: what the policy calls an attribute of theirs."""

    def __init__(self, make, **names):
        self.make, self.names = make, names

    def start(self):
        self.rows = []

    def admit(self, row, length):
        self.rows[row : row + 1] = [self.make()]

    def select(self, order):
        self.rows = [self.rows[row] for row in order]

    def drafts(self, live, given, lengths):
        return [self.rows[row].drafts(*given.of(row)) for row in live]

    def as_good(self, row, said, expected):
        as_good = getattr(self.rows[row], "as_good", None)
        return said == expected or (as_good is not None and as_good(said, expected))

    def verified(self, rounds):
        for each in rounds:
            self.rows[each.row].verified(each)

    def state(self):
        return {name: [getattr(row, own) for row in self.rows] for name, own in self.names.items()}


@dataclass
class Played:
    """Tokens, (rounds, rows) each; none of idle rows."""

    drafted: np.ndarray
    submitted: np.ndarray


def compare(policy, reference, given, rounds, lengths, *, moves=0, seed=0):
    """Rows of so many tokens go through so many rounds, given(number, random) each. moves: rounds after which a row
    leaves, the others change places, and a new request begins. What idle rows hold is no number, and neither is what
    was not judged."""
    random, lengths, played = np.random.default_rng(seed), np.array(lengths), []
    begin(policy, lengths)
    reference.start()
    for row, length in enumerate(lengths.tolist()):
        reference.admit(row, length)
    fixed = Fixed(policy)
    for number in range(rounds):
        this = given(number, random)
        live = np.where(this.live)[0].tolist()
        expected = reference.drafts(live, this, lengths[live].tolist())
        shown = {name: np.where(idle(this.live, values), np.nan, values) for name, values in this.shown.items()}
        drafted, submitted = (part.numpy() for part in one_round(policy, this.live, shown, this.room))
        submitted = np.minimum(submitted, this.cut)
        for row, wanted in zip(live, expected, strict=True):
            said = (int(drafted[row]), int(submitted[row])) if isinstance(wanted, tuple) else int(drafted[row])
            assert reference.as_good(row, said, wanted), (number, row, said, wanted)
        assert not drafted[~this.live].any()
        accepted = np.minimum(this.wins.cumprod(1).sum(1), submitted)
        verdicts = this.live if this.known is None else this.live & this.known
        lengths = lengths + verdicts * (accepted + 1)
        verdict = {"submitted": submitted, "lengths": lengths}
        judged, divergence = np.minimum(submitted, accepted + 1) * verdicts, [[]] * len(lengths)
        if Signal.DIVERGENCE in policy.needs:
            values = this.divergence[:, : max(1, submitted.max())]
            known = np.where(np.arange(values.shape[1]) < judged[:, None], values, np.nan)
            verdict["divergence"] = torch.tensor(known, dtype=torch.float32)
            divergence = [own[:n].tolist() for own, n in zip(values, judged, strict=True)]
        if Signal.SECONDS in policy.needs:
            verdict["seconds"] = float((accepted + 1)[verdicts].sum() / this.tokens_per_second)
        policy.observe(outcome(drafted, accepted, verdicts, **verdict))
        counts = np.stack([drafted, submitted, accepted], -1).tolist()
        reference.verified(
            [Verified(row, *counts[row], divergence[row], verdict.get("seconds")) for row in live if verdicts[row]]
        )
        for name, value in reference.state().items():
            found = torch.as_tensor(attrgetter(name)(policy)).numpy()
            assert found == pytest.approx(np.array(value), rel=1e-4), (number, name)
        played.append((drafted, submitted))
        if moves and number % moves == moves - 1:
            last, order = len(lengths) - 1, random.permutation(len(lengths))
            for rows in (order[:-1], np.append(np.arange(last), 0)):  # there are fewer rows, then as many again
                Drafting(policy).select(torch.from_numpy(rows))
                reference.select(rows.tolist())
            lengths = np.append(lengths[order[:-1]], 3)
            Drafting(policy).admit(torch.tensor([last]), torch.tensor([3]))
            reference.admit(last, 3)
        fixed.check()
    return Played(*(np.stack(part) for part in zip(*played, strict=True)))


def idle(live, values):
    return ~live.reshape(-1, *[1] * (values.ndim - 1))


class Fixed:
    """What a graph that holds a policy's steps goes by: that all that they read stays where it is."""

    def __init__(self, policy):
        self.policy, self.capture = policy, capture_of(policy)
        if self.capture is not None:
            self.read = read_by_steps(policy)

    def check(self):
        if self.capture is None:
            return
        now = read_by_steps(self.policy)
        moved = [name for name in now.keys() | self.read.keys() if now.get(name) is not self.read.get(name)]
        assert not moved, "changes, but `capture` does not name it"
