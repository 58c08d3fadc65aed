"""One cell of a bench: all policies at one batch size and temperature, on chunks of prompts or a trace's arrivals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from accept_head.console import Progress
from accept_head.cost import ForwardCosts
from accept_head.inference.bench.arms import P90, arm_maker
from accept_head.inference.bench.arrivals import Arrival
from accept_head.inference.bench.figures import (
    TWIN,
    Cell,
    fixed_by_domain,
    noise_floor,
    priced,
    rows,
    slo_base,
    slo_limits,
)
from accept_head.inference.bench.measure import (
    LONGEST,
    Arms,
    Stage,
    count_oracle,
    make_chunks,
    pilot,
    side_by_side,
    warm_up,
)
from accept_head.inference.bench.replay import latency_noise, replay_all, replay_rows, time_scale_for, trace_requests
from accept_head.inference.decode.generate import check_tenants, make_decoder, make_requests
from accept_head.inference.decode.rows import Request
from accept_head.inference.engine.attention.choice import Attention
from accept_head.inference.engine.cache import Compile
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import Verifier
from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.sampling import Sampling

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings that all cells share.

    names: SPECs of the arms, the target alone first. In a SPEC, `slo_ms=p90` stands for the cell's limit in
    milliseconds per token. by_domain: whether each chunk has a single domain. costs: of one row's forwards.
    """

    pair: Pair
    prompts: Sequence[Prompt]
    names: Sequence[str]
    max_new_tokens: int
    repeats: int
    by_domain: bool
    costs: ForwardCosts | None
    slo: bool
    load: float
    seed: int
    verifier: Verifier
    allow_lossy: bool
    compile: Compile
    attention: Attention

    @property
    def fixed(self) -> list[str]:
        return [name for name in self.names if name.startswith("fixed:")]

    def measure(self, batch: int, sampling: Sampling) -> dict[str, Any]:
        """Measure one cell on chunks of prompts."""
        requests = make_requests(
            [prompt.ids for prompt in self.prompts],
            self.max_new_tokens,
            tenants=[prompt.tenant for prompt in self.prompts],
            k_max=[prompt.k_max for prompt in self.prompts],
        )
        stage, arms, twin = self._prepare(batch, sampling, requests)
        domains = [prompt.domain if self.by_domain else None for prompt in self.prompts]
        chunks = make_chunks(requests, domains, batch=batch, seed=self.seed)
        runs = _shown(
            side_by_side(stage, arms, chunks, repeats=self.repeats, seed=self.seed),
            f"batch {batch}, temperature {sampling.temperature:g}",
            self.repeats * len(chunks) * len(arms),
        )
        cell = Cell(runs, chunks, list(arms), self.fixed, twin)
        limits = slo_limits([done.stats for done in cell.finished["none"]]) if self.slo else None
        table = rows(cell, same_tokens=self._same_tokens(sampling), limits=limits, seed=self.seed)
        oracle = count_oracle(stage, requests, self.seed) if self.costs else {}
        prices = priced(cell, oracle, self.costs, self.seed) if self.costs else {}
        return {
            "best_fixed": cell.best_fixed(),
            "best_fixed_by_domain": fixed_by_domain(cell),
            "noise": noise_floor(cell, self.seed),
            "cpu_share": cell.cpu_share,
            "slo_limits": limits,
            "oracle": prices.get("oracle"),
            "chunks": {"prompts": [len(chunk.requests) for chunk in chunks], "domains": [c.domain for c in chunks]},
            "order": [[cell.place(name) for name in names] for names in cell.order],
            "policies": [{**row, "priced": prices.get(row["name"])} for row in table],
        }

    def replay(self, arrivals: Sequence[Arrival], batch: int, sampling: Sampling) -> dict[str, Any]:
        """Measure one cell on a trace."""
        order = np.random.default_rng(self.seed).permutation(len(self.prompts))  # files are often sorted by domain
        prompts = [self.prompts[index] for index in order]
        requests, by = trace_requests(arrivals, prompts, self.max_new_tokens)
        stage, arms, twin = self._prepare(batch, sampling, requests)
        busy, _, _, _ = stage.time(requests, make_policy("none", self.pair), self.seed)
        span = arrivals[-1].seconds
        scale = time_scale_for(self.load, busy, span)
        seconds = [scale * arrival.seconds for arrival in arrivals]
        replays = _shown(
            replay_all(stage, arms, requests, seconds, repeats=self.repeats, seed=self.seed),
            f"batch {batch}, temperature {sampling.temperature:g}",
            self.repeats * len(arms),
        )
        table, limits = replay_rows(replays, list(arms), seconds, same_tokens=self._same_tokens(sampling))
        return {
            "requests": len(requests),
            "prompts_by": by,
            "trace_seconds": span,
            "time_scale": scale,
            "load": busy / (scale * span) if span else None,
            "slo_limits": limits,
            "noise": latency_noise(replays, seconds, twin),
            "order": [replay.arm for replay in replays],
            "policies": table,
        }

    def _same_tokens(self, sampling: Sampling) -> bool:
        """Whether all policies should give a prompt the same tokens."""
        return sampling.greedy or self.verifier == "match"

    def _prepare(self, batch: int, sampling: Sampling, requests: Sequence[Request]) -> tuple[Stage, Arms, str]:
        """(the stage after warm-up, all arms, the fixed K that runs twice: the fastest in the warm-up)."""
        arms = {name: arm_maker(name, self.pair) for name in self.names}
        policies = [make() for make in arms.values()]
        for policy in policies:
            check_tenants(policy, (request.tenant for request in requests))
        decoder = make_decoder(
            self.pair.target,
            self.pair.draft,
            requests,
            FixedPolicy(LONGEST if self.costs else 0),
            others=policies,
            batch_size=batch,
            greedy=sampling.greedy,
            compile=self.compile,
            attention=self.attention,
        )
        stage = Stage(decoder, self.pair, sampling, verifier=self.verifier, lossy=self.allow_lossy)
        speeds = warm_up(stage, arms, requests)
        if any(P90 in name for name in self.names):
            limit = slo_base(pilot(stage, requests, self.seed))
            arms = {name: arm_maker(name, self.pair, limit) for name in self.names}
        twin = max(self.fixed, key=speeds.__getitem__)
        return stage, {**arms, twin + TWIN: arms[twin]}, twin


def _shown(items: Iterator[Item], what: str, total: int) -> list[Item]:
    """All items, while their progress is shown."""
    return list(Progress(items, what, total, leave=False, unit="run"))
