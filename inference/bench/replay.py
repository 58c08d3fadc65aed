"""Replay of a trace's requests in wall-clock time: latency, queueing, and draft lengths under changing load.

All policies get the same arrivals, one policy after the other. These are the numbers of AdaSpec's figures 10, 11 and
13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from accept_head.inference.bench.arrivals import Arrival, Paced, match_prompts
from accept_head.inference.bench.figures import TWIN, attainment, percentiles, rates, slo_limits, times_per_token
from accept_head.inference.bench.measure import Arms, Stage
from accept_head.inference.decode.generate import content_ids
from accept_head.inference.decode.round import Round
from accept_head.inference.decode.rows import Finished, Request
from accept_head.prompts import Prompt

BINS = 40  # of the time axis


class Step(NamedTuple):
    """One round. seconds: its end. drafted, live: (batch,)."""

    seconds: float
    drafted: Tensor
    live: Tensor


class Replay(NamedTuple):
    """One arm's replay. handed, ended: for each request in the order of arrival, seconds since the start."""

    repeat: int
    arm: str
    handed: list[float]
    ended: list[float]
    finished: list[Finished]
    steps: list[Step]


def trace_requests(
    arrivals: Sequence[Arrival], prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[Request], str]:
    """One request for each arrival, with its place as index, and how prompts were chosen.

    A response has the length in the trace, but at most max_new_tokens.
    """
    indices, by = match_prompts(arrivals, [len(prompt.ids) for prompt in prompts])
    chosen = [prompts[index] for index in indices]
    keys = content_ids([prompt.ids for prompt in chosen])
    requests = [
        Request(place, p.ids, min(arrival.output_tokens, max_new_tokens), key, tenant=p.tenant, k_max=p.k_max)
        for place, (arrival, p, key) in enumerate(zip(arrivals, chosen, keys, strict=True))
    ]
    return requests, by


def time_scale_for(load: float, busy: float, span: float) -> float:
    """Seconds of replay per second of the trace. 0 when all requests arrive at once.

    busy: seconds that the target alone needs for all requests. span: seconds from the first to the last arrival.
    """
    return busy / load / span if span else 0.0


def replay_all(
    stage: Stage, arms: Arms, requests: Sequence[Request], seconds: Sequence[float], *, repeats: int, seed: int
) -> Iterator[Replay]:
    """Replay every arm in turn, in a random order for each repeat. seconds: arrival of each request."""
    names = list(arms)
    for repeat in range(repeats):
        for index in np.random.default_rng([seed, repeat]).permutation(len(names)):
            yield _replay(stage, arms, names[index], requests, seconds, repeat, seed + repeat)


def _replay(
    stage: Stage,
    arms: Arms,
    name: str,
    requests: Sequence[Request],
    seconds: Sequence[float],
    repeat: int,
    seed: int,
) -> Replay:
    paced, steps = Paced(requests, seconds), list[Step]()
    ended, finished = [0.0] * len(requests), []

    def watch(round_: Round) -> None:  # copies tensors, because graphs reuse them; reading values would be a sync
        steps.append(Step(paced.now, round_.outcome.drafted.clone(), round_.outcome.live.clone()))

    for done in stage.run(paced, arms[name](), seed, watch):
        ended[done.request.index] = paced.now
        finished.append(done)
    return Replay(repeat, name, paced.handed, ended, finished, steps)


def replay_rows(
    replays: Sequence[Replay], names: Sequence[str], seconds: Sequence[float], *, same_tokens: bool
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One row per arm, and the limits of time per output token by scale.

    In a row, latency: from arrival to the last token. time_per_token: from admission to the last token, per token.
    Figures are over the requests of all repeats, except the timeline, which is from the first repeat.
    """
    mine = {name: [replay for replay in replays if replay.arm == name] for name in names}
    stats = {name: [done.stats for replay in mine[name] for done in replay.finished] for name in names}
    latencies = {name: np.concatenate([np.subtract(r.ended, seconds) for r in mine[name]]) for name in names}
    limits = slo_limits(stats["none"])
    answers = {
        (replay.arm, replay.repeat, done.request.index): done.token_ids
        for replay in replays
        for done in replay.finished
    }
    end = max(max(replay.ended) for replay in replays)
    table = []
    for name in names:
        waited = np.concatenate([np.subtract(replay.handed, seconds) for replay in mine[name]])
        pace = times_per_token(stats[name])
        different = sum(ids != answers["none", key[1], key[2]] for key, ids in answers.items() if key[0] == name)
        table.append(
            {
                "name": name,
                "latency": {"mean": float(latencies[name].mean()), **percentiles(latencies[name], (50, 90, 99))},
                "latency_speedup": float(latencies["none"].mean() / latencies[name].mean()),
                "queueing": {"mean": float(waited.mean()), **percentiles(waited, (50, 90, 99))},
                "time_per_token": percentiles(pace),
                "slo_attainment": attainment(pace, limits),
                "throughput": sum(row.generated for row in stats[name]) / sum(max(r.ended) for r in mine[name]),
                **rates(stats[name]),
                "differs_from_none": different if same_tokens else None,
                "timeline": timeline(mine[name][0].steps, end),
            }
        )
    return table, limits


def latency_noise(replays: Sequence[Replay], seconds: Sequence[float], twin: str) -> dict[str, Any]:
    """The difference between two replays of one policy, in mean latency and for single requests."""
    in_order = sorted(replays, key=lambda replay: replay.repeat)
    first, second = (
        np.concatenate([np.subtract(replay.ended, seconds) for replay in in_order if replay.arm == name])
        for name in (twin, twin + TWIN)
    )
    floor = float(abs(second.mean() / first.mean() - 1))
    return {"name": twin, "floor": floor, "per_request": percentiles(np.abs(second / first - 1), (50, 90))}


def timeline(steps: Sequence[Step], end: float, bins: int = BINS) -> dict[str, list[float | None]]:
    """Rounds in bins of time from 0 to `end` seconds: tokens drafted per row and round, and live rows.

    None in a bin without rounds. seconds: the middle of each bin.
    """
    edges = np.linspace(0, end, bins + 1)
    place = np.clip(np.searchsorted(edges, [step.seconds for step in steps], side="right") - 1, 0, bins - 1)
    drafted, live, rounds = np.zeros(bins), np.zeros(bins), np.bincount(place, minlength=bins)
    np.add.at(drafted, place, [int(step.drafted.sum()) for step in steps])
    np.add.at(live, place, [int(step.live.sum()) for step in steps])
    return {
        "seconds": ((edges[:-1] + edges[1:]) / 2).tolist(),
        "mean_drafted": [float(d / n) if n else None for d, n in zip(drafted, live, strict=True)],
        "live_rows": [float(n / r) if r else None for n, r in zip(live, rounds, strict=True)],
    }
