"""Question: with several requests at once, how much could any rule gain over the best fixed K?

The more rows, the more alike rounds are, and the less there is to choose. By replay of both pairs' test prompts in
batches: each fixed K, the head's rule, and with SmolLM2's at T = 1 an informed one. A round takes γ + s·K seconds,
fitted to what `load.py` has timed in that batch, no speculation and fixed K. What part of s is the draft step's, which
all rows share, is not known from that. So both ends are taken: all of it (step), and none (token), when a row that
stops saves its share. What a verification takes by its tokens is timed apart.

After k steps the batch goes on ⇔ Σ_r [gain_r − λ·token]₊ > λ·step, and row r with it ⇔ gain_r > λ·token, with λ the
rule's own tokens per second. The informed rule's gain is of the true acceptance of each token and of the next, but not
of the coins (`informed.py`); no head knows as much. The head's is S·β̂·ρ, that of `costs=`, with costs known beforehand,
and with the ρ of the rounds that the rule itself makes. Asking takes no time here.

python benchmarks/load_bound.py replay     # an hour, after load.py in our loop and eagle3.py collect
python benchmarks/load_bound.py forwards     # four minutes
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import eagle3
import numpy as np
import real_pair
import torch
from load import LENGTHS, PAIRS, folder_of
from record import REPOSITORY, RESULTS, circumstances, write_result
from torch import Tensor

from accept_head import AcceptanceHead
from accept_head.command.allocator import keep_freed_blocks
from accept_head.files import read_json
from accept_head.inference.costs.host import CPU_BLOCK
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.informed import expected_gain
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.tune.heads import load_heads
from accept_head.pair import load_pair

K_MAX, TURNS = 8, 10  # the longest fixed K; iterations to a rule's own speed, and ρ
ROWS, BEFORE, REPEATED = (4, 16), 350, 30  # of timed forwards; the tokens before the new ones
SEEN = 20.0  # tokens hoped for, below which a depth keeps the ρ of all positions


class Costs(NamedTuple):
    """Seconds of a round without drafts, of a draft step, and of a row's drafted token."""

    plain: float
    step: float
    token: float


def main() -> None:
    keep_freed_blocks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("replay", "forwards"))
    part = parser.parse_args().part
    path = RESULTS / "load_bound.json"
    there = read_json(path) if path.is_file() else {}
    found = {"measured": circumstances(), "cells": replay() if part == "replay" else forwards()}
    parts = {name: there.get(name) for name in ("replay", "forwards")} | {part: found}
    write_result("load_bound", parts, command="python benchmarks/load_bound.py PART")
    print(json.dumps(found, indent=1))


def forwards() -> list[dict[str, Any]]:
    return [timed(pair, rows) for pair in PAIRS for rows in ROWS]


def timed(pair: str, rows: int) -> dict[str, Any]:
    """Milliseconds of a target forward, the median of REPEATED in turns, by the new tokens of all rows."""
    target = load_pair(PAIRS[pair].target, PAIRS[pair].draft, dtype="bfloat16").target
    model = CachedModel(target, rows, BEFORE + K_MAX, attention="auto")
    tokens = torch.randint(0, target.config.vocab_size, (rows, BEFORE + K_MAX), generator=torch.manual_seed(0))
    widest = max(CPU_BLOCK // rows, 2) + 1  # all before that fill blocks
    patterns = [[width] * rows for width in range(1, widest + 1)]
    patterns.insert(-1, [patterns[-2][0] + 1, *patterns[-2][1:]])  # one token more
    seconds = [list[float]() for _ in patterns]
    with torch.no_grad():
        model.fill(tokens, range(rows), [0] * rows, [BEFORE] * rows)
        for turn in range(REPEATED):
            for place in np.random.default_rng(turn).permutation(len(patterns)).tolist():
                wanted = torch.arange(max(patterns[place])) < torch.tensor(patterns[place])[:, None]
                began = time.perf_counter()
                model.forward(tokens[:, : wanted.shape[1]], torch.full((rows,), BEFORE), BEFORE, wanted=wanted)
                seconds[place].append(time.perf_counter() - began)
    by_tokens = {sum(pattern): 1e3 * float(np.median(each)) for pattern, each in zip(patterns, seconds, strict=True)}
    return {"pair": pair, "rows": rows, "tokens_before": BEFORE, "ms_by_tokens": by_tokens}


def replay() -> list[dict[str, Any]]:
    cells = []
    for pair in PAIRS:
        measured = read_json(RESULTS / f"load_loop_{pair}.json")["cells"]
        for temperature in sorted({cell["temperature"] for cell in measured}):
            traces, draft = traces_of(pair, temperature)
            rules = {"head": hope_of_head(traces, head_of(pair, temperature, draft))}
            if pair == "smollm2" and temperature:
                tables = eagle3.asked(traces)
                assert tables is not None
                rules["informed"] = expected_gain(traces, tables)
            for cell in measured:
                if cell["temperature"] == temperature:
                    place = {"pair": pair, "temperature": temperature, "batch": cell["batch"]}
                    cells += [
                        {**place, "a_draft": share, "costs": costs._asdict()}
                        | speeds(traces, rules, costs, cell["batch"])
                        for share, costs in ends(cell).items()
                    ]
    return cells


def traces_of(pair: str, temperature: float) -> tuple[CoupledTraces, Any]:
    """Of the test prompts, and the drafter."""
    if pair == "smollm2":
        return eagle3.coupled("test", temperature), eagle3.drafter()
    return real_pair.coupled_of(real_pair.collected("test", temperature)), real_pair.draft_model()


def head_of(pair: str, temperature: float, draft: Any) -> AcceptanceHead:
    """The one that `load.py` serves."""
    (head,) = load_heads([str(REPOSITORY / folder_of(PAIRS[pair].heads[temperature]))], draft).values()
    return head


def ends(cell: dict[str, Any]) -> dict[str, Costs]:
    seconds = {row["name"]: row["seconds_a_round"] for row in cell["figures"]}
    of_k = [seconds["none"], *(seconds[f"fixed:{k}"] for k in LENGTHS)]
    slope, plain = np.polyfit([0, *LENGTHS], of_k, 1).tolist()
    return {"step": Costs(plain, slope, 0.0), "token": Costs(plain, 0.0, slope / cell["batch"])}


def hope_of_head(traces: CoupledTraces, head: AcceptanceHead) -> Tensor:
    """S·β̂ along the path of a round from each position, (P, k_max), as in `BatchStopPolicy`."""
    told = score_tokens(traces, HeadPolicy(head, 1.0, k_max=traces.k_max), floor=0.0)
    told = torch.cat([told, told.new_zeros(1)])[traces.path].double()
    return torch.cat([torch.ones_like(told[:, :1]), (told.cumprod(-1) * told)[:, :-1]], dim=-1)


def speeds(traces: CoupledTraces, rules: dict[str, Tensor], costs: Costs, rows: int) -> dict[str, Any]:
    fixed = [
        replayed(traces, rows, costs, lambda here, k=k: traces.drafts[here].clamp(max=k))[0]  # type: ignore[misc]
        for k in range(K_MAX + 1)
    ]
    best = int(np.argmax(fixed))
    found = {"none": fixed[0], f"fixed:{best}": fixed[best]}
    for name, hope in rules.items():
        found[name] = speed_of_rule(traces, rows, costs, hope, fixed[best], corrected=name == "head")
    return {"tokens_per_second": found, "over_best": {name: speed / fixed[best] - 1 for name, speed in found.items()}}


def speed_of_rule(
    traces: CoupledTraces, rows: int, costs: Costs, hope: Tensor, speed: float, *, corrected: bool
) -> float:
    """At its own speed λ. corrected: its gain is hope·ρ, with ρ of the rounds that it makes; else its hope is true."""
    drafted = torch.arange(traces.k_max) < traces.drafts[:, None]
    accepted = torch.arange(traces.k_max) < traces.leading[:, None]
    rho = accepted.sum(0) / (hope * drafted).sum(0) if corrected else torch.ones(traces.k_max)
    for _ in range(TURNS):
        before, gain = speed, hope * rho
        speed, visited, lengths = replayed(traces, rows, costs, lambda here: chosen(gain[here], costs, before))  # noqa: B023
        if corrected:
            there = torch.arange(traces.k_max) < lengths[:, None]
            hoped = (hope[visited] * there).sum(0)
            rho = torch.where(hoped > SEEN, (accepted[visited] & there).sum(0) / hoped.clamp(min=SEEN), rho)
        elif abs(speed - before) < 1e-6 * before:
            break
    return speed


def chosen(gain: Tensor, costs: Costs, speed: float) -> Tensor:
    """(batch,) tokens that each row drafts. gain: (batch, k_max) expected tokens of each draft."""
    surplus = gain - speed * costs.token
    wants = (surplus > 0).cumprod(-1)
    together = ((surplus * wants).sum(0) > speed * costs.step).cumprod(0)
    return (wants * together).sum(-1)


def replayed(
    traces: CoupledTraces, rows: int, costs: Costs, choose: Callable[[Tensor], Tensor]
) -> tuple[float, Tensor, Tensor]:
    """Rounds in which all rows have a response → tokens per second; the positions at which a row began a round, and the
    tokens that it drafted there. choose: (batch,) positions → tokens to draft."""
    ends = traces.starts + traces.lengths
    place, end, following = traces.starts[:rows].clone(), ends[:rows].clone(), rows
    tokens = seconds = 0.0
    began, drafted = list[Tensor](), list[Tensor]()
    while True:
        lengths = torch.minimum(choose(place), traces.drafts[place])
        emitted = torch.minimum(lengths, traces.leading[place]) + 1
        tokens += float(emitted.sum())
        seconds += costs.plain + costs.step * float(lengths.max()) + costs.token * float(lengths.sum())
        began.append(place)
        drafted.append(lengths)
        place = place + emitted
        for row in torch.where(place >= end)[0].tolist():
            if following == len(ends):
                return tokens / seconds, torch.cat(began), torch.cat(drafted)
            place[row], end[row], following = traces.starts[following], ends[following], following + 1


if __name__ == "__main__":
    main()
