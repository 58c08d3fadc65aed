"""Times and acceptance of real rounds of the decode loop, at every batch size with every draft length.

One grid of measurements gives the table of a batch map and the batch-aware costs of both models, including the loop's
overhead.
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
ROUNDS = 16  # most rounds to time in a turn, so that short drafts have contexts about as long as long drafts


@dataclass(frozen=True, kw_only=True)
class RoundGrid:
    """Real rounds of every batch size (B) with every draft length (K), and the acceptance of their tokens.

    batch_sizes, draft_lengths: ascending, from 1 and from 0. seconds: (B, K), of a round. context_tokens: (B, K), sum
    over all rows. rounds: (B, K), how many were timed. at_risk, accepted: (longest draft,), how many i-th drafted
    tokens had all predecessors accepted, and how many of these were accepted too.
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
        """acc_i; 0 at a position that no round reached."""
        return self.accepted / np.maximum(self.at_risk, 1)

    @property
    def tokens(self) -> np.ndarray:
        """AL(K) for K = 0, 1, 2, …"""
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
    """Decode prompts in batches of every size with each fixed draft length, and measure the rounds.

    Each run has ROUNDS timed rounds, or stops when the first row is done. Seconds are medians over rounds. Cells run in
    turns, so that a slower or faster moment of the machine affects all alike.

    batch_sizes, draft_lengths: ascending. Raises InputError when no prompt leaves room for a response of
    max_new_tokens, or when this is too short for two rounds of the longest draft.
    """
    longest = draft_lengths[-1]
    check_rounds_fit(longest, max_new_tokens)
    usable = usable_prompts(pair, prompts, max_new_tokens)
    processing = Processing(sampling, pair.vocab_size)
    policies = {k: FixedPolicy(k) for k in draft_lengths}
    options: Any = {"greedy": sampling.greedy, "compile": compile}
    cells: dict[tuple[int, int], list[_Rounds]] = {}
    kept: dict[int, Decoder] = {}  # by batch size, so that captured or compiled steps serve all turns
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
                if compile != "none":  # this run captures or compiles everything
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
    """The decoder for this batch size, made if necessary.

    If it does not fit in memory beside the others, they are freed, and made again in their next turn. requests: must
    include the longest of all turns.
    """
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
    """The rounds of one run.

    outcomes: of all rounds. seconds, contexts: of all rounds except the first, which includes the prefill. A context is
    the number of tokens, over all rows, that the models had been fed.
    """

    outcomes: list[VerifyOutcome]
    seconds: list[float]

    @property
    def contexts(self) -> list[float]:
        return [float((o.lengths - o.accepted - 2).sum()) for o in self.outcomes[1:]]


class _Enough(Exception):
    """Ends a run: no further rounds are needed."""


def _full_rounds(decoder: Decoder, requests: Sequence[Request], policy: FixedPolicy, processing: Processing) -> _Rounds:
    """The first rounds, up to one in which some row drafts fewer tokens than the policy's K.

    A row does so when it is done or near its end.
    """
    k = policy.max_draft_tokens
    device = decoder.target.model.device
    rounds = _Rounds([], [])
    begin = 0.0

    def watch(round_: Round) -> None:
        nonlocal begin
        finish(device)
        end = time.perf_counter()
        outcome = round_.outcome
        # Finished rows have left the batch, or are still in it but not live.
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
    """A copy of the outcome, because graphs write the next outcome to the same memory."""
    names = ("drafted", "accepted", "live", "lengths", "submitted")
    return replace(outcome, **{name: getattr(outcome, name).clone() for name in names})


def fit_round_costs(grid: RoundGrid, draft: BatchForwardCost, target: BatchForwardCost) -> dict[str, BatchForwardCost]:
    """β and γ of both models from the grid's rounds, including the loop's overhead. α stays that of bare forwards.

        T(B, K) − (K·α_draft + α_target)·(context tokens) = β_draft·K·B + γ_draft·K + β_target·B·(K + 1) + γ_target

    By least squares of relative errors; all coefficients are at least 0. r_squared: of the rounds' seconds. A grid of
    one batch size or one draft length is not enough: the costs are then returned unchanged.
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
    """Tokens at risk and tokens accepted at each of the positions 1..longest, (longest,) each.

    A drafted token is at risk when all tokens before it were accepted. Tokens after a rejection are never tested.
    drafted, accepted: (rounds of rows,).
    """
    position = np.arange(1, longest + 1)
    at_risk = (drafted[:, None] >= position) & (accepted[:, None] >= position - 1)
    return at_risk.sum(0), (accepted[:, None] >= position).sum(0)


def check_rounds_fit(longest: int, max_new_tokens: int) -> None:
    """Raises InputError when a row can end in its first round, which includes the prefill and is not timed."""
    if max_new_tokens < 2 * (longest + 1):
        raise InputError(
            f"max_new_tokens is {max_new_tokens}, expected {2 * (longest + 1)} or more to measure rounds of {longest} "
            "draft tokens"
        )
