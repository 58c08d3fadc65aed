"""Real rounds of the decode loop at every batch size with every draft length: what they take, and what is accepted.

From one grid come the table of a batch map and the batch-aware costs of both models, the loop's overhead included.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from accept_head.cost import BatchForwardCost
from accept_head.errors import InputError
from accept_head.inference.costs.batch_table import Range, best_table, tokens_per_round
from accept_head.inference.decode.generate import GREEDY, make_decoder, make_requests
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine.cache import Compile
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policy import VerifyOutcome
from accept_head.inference.profile.device import finish
from accept_head.inference.profile.prompts import usable_prompts
from accept_head.pair import Pair
from accept_head.sampling import Sampling

TURNS = 5  # how often each cell is decoded
ROUNDS = 16  # timed at most, each time: short drafts then see contexts about as long as long ones do


@dataclass(frozen=True, kw_only=True)
class RoundGrid:
    """Real rounds of every batch size (B) with every draft length (K), and what became of the drafted tokens.

    batch_sizes, draft_lengths: ascending, from 1 and from 0. seconds: (B, K), of a round. context_tokens: (B, K), of
    all rows together. rounds: (B, K), how many were timed. at_risk, accepted: (longest draft,), of the i-th drafted
    tokens those whose predecessors were all accepted, and those of them that were accepted too.
    """

    batch_sizes: Sequence[int]
    draft_lengths: Sequence[int]
    seconds: np.ndarray
    context_tokens: np.ndarray
    rounds: np.ndarray
    at_risk: np.ndarray
    accepted: np.ndarray

    @property
    def acceptance(self) -> np.ndarray:
        """acc_i; 0 at a position that no round came to."""
        return self.accepted / np.maximum(self.at_risk, 1)

    @property
    def tokens(self) -> np.ndarray:
        """AL(K) of K = 0, 1, 2, …"""
        return tokens_per_round(np.cumprod(self.acceptance))

    @property
    def goodput(self) -> np.ndarray:
        """(B, K), tokens per second of one row."""
        return self.tokens[list(self.draft_lengths)] / self.seconds

    @property
    def table(self) -> list[Range]:
        return best_table(self.seconds, self.batch_sizes, self.draft_lengths, self.tokens)


def measure_rounds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    draft_lengths: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 48,
    turns: int = TURNS,
    compile: Compile = "none",
) -> RoundGrid:
    """Decode so many prompts together with each fixed draft length, in turns, for ROUNDS rounds or until the first of
    them is done: medians of the rounds, and the share of drafted tokens that is accepted at each position.

    A slower or faster moment of the machine touches all cells alike. batch_sizes, draft_lengths: ascending. Raises
    InputError when no prompt leaves room for a response of max_new_tokens, or when that is too short for two rounds of
    the longest draft.
    """
    longest = draft_lengths[-1]
    check_rounds_fit(longest, max_new_tokens)
    usable = usable_prompts(pair, prompts, max_new_tokens)
    processing = Processing(sampling, pair.vocab_size)
    policies = {k: FixedPolicy(k) for k in draft_lengths}
    options: Any = {"greedy": sampling.greedy, "compile": compile}
    cells: dict[tuple[int, int], list[_Rounds]] = {}
    kept: dict[int, Decoder] = {}  # by batch size: what is captured or compiled serves all turns
    for turn in range(turns):
        for size in batch_sizes:
            chosen = [usable[(turn * size + row) % len(usable)] for row in range(size)]
            requests = make_requests(chosen, max_new_tokens)
            if compile == "none":
                decoder = make_decoder(pair.target, pair.draft, requests, policies[longest], batch_size=size, **options)
            else:
                planned = make_requests([*chosen, *usable], max_new_tokens)
                decoder = _kept_decoder(kept, pair, planned, policies[longest], batch_size=size, **options)
            for k, policy in policies.items():
                if compile != "none":  # what is captured or compiled when it is first met is met now
                    _full_rounds(decoder, requests, policy, processing)
                cells.setdefault((size, k), []).append(_full_rounds(decoder, requests, policy, processing))

    def of_cells(value: Callable[[list[_Rounds]], float]) -> np.ndarray:
        return np.array([[value(cells[size, k]) for k in draft_lengths] for size in batch_sizes])

    outcomes = [outcome for rounds in cells.values() for part in rounds for outcome in part.outcomes]
    drafted, accepted = (
        torch.cat([getattr(outcome, name) for outcome in outcomes]).cpu().numpy() for name in ("drafted", "accepted")
    )
    at_risk, taken = count_accepted(drafted, accepted, longest)
    return RoundGrid(
        batch_sizes=batch_sizes,
        draft_lengths=draft_lengths,
        seconds=of_cells(lambda rounds: statistics.median(itertools.chain(*(part.seconds for part in rounds)))),
        context_tokens=of_cells(lambda rounds: statistics.mean(itertools.chain(*(part.contexts for part in rounds)))),
        rounds=of_cells(lambda rounds: sum(len(part.seconds) for part in rounds)),
        at_risk=at_risk,
        accepted=taken,
    )


def _kept_decoder(
    kept: dict[int, Decoder],
    pair: Pair,
    requests: Sequence[Request],
    policy: FixedPolicy,
    *,
    batch_size: int,
    **options: Any,
) -> Decoder:
    """The decoder of this size, a new one if it is not there. If it does not fit beside the others, their memory goes:
    they are made again when their turn comes. requests: the longest of all turns are among them."""
    if batch_size not in kept:
        make = partial(make_decoder, pair.target, pair.draft, requests, policy, batch_size=batch_size, **options)
        try:
            kept[batch_size] = make()
        except InputError:
            if not kept:
                raise
            for other in kept.values():
                other.free()
            kept.clear()
            kept[batch_size] = make()
    return kept[batch_size]


@dataclass(frozen=True)
class _Rounds:
    """outcomes: of all rounds. seconds, contexts: of all but the first, which has the prefill in it; a context is the
    tokens of all rows that the models had been fed."""

    outcomes: list[VerifyOutcome]
    seconds: list[float]

    @property
    def contexts(self) -> list[float]:
        return [float((o.lengths - o.accepted - 2).sum()) for o in self.outcomes[1:]]


class _Enough(Exception):
    """No round from here on is wanted."""


def _full_rounds(decoder: Decoder, requests: Sequence[Request], policy: FixedPolicy, processing: Processing) -> _Rounds:
    """The first rounds, as long as all rows draft as many tokens as the policy says: a row that is done or near its end
    does not."""
    k = policy.max_draft_tokens
    device = decoder.target.model.device
    rounds = _Rounds([], [])
    begin = 0.0

    def watch(round_: Round) -> None:
        nonlocal begin
        finish(device)
        end = time.perf_counter()
        outcome = round_.outcome
        # Rows that are done have left the batch, or are in it without being live.
        if len(outcome.live) < len(requests) or not bool((outcome.live & (outcome.drafted == k)).all()):
            raise _Enough
        if rounds.outcomes:
            rounds.seconds.append(end - begin)
        rounds.outcomes.append(_copied(outcome))
        if len(rounds.seconds) == ROUNDS:
            raise _Enough
        begin = time.perf_counter()

    never = Stopping([], [], device)
    with suppress(_Enough):
        for _ in decoder.run(requests, policy=policy, processing=processing, stopping=never, watch=watch):
            pass
    return rounds


def _copied(outcome: VerifyOutcome) -> VerifyOutcome:
    """To keep: graphs write the next one to the same place."""
    names = ("drafted", "accepted", "live", "lengths", "submitted")
    return replace(outcome, **{name: getattr(outcome, name).clone() for name in names})


def fit_round_costs(grid: RoundGrid, draft: BatchForwardCost, target: BatchForwardCost) -> dict[str, BatchForwardCost]:
    """β and γ of both models from the grid's rounds, with the loop's overhead in them; α stays that of bare forwards:

        T(B, K) − (K·α_draft + α_target)·(context tokens) = β_draft·K·B + γ_draft·K + β_target·B·(K + 1) + γ_target

    Least squares of relative errors, none below 0. r_squared: of the rounds' seconds. A grid of one batch size or one
    draft length says too little: the costs are left as they are.
    """
    if min(len(grid.batch_sizes), len(grid.draft_lengths)) < 2:
        return {"draft": draft, "target": target}
    sizes, lengths = (axis.ravel() for axis in np.meshgrid(grid.batch_sizes, grid.draft_lengths, indexing="ij"))
    seconds, contexts = grid.seconds.ravel(), grid.context_tokens.ravel()
    known = (lengths * draft.alpha + target.alpha) * contexts
    features = np.stack([lengths * sizes, lengths, sizes * (lengths + 1), np.ones_like(sizes)], axis=1)
    fitted, _ = nnls(features / seconds[:, None], (seconds - known) / seconds)
    unexplained = np.square(seconds - known - features @ fitted).sum()
    r_squared = float(1 - unexplained / np.square(seconds - seconds.mean()).sum())
    beta_draft, gamma_draft, beta_target, gamma_target = fitted.tolist()
    return {
        "draft": replace(draft, beta=beta_draft, gamma=gamma_draft, r_squared=r_squared),
        "target": replace(target, beta=beta_target, gamma=gamma_target, r_squared=r_squared),
    }


def count_accepted(drafted: np.ndarray, accepted: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens at risk and tokens accepted at each of the positions 1..longest, (longest,) each, over (rounds,) of rows.

    At risk is what was drafted and follows accepted tokens only: what follows a rejection was never tested.
    """
    position = np.arange(1, longest + 1)
    at_risk = (drafted[:, None] >= position) & (accepted[:, None] >= position - 1)
    return at_risk.sum(0), (accepted[:, None] >= position).sum(0)


def check_rounds_fit(longest: int, max_new_tokens: int) -> None:
    """The first round has the prefill in it: a row must last for a second one, even if it accepts all tokens."""
    if max_new_tokens < 2 * (longest + 1):
        raise InputError(
            f"max_new_tokens is {max_new_tokens}, expected {2 * (longest + 1)} or more to measure rounds of {longest} "
            "draft tokens"
        )
