"""The figures of a cell: speed and its interval, time per output token, rates, gain over fixed K, the noise floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from accept_head.cost import DecodeCounts, ForwardCosts
from accept_head.inference.bench.measure import Chunk, Timed
from accept_head.inference.decode.rows import DecodeStats, Finished
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.comparison import Measured, compare

SLO_SCALES = (0.8, 0.9, 1.0, 1.1, 1.2)
SLO_PERCENTILE = 90
TWIN = " again"  # suffix of the second arm of the fixed K that runs twice
COUNTS = ("generated", "drafted", "submitted", "accepted", "rounds", "draft_forwards")


class Cell:
    """All runs of one batch size and temperature.

    names: of the arms. fixed: the arms with a fixed draft length. twin: the fixed arm that ran twice. order: the
    arms in the order of their runs, for each chunk. cpu_share: share of the time in which this process had a processor.
    """

    def __init__(
        self,
        runs: Sequence[Timed],
        chunks: Sequence[Chunk],
        names: Sequence[str],
        fixed: Sequence[str],
        twin: str,
    ):
        self.chunks, self.names, self.fixed, self.twin = chunks, list(names), list(fixed), twin
        self.repeats = 1 + max(run.repeat for run in runs)
        self.finished: dict[str, list[Finished]] = {name: [] for name in self.names}
        self.loop_rounds = dict.fromkeys(self.names, 0)
        self.order: list[list[str]] = [[] for _ in range(self.repeats * len(chunks))]
        shape = (len(self.names), self.repeats, len(chunks))
        self.tokens, self.seconds = np.zeros(shape), np.zeros(shape)
        self.cpu_share = sum(run.cpu for run in runs) / sum(run.wall for run in runs)
        self.answers: dict[tuple[str, int, int], list[int]] = {}  # (arm, repeat, prompt) → token ids
        for run in runs:
            place = self.names.index(run.arm), run.repeat, run.chunk
            self.tokens[place] = sum(done.stats.generated for done in run.finished)
            self.seconds[place] = run.wall
            self.finished[run.arm] += run.finished
            self.loop_rounds[run.arm] += run.rounds
            self.order[run.repeat * len(chunks) + run.chunk].append(run.arm)
            for done in run.finished:
                self.answers[run.arm, run.repeat, done.request.index] = done.token_ids

    def place(self, name: str) -> int:
        return self.names.index(name)

    def speeds(self, domain: str | None = None) -> np.ndarray:
        """(arm,): tokens/s over all chunks, or over the chunks of a domain."""
        mine = [index for index, chunk in enumerate(self.chunks) if domain is None or chunk.domain == domain]
        return self.tokens[..., mine].sum((1, 2)) / self.seconds[..., mine].sum((1, 2))

    @property
    def domains(self) -> list[str]:
        return sorted({chunk.domain for chunk in self.chunks if chunk.domain is not None})

    def best_fixed(self, domain: str | None = None) -> str:
        """The fastest fixed K over all chunks, or over the chunks of a domain."""
        speeds = self.speeds(domain)
        return max(self.fixed, key=lambda name: float(speeds[self.place(name)]))

    def different(self, name: str) -> int:
        """Number of responses whose tokens differ from those of the target alone."""
        return sum(
            ids != self.answers["none", repeat, index]
            for (arm, repeat, index), ids in self.answers.items()
            if arm == name
        )


def rows(
    cell: Cell, *, same_tokens: bool, limits: Mapping[str, float] | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """One row per arm.

    In a row, throughput: tokens/s. gain_over_best_fixed: over the fastest fixed K of this cell. ci95: bootstrap over
    chunks, drawn jointly for all arms.

    same_tokens: whether all arms should emit the same tokens. limits: of time per output token, by scale.
    """
    speeds, best, none = cell.speeds(), cell.place(cell.best_fixed()), cell.place("none")
    drawn = _resampled_speeds(cell, seed)  # (resample, arm)
    floor = noise_floor(cell, seed)["floor"]
    by_domain = {domain: cell.speeds(domain) for domain in cell.domains}
    reference = fixed_by_domain(cell)
    table = []
    for name in cell.names:
        index, stats = cell.place(name), [done.stats for done in cell.finished[name]]
        gain = float(speeds[index] / speeds[best] - 1)
        per_domain = reference["throughput"]
        table.append(
            {
                "name": name,
                "throughput": float(speeds[index]),
                "speedup": float(speeds[index] / speeds[none]),
                "gain_over_best_fixed": gain,
                "noise_floor": floor,
                "beyond_noise": abs(gain) > floor,
                "gain_over_best_fixed_per_domain": float(speeds[index] / per_domain - 1) if per_domain else None,
                "ci95": {
                    "throughput": interval(drawn[:, index]),
                    "speedup": interval(drawn[:, index] / drawn[:, none]),
                    "gain_over_best_fixed": interval(drawn[:, index] / drawn[:, best] - 1),
                },
                "time_per_token": percentiles(times_per_token(stats)),
                **rates(stats),
                "mean_live_rows": sum(row.rounds for row in stats) / cell.loop_rounds[name],
                "differs_from_none": cell.different(name) if same_tokens else None,
                "slo_attainment": None if limits is None else attainment(times_per_token(stats), limits),
                "domains": {domain: float(values[index]) for domain, values in by_domain.items()},
                "chunks": {
                    "seconds": cell.seconds[index].ravel().tolist(),
                    "generated": cell.tokens[index].astype(int).ravel().tolist(),
                },
            }
        )
    return table


def rates(stats: Sequence[DecodeStats]) -> dict[str, Any]:
    """Counts and the rates that follow from them. mean_drafted, mean_submitted: tokens per row and round."""
    total = DecodeCounts.total(row.counts for row in stats)
    counts = {name: sum(getattr(row, name) for row in stats) for name in COUNTS}
    return {
        "discard_rate": total.discard_rate,
        "verification_rate": total.verification_rate,
        "block_efficiency": total.block_efficiency,
        "mean_drafted": counts["drafted"] / counts["rounds"],
        "mean_submitted": counts["submitted"] / counts["rounds"],
        "counts": counts,
    }


def fixed_by_domain(cell: Cell) -> dict[str, Any]:
    """The fastest fixed K of each domain, and tokens/s if each domain used its own. None when chunks are mixed."""
    best = {domain: cell.best_fixed(domain) for domain in cell.domains}
    tokens = seconds = 0.0
    for index, chunk in enumerate(cell.chunks):
        if chunk.domain is not None:
            arm = cell.place(best[chunk.domain])
            tokens, seconds = tokens + cell.tokens[arm, :, index].sum(), seconds + cell.seconds[arm, :, index].sum()
    return {"names": best, "throughput": float(tokens / seconds) if seconds else None}


def noise_floor(cell: Cell, seed: int = 0) -> dict[str, Any]:
    """The ratio of tokens/s of two arms with the same policy, compared with 1.

    floor: distance from 1 to the farther end of the ratio's 95 % interval over all runs. A smaller gain cannot be
    distinguished from noise.
    """
    pair = [cell.place(cell.twin), cell.place(cell.twin + TWIN)]
    tokens, seconds = cell.tokens[pair], cell.seconds[pair]  # (2, repeat, chunk)
    first, second = tokens / seconds
    whole = tokens.sum((1, 2)) / seconds.sum((1, 2))
    runs = tokens[0].size
    chosen = draws(runs, seed=seed)
    drawn = (chosen @ tokens.reshape(2, runs).T) / (chosen @ seconds.reshape(2, runs).T)
    bounds = interval(drawn[:, 1] / drawn[:, 0])
    repeats = tokens.sum(2) / seconds.sum(2)  # (2, repeat)
    return {
        "name": cell.twin,
        "floor": max(abs(bound - 1) for bound in bounds),
        "ratio": float(whole[1] / whole[0]),
        "ratio_ci95": bounds,
        "per_chunk": percentiles(np.abs(second / first - 1).ravel(), (50, 90, 100)),
        "per_repeat": np.abs(repeats[1] / repeats[0] - 1).tolist(),
    }


def priced(
    cell: Cell, oracle: Mapping[int, DecodeCounts], costs: ForwardCosts, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Predicted figures of the arms by eq. 3.1, from their counts and the seconds of one row's forwards.

    They hold for a loop without overhead at batch 1: the gain, and the share of the gap to the oracle that is closed.
    """
    prompts = sorted(oracle)
    measured = []
    for name in cell.names:
        if name == cell.twin + TWIN:
            continue
        counts = {index: np.zeros(4) for index in prompts}
        for done in cell.finished[name]:
            counts[done.request.index] += astuple(done.stats.counts)
        measured.append(Measured(name=name, params={}, counts=np.array(list(counts.values()))))
    bound = np.array([astuple(oracle[index]) for index in prompts])
    measured.append(Measured(name="oracle", params={}, counts=bound))
    figures = ("throughput", "speedup", "gain_over_best_fixed", "oracle_gap_closed")
    return {
        row["name"]: {**{figure: row[figure] for figure in figures}, "ci95": row["ci95"]["oracle_gap_closed"]}
        for row in compare(measured, costs, seed=seed)
    }


def times_per_token(stats: Sequence[DecodeStats]) -> np.ndarray:
    """For each response, the seconds from admission to its end, per token."""
    return np.array([row.seconds / row.generated for row in stats])


def slo_limits(alone: Sequence[DecodeStats]) -> dict[str, float]:
    """Seconds per token, by scale: multiples of the target's 90th percentile when it decodes alone (AdaSpec, §7.1)."""
    return {f"{scale:g}": scale * slo_base(alone) for scale in SLO_SCALES}


def slo_base(alone: Sequence[DecodeStats]) -> float:
    return float(np.percentile(times_per_token(alone), SLO_PERCENTILE))


def attainment(seconds: np.ndarray, limits: Mapping[str, float]) -> dict[str, float]:
    """By scale, the share of responses whose time per output token is within the limit."""
    return {scale: float((seconds <= limit).mean()) for scale, limit in limits.items()}


def percentiles(values: np.ndarray, which: Sequence[int] = (50, 99)) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in which}


def _resampled_speeds(cell: Cell, seed: int) -> np.ndarray:
    """(resample, arm): tokens/s of chunks drawn with replacement, all repeats of a chunk together."""
    drawn = draws(len(cell.chunks), seed=seed)
    return np.asarray((drawn @ cell.tokens.sum(1).T) / (drawn @ cell.seconds.sum(1).T))
