"""Question: with several requests at once, how much could any rule gain over the best fixed K?

The more rows, the more alike rounds are, and the less there is to choose. By replay of SmolLM2's test prompts with its
EAGLE-3 drafter, T = 1, in batches: each fixed K, the head's rule and an informed one. A round takes γ + s·K seconds,
fitted to what `load.py` has timed in that batch, no speculation and fixed K. What part of s is the draft step's, which
all rows share, is not known from that. So both ends are taken: all of it (step), and none (token), when a row that
stops saves its share.

After k steps the batch goes on ⇔ Σ_r [gain_r − λ·token]₊ > λ·step, and row r with it ⇔ gain_r > λ·token, with λ the
rule's own tokens per second. The informed rule's gain is of the true acceptance of each token and of the next, but not
of the coins (`informed.py`); no head knows as much. The head's is that of `costs=`, with costs and ρ known beforehand.
Asking takes no time here.

python benchmarks/load_bound.py     # a minute, after load.py --pair smollm2 and eagle3.py collect
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import eagle3
import numpy as np
import torch
from load import LENGTHS
from record import RESULTS, write_result
from torch import Tensor

from accept_head.files import read_json
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.informed import expected_gain
from accept_head.inference.replay.scores import score_tokens

K_MAX, TURNS = 8, 20  # the longest fixed K; most iterations to a rule's own speed


class Costs(NamedTuple):
    """Seconds of a round without drafts, of a draft step, and of a row's drafted token."""

    plain: float
    step: float
    token: float


def main() -> None:
    timed = [cell for cell in read_json(RESULTS / "load_loop_smollm2.json")["cells"] if cell["temperature"] == 1]
    traces = eagle3.coupled("test", 1.0)
    tables = eagle3.asked(traces)
    assert tables is not None
    gains = {"head": gain_of_head(traces), "informed": expected_gain(traces, tables)}
    cells = [
        {"batch": cell["batch"], "a_draft": share, "costs": costs._asdict()}
        | speeds(traces, gains, costs, cell["batch"])
        for cell in timed
        for share, costs in ends(cell).items()
    ]
    write_result("load_bound", {"cells": cells})
    print(json.dumps(cells, indent=1))


def ends(cell: dict[str, Any]) -> dict[str, Costs]:
    seconds = {row["name"]: row["seconds_a_round"] for row in cell["figures"]}
    of_k = [seconds["none"], *(seconds[f"fixed:{k}"] for k in LENGTHS)]
    slope, plain = np.polyfit([0, *LENGTHS], of_k, 1).tolist()
    return {"step": Costs(plain, slope, 0.0), "token": Costs(plain, 0.0, slope / cell["batch"])}


def gain_of_head(traces: CoupledTraces) -> Tensor:
    """S·β̂·ρ along the path of a round from each position, (P, k_max), as in `BatchStopPolicy`."""
    head = eagle3.trained("default", 1.0)
    told = score_tokens(traces, HeadPolicy(head, 1.0, k_max=traces.k_max), floor=0.0)
    told = torch.cat([told, told.new_zeros(1)])[traces.path].double()
    hope = torch.cat([torch.ones_like(told[:, :1]), (told.cumprod(-1) * told)[:, :-1]], dim=-1)
    depth = torch.arange(traces.k_max)
    accepted = (traces.leading[:, None] > depth).sum(0)
    return hope * accepted / (hope * (depth < traces.drafts[:, None])).sum(0)


def speeds(traces: CoupledTraces, gains: dict[str, Tensor], costs: Costs, rows: int) -> dict[str, Any]:
    fixed = [
        speed_of(traces, rows, costs, lambda here, k=k: traces.drafts[here].clamp(max=k))  # type: ignore[misc]
        for k in range(K_MAX + 1)
    ]
    best = int(np.argmax(fixed))
    found = {"none": fixed[0], f"fixed:{best}": fixed[best]}
    for name, gain in gains.items():
        found[name] = fixed[best]
        for _ in range(TURNS):
            before = found[name]
            found[name] = speed_of(traces, rows, costs, lambda here: chosen(gain[here], costs, before))  # noqa: B023
            if abs(found[name] - before) < 1e-6 * before:
                break
    return {"tokens_per_second": found, "over_best": {name: speed / fixed[best] - 1 for name, speed in found.items()}}


def chosen(gain: Tensor, costs: Costs, speed: float) -> Tensor:
    """(batch,) tokens that each row drafts. gain: (batch, k_max) expected tokens of each draft."""
    surplus = gain - speed * costs.token
    wants = (surplus > 0).cumprod(-1)
    together = ((surplus * wants).sum(0) > speed * costs.step).cumprod(0)
    return (wants * together).sum(-1)


def speed_of(traces: CoupledTraces, rows: int, costs: Costs, choose: Callable[[Tensor], Tensor]) -> float:
    """Tokens per second of rounds in which all rows have a response. choose: (batch,) positions → tokens to draft."""
    ends = traces.starts + traces.lengths
    place, end, following = traces.starts[:rows].clone(), ends[:rows].clone(), rows
    tokens = seconds = 0.0
    while True:
        lengths = torch.minimum(choose(place), traces.drafts[place])
        emitted = torch.minimum(lengths, traces.leading[place]) + 1
        tokens += float(emitted.sum())
        seconds += costs.plain + costs.step * float(lengths.max()) + costs.token * float(lengths.sum())
        place = place + emitted
        for row in torch.where(place >= end)[0].tolist():
            if following == len(ends):
                return tokens / seconds
            place[row], end[row], following = traces.starts[following], ends[following], following + 1


if __name__ == "__main__":
    main()
