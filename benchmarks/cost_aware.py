"""Question: how near does the rule that knows costs, and no threshold, come to the best threshold of a grid?

By replay of the embedded pair's test prompts, asking the policies as the decode loop does, at every
c = t_draft / t_target and batch size, at T = 1 and greedily. A forward of n tokens takes (1 − share) + share·n times
that of one token. share is 0.5 % or 2 %: little where reading the weights takes the time, much where many rows are
computed. Rows that have stopped take no time in further steps, as in our loop on a CPU.

grid: the head's rule, each row by itself, at 24 thresholds; the best one *on these prompts* is what is compared with.
costs: the head with threshold 1 and `costs=`, the rule of docs/theory.md §5 summed over the rows; λ and ρ are learnt on
the way, from nothing. fixed: the best draft length of all, on these prompts, too.

OMP_NUM_THREADS=1 python benchmarks/cost_aware.py [--batches 1 4 16 64] [--temperatures 1 0]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from ladder import coupled, loaded
from record import RESULTS, TINY, write_result
from rich.console import Console
from rich.table import Table

from accept_head.command.libraries import quiet_libraries
from accept_head.cost import BatchForwardCost, PairCosts
from accept_head.files import read_json
from accept_head.inference.costs.host import PACKED
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import DraftPolicy, VerifyOutcome
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import replay_fixed

COSTS, TOKEN_SHARES = (0.05, 0.1, 0.21), (0.005, 0.02)
THRESHOLDS = (*(round(0.05 * step, 2) for step in range(1, 20)), 0.02, 0.97, 0.98, 0.99, 0.995)
LENGTHS = range(0, 13)
K_MAX = 20

Round = tuple[int, int, int]  # live rows, draft steps, drafted tokens


class Recorded:
    """A policy whose rounds are counted by their live rows, the longest of their drafts, and the drafted tokens."""

    def __init__(self, policy: DraftPolicy):
        self.policy = policy
        self.rounds: Counter[Round] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def observe(self, outcome: VerifyOutcome) -> None:
        drafted = outcome.drafted * outcome.live
        self.rounds[int(outcome.live.sum()), int(drafted.max()), int(drafted.sum())] += 1
        self.policy.observe(outcome)


def seconds_of(rounds: Mapping[Round, int], costs: PairCosts) -> float:
    """Of all rounds. rounds: how many there were of each kind."""
    rows, steps, drafted = np.array(list(rounds), dtype=float).T
    drafting = steps * costs.draft.gamma + drafted * costs.draft.beta
    each = drafting + costs.verify_seconds(rows + drafted, 0)
    return float(each @ np.array(list(rounds.values())))


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    options = parser.parse_args()
    cells = [
        cell
        for temperature in options.temperatures
        for batch in options.batches
        for cell in compared(temperature, batch)
    ]
    Console(width=120, emoji=False).print(shown(cells))
    path = RESULTS / "cost_aware.json"
    kept = read_json(path)["cells"] if path.is_file() else []  # of a temperature that is not run again
    cells += [cell for cell in kept if cell["temperature"] not in options.temperatures]
    print(f"wrote {write_result('cost_aware', {'thresholds': sorted(THRESHOLDS), 'cells': cells})}")


def compared(temperature: float, batch: int) -> list[dict[str, Any]]:
    traces = coupled("test", temperature)
    head = loaded(TINY / "heads" / ("sampled" if temperature else "greedy"), temperature)

    def run(policy: DraftPolicy) -> Mapping[Round, int]:
        recorded = Recorded(policy)
        replay(traces, recorded, "recorded", batch=batch)
        return recorded.rounds

    if batch == 1:  # where rows do not wait for each other, one pass prices all settings
        settings = [Setting(threshold=threshold, k_max=K_MAX) for threshold in THRESHOLDS]
        rules = replay_thresholds(traces, HeadPolicy(head, 0.5), settings, "head"), replay_fixed(traces, LENGTHS)
        grid, fixed = (
            {
                value: {(1, k, k): int(n) for k, n in enumerate(one.draft_lengths)}
                for value, one in zip(values, each, strict=True)
            }
            for values, each in zip((THRESHOLDS, LENGTHS), rules, strict=True)
        )
    else:
        grid = {threshold: run(HeadPolicy(head, threshold, k_max=K_MAX)) for threshold in THRESHOLDS}
        fixed = {k: run(FixedPolicy(k)) for k in LENGTHS}
    cells = []
    for c in COSTS:
        for share in TOKEN_SHARES:
            costs = pair_costs(c, share)
            by_threshold, by_length = (
                {value: traces.positions / seconds_of(rounds, costs) for value, rounds in each.items()}
                for each in (grid, fixed)
            )
            aware = run(BatchStopPolicy(HeadPolicy(head, 1.0, k_max=K_MAX), costs, host=PACKED))
            best, k = max(by_threshold, key=lambda t: by_threshold[t]), max(by_length, key=lambda k: by_length[k])
            cells.append(
                {
                    "temperature": temperature, "batch_size": batch, "c": c, "token_share": share,
                    "best_threshold": best, "best_fixed": k,
                    "grid": by_threshold[best], "fixed": by_length[k],
                    "costs": traces.positions / seconds_of(aware, costs),
                }
            )  # fmt: skip
            cells[-1]["costs_over_grid"] = cells[-1]["costs"] / cells[-1]["grid"] - 1
            cells[-1]["costs_over_fixed"] = cells[-1]["costs"] / cells[-1]["fixed"] - 1
            cells[-1]["costs_over_none"] = cells[-1]["costs"] / by_length[0] - 1
    return cells


def pair_costs(c: float, share: float) -> PairCosts:
    """Seconds; a target forward on one token takes 1."""
    forwards = {
        name: BatchForwardCost(alpha=0.0, beta=seconds * share, gamma=seconds * (1 - share), r_squared=1.0)
        for name, seconds in (("draft", c), ("target", 1.0))
    }
    return PairCosts(**forwards)


def shown(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="costs= against the best threshold, the best fixed K and no speculation; tokens/s by the costs")
    for column in ("T", "batch", "c", "a token's share", "best h", "best K", "over grid", "over fixed", "over none"):
        table.add_column(column, justify="right")
    for cell in cells:
        gains = (f"{100 * cell[f'costs_over_{name}']:+.1f} %" for name in ("grid", "fixed", "none"))
        names = ("temperature", "batch_size", "c", "token_share", "best_threshold", "best_fixed")
        table.add_row(*(f"{cell[name]:g}" for name in names), *gains)
    return table


if __name__ == "__main__":
    main()
