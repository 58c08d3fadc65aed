"""Checks that a policy is lossless, by enumerating all outcomes of a round on random toy pairs, under each verifier.

A toy pair is a table of p and q after each of the few prefixes that a round can have. All sequences that one row can
draft are enumerated. The policy, the same object that decodes, decides how many tokens of each are drafted and
verified. The verifiers' probabilities are formulas. So the distribution of the emitted tokens is known exactly, and is
compared with the target's: no sampling, no false alarms.

The other rows draft one fixed sequence each. Being exact given the other rows is stronger than being exact on average:
biases of opposite sign cannot cancel. One round is enough: the policy enters it with a history of rounds that were
played at random.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policy import DraftPolicy, DraftStep, Signal, VerifyOutcome

PROVED = 1e-6  # largest total variation that counts as unbiased: rounding
HIDDEN = 16  # size of the toy draft's hidden states


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the toy problem. vocab: number of tokens. depth: longest round. rows: of the batch; the first one is
    enumerated. history: number of rounds before. q is Dirichlet(concentration); p is a mixture of q, with the weight
    `agreement`, and another draw. With the defaults p and q agree as often as in real pairs."""

    vocab: int = 3
    depth: int = 2
    rows: int = 2
    history: int = 8
    concentration: float = 0.6
    agreement: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Enumerated:
    """The result. ratio, match: (pairs,) total variation between the target's distribution and that of a round's
    emitted tokens, completed by the target to depth + 1 tokens. drafted, submitted: (depth + 1,) number of sequences by
    their drafted and verified tokens."""

    ratio: np.ndarray
    match: np.ndarray
    drafted: np.ndarray
    submitted: np.ndarray


@torch.no_grad()
def enumerate_rounds(make: Callable[[], DraftPolicy], *, pairs: int = 200, shape: Shape, seed: int = 0) -> Enumerated:
    """Enumerate all rounds of the first row on `pairs` random pairs. make: builds a new policy for each pair."""
    random = np.random.default_rng(seed)
    found = [_enumerate_pair(make(), shape, random) for _ in range(pairs)]
    lengths = [
        np.bincount(np.concatenate(column), minlength=shape.depth + 1)
        for column in zip(*(f[2:] for f in found), strict=True)
    ]
    ratio, match = (np.array(column) for column in zip(*(f[:2] for f in found), strict=True))
    return Enumerated(ratio=ratio, match=match, drafted=lengths[0], submitted=lengths[1])


class Tables:
    """p and q of each row after each prefix of up to `depth` drafted tokens, (rows, prefixes, vocab) each. hidden:
    (rows, prefixes, HIDDEN), the draft's state after the prefix."""

    def __init__(self, shape: Shape, random: np.random.Generator):
        self.shape = shape
        prefixes = sum(shape.vocab**depth for depth in range(shape.depth + 1))
        spread = np.full(shape.vocab, shape.concentration)
        own, self.q = (random.dirichlet(spread, size=(shape.rows, prefixes)) for _ in range(2))
        self.p = (1 - shape.agreement) * own + shape.agreement * self.q
        self.hidden = torch.from_numpy(random.normal(size=(shape.rows, prefixes, HIDDEN))).float()
        self.draft = torch.from_numpy(self.q).float()

    def after(self, sequence: Sequence[int]) -> int:
        """The index of the prefix with these tokens."""
        number = 0
        for token in sequence:
            number = number * self.shape.vocab + 1 + token
        return number

    def draw(self, random: np.random.Generator) -> list[list[int]]:
        """A sequence of `depth` tokens from q for each row."""
        drawn: list[list[int]] = []
        for row in range(self.shape.rows):
            sequence: list[int] = []
            while len(sequence) < self.shape.depth:
                sequence.append(int(random.choice(self.shape.vocab, p=self.q[row, self.after(sequence)])))
            drawn.append(sequence)
        return drawn


def _enumerate_pair(
    policy: DraftPolicy, shape: Shape, random: np.random.Generator
) -> tuple[float, float, list[int], list[int]]:
    """The bias under ratio and match on one random pair, and the drafted and submitted tokens of each sequence."""
    lengths = torch.full((shape.rows,), 8)
    drafting = Drafting(policy)
    drafting.start(shape.rows, torch.device("cpu"))
    drafting.admit(torch.arange(shape.rows), lengths)
    for _ in range(shape.history):
        lengths = _play_at_random(policy, Tables(shape, random), lengths, random)
    tables = Tables(shape, random)
    others = tables.draw(random)[1:]
    ratio, match, target = (np.zeros([shape.vocab] * (shape.depth + 1)) for _ in range(3))
    drafted, submitted = [], []
    for sequence in itertools.product(range(shape.vocab), repeat=shape.depth):
        lengths_of = play(copy.deepcopy(policy), tables, [sequence, *others])
        drawn, verified = (int(of_rows[0]) for of_rows in lengths_of)
        weight = float(np.prod([tables.q[0, tables.after(sequence[:i]), y] for i, y in enumerate(sequence)]))
        emit(ratio, tables, sequence, verified, weight, ratio_test)
        emit(match, tables, sequence, verified, weight, sampler_match)
        drafted.append(drawn)
        submitted.append(verified)
    complete(target, tables, (), 1.0)
    bias = [float(np.abs(emitted - target).sum() / 2) for emitted in (ratio, match)]
    return bias[0], bias[1], drafted, submitted


def _play_at_random(policy: DraftPolicy, tables: Tables, lengths: Tensor, random: np.random.Generator) -> Tensor:
    """Play a round of the policy's history: draw from q, accept by p and q → the rows' lengths after it."""
    drawn = tables.draw(random)
    drafted, submitted = play(policy, tables, drawn)
    accepted = torch.zeros_like(drafted)
    for row, sequence in enumerate(drawn):
        for slot in range(int(submitted[row])):
            number = tables.after(sequence[:slot])
            p, q = tables.p[row, number, sequence[slot]], tables.q[row, number, sequence[slot]]
            if random.random() >= min(1.0, p / q):
                break
            accepted[row] += 1
    lengths = lengths + accepted + 1
    policy.observe(
        VerifyOutcome(
            drafted=drafted,
            submitted=submitted,
            accepted=accepted,
            live=torch.ones_like(drafted, dtype=torch.bool),
            lengths=lengths,
            divergence=torch.from_numpy(random.exponential(0.5, size=(len(drafted), tables.shape.depth))).float(),
            seconds=float(random.uniform(0.5, 1.5)),
        )
    )
    return lengths


def play(policy: DraftPolicy, tables: Tables, drawn: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ask the policy as the decode loop does, in a round whose rows draw these tokens → drafted and submitted tokens,
    (rows,) each."""
    drafting = Drafting(policy)
    drafting.prepare([True] * len(drawn), drafted=True)
    progress = drafting.begin(torch.ones(len(drawn), dtype=torch.bool), tables.shape.depth)
    for depth in range(1, int(progress.budget.max()) + 1):
        if drafting.peeks:
            progress = drafting.peek(_step(policy, tables, drawn, depth, progress.active, peek=True), progress)
        if not progress.active.any():
            break
        progress = drafting.drew(progress)
        if drafting.asks:
            progress = drafting.judge(_step(policy, tables, drawn, depth, progress.active), progress)
    drafted = progress.lengths
    return drafted, drafting.trim(drafted) if drafting.trims and progress.budget.any() else drafted


def _step(
    policy: DraftPolicy,
    tables: Tables,
    drawn: Sequence[Sequence[int]],
    depth: int,
    active: Tensor,
    *,
    peek: bool = False,
) -> DraftStep:
    row = torch.arange(len(drawn))
    before = torch.tensor([tables.after(sequence[: depth - 1]) for sequence in drawn])
    token = torch.tensor([sequence[depth - 1] for sequence in drawn])
    last = depth == tables.shape.depth
    at = torch.tensor([tables.after(sequence[:depth]) for sequence in drawn])
    q, needs = tables.draft[row, before], policy.needs
    return DraftStep(
        depth=depth,
        token_ids=None if peek else token,
        active=active,
        fed_hidden=tables.hidden[row, before] if Signal.FED_HIDDEN in needs else None,
        drawn_hidden=None if peek or last or Signal.DRAWN_HIDDEN not in needs else tables.hidden[row, at],
        logprob=None if peek or Signal.LOGPROB not in needs else q[row, token].log(),
        entropy=-(q * q.log()).sum(-1) if Signal.ENTROPY in needs else None,
        max_prob=q.max(-1).values if Signal.MAX_PROB in needs else None,
    )


# One verification of a candidate y, with p, q: (vocab,) → its acceptance probability, and the distribution of the token
# that replaces it after a rejection.
Test = Callable[[np.ndarray, np.ndarray, int], tuple[float, np.ndarray]]


def ratio_test(p: np.ndarray, q: np.ndarray, y: int) -> tuple[float, np.ndarray]:
    """min(1, p(y)/q(y)), and the normalised residual [p − q]₊."""
    left = np.maximum(p - q, 0)
    return min(1.0, p[y] / q[y]), left / left.sum() if left.sum() > 0 else p


def sampler_match(p: np.ndarray, q: np.ndarray, y: int) -> tuple[float, np.ndarray]:
    """p(y), and p without y, normalised."""
    others = np.where(np.arange(len(p)) == y, 0.0, p)
    return float(p[y]), others / others.sum()


def emit(out: np.ndarray, tables: Tables, sequence: Sequence[int], submitted: int, weight: float, test: Test) -> None:
    """Add to `out` the distribution of what row 0 emits when it submits the first `submitted` tokens of `sequence`.
    out: depth + 1 dimensions of size vocab."""
    for slot in range(submitted):
        number = tables.after(sequence[:slot])
        accepted, instead = test(tables.p[0, number], tables.q[0, number], sequence[slot])
        for token in np.nonzero(instead)[0] if accepted < 1 else ():
            complete(out, tables, (*sequence[:slot], int(token)), weight * (1 - accepted) * instead[token])
        weight *= accepted
    complete(out, tables, tuple(sequence[:submitted]), weight)


def complete(out: np.ndarray, tables: Tables, prefix: tuple[int, ...], weight: float) -> None:
    """Add to `out` the target's own continuations of row 0's prefix."""
    if len(prefix) == out.ndim:
        out[prefix] += weight
        return
    for token, probability in enumerate(tables.p[0, tables.after(prefix)]):
        complete(out, tables, (*prefix, token), weight * probability)
