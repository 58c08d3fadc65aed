"""Side by side: every policy runs in turn on each chunk of prompts. A slow moment of the machine affects all alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from accept_head.cost import DecodeCounts, oracle_counts
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import DecodeStats, Finished, Request
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policy import DraftPolicy, Verifier
from accept_head.pair import Pair, end_ids
from accept_head.prompts import Prompt
from accept_head.sampling import Sampling

LEAST_PROMPTS = 4  # per chunk: with fewer, the clock's jitter matters
WARM_UP_TOKENS = 16
PILOT_PROMPTS = 16  # least number
LONGEST = 20  # tokens that the oracle's pass drafts; a rejection nearly always comes earlier

Arms = Mapping[str, Callable[[], DraftPolicy]]  # by name; each call returns a policy in its initial state


class Chunk(NamedTuple):
    """Prompts that are decoded in one run of the loop. domain: of the prompts; None when they are mixed."""

    domain: str | None
    requests: list[Request]


class Timed(NamedTuple):
    """One run of one arm on one chunk.

    wall, cpu: wall-clock and process seconds of the run, including prefill and draining. rounds: of the loop.
    """

    repeat: int
    chunk: int
    arm: str
    wall: float
    cpu: float
    rounds: int
    finished: list[Finished]


class Stage:
    """The parts that all arms of a cell share: the decoder, the sampling and the verification."""

    def __init__(
        self, decoder: Decoder, pair: Pair, sampling: Sampling, *, verifier: Verifier = "ratio", lossy: bool = False
    ):
        self.decoder, self.sampling, self.verifier, self.lossy = decoder, sampling, verifier, lossy
        self.processing = Processing(sampling, pair.vocab_size)
        self.stopping = Stopping(end_ids(pair.target, pair.tokenizer), [], pair.target.device)

    def run(
        self,
        requests: Iterable[Request | None],
        policy: DraftPolicy,
        seed: int,
        watch: Callable[[Round], None] | None = None,
    ) -> Iterator[Finished]:
        return self.decoder.run(
            requests,
            policy=policy,
            processing=self.processing,
            stopping=self.stopping,
            seed=seed,
            verifier=self.verifier,
            allow_lossy=self.lossy,
            watch=watch,
        )

    def time(
        self, requests: Sequence[Request], policy: DraftPolicy, seed: int
    ) -> tuple[float, float, int, list[Finished]]:
        """(wall-clock seconds, process seconds, rounds of the loop, responses) of one run."""
        rounds = 0

        def count(_: Round) -> None:
            nonlocal rounds
            rounds += 1

        wall, cpu = time.perf_counter(), time.process_time()
        finished = list(self.run(requests, policy, seed, count))
        return time.perf_counter() - wall, time.process_time() - cpu, rounds, finished


def each_fills(prompts: Sequence[Prompt], batch: int) -> bool:
    """Whether each domain fills a batch. Then each chunk can have one domain and show its best fixed K."""
    domains = [prompt.domain for prompt in prompts]
    return all(domains.count(domain) >= batch for domain in set(domains))


def make_chunks(
    requests: Sequence[Request], domains: Sequence[str | None], *, batch: int, seed: int = 0
) -> list[Chunk]:
    """Chunks of one domain each, in random order. domains: of each request; None for all requests mixes them.

    A chunk has about twice as many prompts as the batch has rows, if the domain has enough, so that rows are refilled
    at least once.
    """
    random = np.random.default_rng(seed)
    chunks = []
    for domain in sorted(set(domains), key=str):
        mine = random.permutation([index for index, name in enumerate(domains) if name == domain])
        size = min(max(2 * batch, LEAST_PROMPTS), len(mine))
        chunks += [
            Chunk(domain, [requests[index] for index in part]) for part in np.array_split(mine, len(mine) // size)
        ]
    return [chunks[index] for index in random.permutation(len(chunks))]


def side_by_side(stage: Stage, arms: Arms, chunks: Sequence[Chunk], *, repeats: int, seed: int) -> Iterator[Timed]:
    """Run every arm on every chunk, in a random order for each chunk.

    Each repeat has new random numbers and new policies. A policy keeps learning from chunk to chunk.
    """
    names = list(arms)
    for repeat in range(repeats):
        policies = {name: arms[name]() for name in names}
        for number, chunk in enumerate(chunks):
            for index in np.random.default_rng([seed, repeat, number]).permutation(len(names)):
                timed = stage.time(chunk.requests, policies[names[index]], seed + repeat)
                yield Timed(repeat, number, names[index], *timed)


def warm_up(stage: Stage, arms: Arms, requests: Sequence[Request]) -> dict[str, float]:
    """Run every arm once on a batch of short responses. Returns tokens per CPU second of each arm, as a first guess.

    When steps are captured, responses have their full length, so that nothing is captured during timed runs.
    """
    most = WARM_UP_TOKENS if stage.decoder.backend is None else sys.maxsize
    short = [
        replace(request, max_new_tokens=min(request.max_new_tokens, most))
        for request in requests[: stage.decoder.batch]
    ]
    speeds = {}
    for name, make in arms.items():
        _, cpu, _, finished = stage.time(short, make(), 0)
        speeds[name] = sum(done.stats.generated for done in finished) / cpu
    return speeds


def pilot(stage: Stage, requests: Sequence[Request], seed: int) -> list[DecodeStats]:
    """The target alone on some of the requests, before anything is measured."""
    some = requests[: max(PILOT_PROMPTS, 2 * stage.decoder.batch)]
    return [done.stats for done in stage.run(some, FixedPolicy(0), seed)]


def count_oracle(stage: Stage, requests: Sequence[Request], seed: int) -> dict[int, DecodeCounts]:
    """The oracle's counts for each request, by index (theorem 4.1).

    An untimed pass that drafts LONGEST tokens per round shows where proposals are rejected. The token after LONGEST
    accepted ones was not proposed. It counts as accepted.
    """
    unseen = dict.fromkeys((request.index for request in requests), 0)

    def watch(round_: Round) -> None:
        outcome = round_.outcome
        full = outcome.live & round_.rows.live & (outcome.accepted == outcome.submitted)
        for row in torch.nonzero(full)[:, 0].tolist():
            request = round_.rows.requests[row]
            assert request is not None
            unseen[request.index] += 1

    counts = {}
    for done in stage.run(requests, FixedPolicy(LONGEST), seed, watch):
        # The last round ends with the response's last token, which the oracle's count leaves out.
        rejections = done.stats.rounds - 1 - unseen[done.request.index]
        counts[done.request.index] = oracle_counts(generated=done.stats.generated, rejections=rejections)
    return counts
