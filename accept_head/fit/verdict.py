"""What to use on this machine: the simplest policy that no other one surely beats, on prompts that nothing was chosen
on.

From simple to complex: no speculation, the best fixed length, the best rule without training, the head. The next one is
taken when the 95 % interval of its gain over the one before is above 0, and the clock does not say that it is slower:
asking a rule takes time, too, which counted forwards do not have. Gains are by eq. 3.1, from the counted forwards
of each prompt and the forward times of these very runs; intervals are a bootstrap over prompts. So they agree with the
clock, but a moment in which another process had the processor moves them less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from accept_head.cost import ForwardCosts
from accept_head.inference.bench.measure import Timed
from accept_head.inference.profile.regression import least_squares
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.comparison import throughputs

KINDS = ("none", "fixed", "rule", "head")  # from simple to complex


class Gain(NamedTuple):
    """How much faster one policy is than another, as a share, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (100 * each for each in self)
        return f"{abs(value):.1f} % {'faster' if value >= 0 else 'slower'} ({low:+.1f} to {high:+.1f} %)"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """use: the kind that is recommended. names: kind → what it is called. gains: kind → over which kind → how much.
    clock: the same as gains, by the clock."""

    use: str
    names: Mapping[str, str]
    prompts: int
    gains: Mapping[str, Mapping[str, Gain]]
    clock: Mapping[str, Mapping[str, Gain]]

    def lines(self) -> list[str]:
        """The verdict in plain words."""
        if self.use == "none":
            best = max(KINDS[1:], key=lambda kind: self.gains[kind]["none"].value)
            return [
                "Verdict: do not speculate with this pair on this machine.",
                f"On {self.prompts} unseen prompts the best policy, {self.names[best]}, is {self.gains[best]['none']} "
                "than the target alone.",
            ]
        simpler = KINDS[1 : KINDS.index(self.use)]
        lines = [
            f"Verdict: use {self.names[self.use]}.",
            f"On {self.prompts} unseen prompts it is {self.gains[self.use]['none']} than the target alone"
            + "".join(f", {self.gains[self.use][kind]} than {self.names[kind]}" for kind in simpler)
            + ".",
        ]
        for kind in KINDS[KINDS.index(self.use) + 1 :]:
            gain, clock = self.gains[kind][self.use], self.clock[kind][self.use]
            remark = ", which is within what chance does" if gain.value > 0 >= gain.low else ""
            if gain.low > 0 or clock.high < 0:
                remark = f", and {clock} by the clock"
            lines.append(f"{self.names[kind]} is {gain} than {self.names[self.use]}{remark}.")
        alone = self.clock[self.use]["none"]
        lines.append(f"By the clock, one request at a time, {self.names[self.use]} is {alone} than the target alone.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        plain = {kind: {over: list(gain) for over, gain in gains.items()} for kind, gains in self.gains.items()}
        clock = {kind: {over: list(gain) for over, gain in gains.items()} for kind, gains in self.clock.items()}
        return {"use": self.use, "names": dict(self.names), "gains": plain, "clock": clock, "text": self.lines()}


def costs_of_runs(runs: Sequence[Timed]) -> ForwardCosts | None:
    """Seconds of the forwards by least squares over the runs: drafts, verifications, steps of the target alone, prompt
    tokens, and asking a rule or a head about a drafted token. None when the runs are too few or too noisy."""
    features = []
    for run in runs:
        stats = [done.stats for done in run.finished]
        drafts, rounds = sum(row.draft_forwards for row in stats), sum(row.rounds for row in stats)
        alone = run.arm == "none"
        prompt = sum(len(done.request.prompt) for done in run.finished)
        asked = drafts if run.arm in ("rule", "head") else 0
        features.append([drafts, 0 if alone else rounds, rounds if alone else 0, prompt, asked])
    coefficients, _ = least_squares(np.array(features, dtype=float), np.array([run.wall for run in runs]))
    if min(coefficients[:3]) <= 0:
        return None
    return ForwardCosts(t_draft=coefficients[0], t_target=coefficients[1], t_autoregressive=coefficients[2])


def judge(
    counts: Mapping[str, np.ndarray],
    runs: Sequence[Timed],
    names: Mapping[str, str],
    costs: ForwardCosts,
) -> Verdict:
    """counts: kind → (n, 4) of each prompt, as in `compare`. runs: by the clock, with the kinds as arms."""
    table = np.stack([counts[kind] for kind in KINDS])  # (kind, prompt, 4)
    drawn = np.einsum("rn,knc->rkc", draws(table.shape[1]), table)
    gains = _gains(throughputs(table.sum(1), costs), throughputs(drawn, costs))
    use, clock = KINDS[0], _clock(runs)
    for kind in KINDS[1:]:
        if gains[kind][use].low > 0 and clock[kind][use].high > 0:
            use = kind
    return Verdict(use=use, names=names, prompts=table.shape[1], gains=gains, clock=clock)


def _gains(values: np.ndarray, drawn: np.ndarray) -> dict[str, dict[str, Gain]]:
    """Of each kind over each. values: (kind,). drawn: (resample, kind)."""
    return {
        kind: {
            over: Gain(float(values[i] / values[j] - 1), *interval(drawn[:, i] / drawn[:, j] - 1))
            for j, over in enumerate(KINDS)
        }
        for i, kind in enumerate(KINDS)
    }


def _clock(runs: Sequence[Timed]) -> dict[str, dict[str, Gain]]:
    chunks = 1 + max(run.chunk for run in runs)
    tokens, seconds = np.zeros((2, len(KINDS), chunks))
    for run in runs:
        tokens[KINDS.index(run.arm), run.chunk] = sum(done.stats.generated for done in run.finished)
        seconds[KINDS.index(run.arm), run.chunk] = run.wall
    chosen = draws(chunks)
    return _gains(tokens.sum(1) / seconds.sum(1), (chosen @ tokens.T) / (chosen @ seconds.T))
