"""Question: is the threshold that `accept-head tune --search cost` finds without a grid as good as a grid's?

By replay of the embedded pair, for each shipped head and c = t_draft / t_target. The threshold by cost and the best
setting of the grid (tune's own: 19 thresholds, k_min 1 and 2, k_max 4, 8 and 20) are chosen on the dev prompts and
judged on the test prompts; beside them, the grid's setting that is best *on the test prompts*, which nobody can know.

OMP_NUM_THREADS=1 python benchmarks/cost_search.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ladder import coupled, loaded
from record import TINY, write_result
from rich.console import Console
from rich.table import Table

from accept_head.command.libraries import quiet_libraries
from accept_head.cost import ForwardCosts
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.replay.bootstrap import draws, interval
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.cost_aware import cost_aware
from accept_head.inference.replay.thresholds import Setting, replay_thresholds
from accept_head.inference.replay.walk import Replayed
from accept_head.inference.tune.grid import Grid

COSTS = (0.05, 0.1, 0.126, 0.21, 0.3, 0.5)
HEADS = {"sampled": 1.0, "greedy": 0.0, "greedy_both": 0.0}  # each with the temperature it is for


def main() -> None:
    quiet_libraries()
    cells = [cell for name, temperature in HEADS.items() for cell in searched(name, temperature)]
    Console(width=120, emoji=False).print(shown(cells))
    print(f"wrote {write_result('cost_search', {'settings': len(settings()), 'cells': cells})}")


def settings() -> list[Setting]:
    return Grid().settings(Grid().thresholds)


def searched(name: str, temperature: float) -> list[dict[str, Any]]:
    policy = HeadPolicy(loaded(TINY / "heads" / name, temperature), 0.5)
    dev, test = (coupled(split, temperature) for split in ("dev", "test"))
    grids = [replay_thresholds(traces, policy, settings(), name) for traces in (dev, test)]
    cells = []
    for c in COSTS:
        costs = ForwardCosts(t_draft=c, t_target=1.0)

        def fastest(grid: list[Replayed], costs: ForwardCosts = costs) -> int:
            return int(np.argmax([float(throughputs(one.counts.sum(0), costs)) for one in grid]))

        _, found = cost_aware(dev, policy, costs, k_max=max(Grid().k_max))
        chosen = {key: found.params[key] for key in ("threshold", "k_min", "k_max")}
        (by_cost,) = replay_thresholds(test, policy, [Setting(**chosen)], name)
        by_dev, by_test = grids[1][fastest(grids[0])], grids[1][fastest(grids[1])]
        cells.append(
            {
                "head": name, "temperature": temperature, "c": c, "threshold": chosen["threshold"],
                "grid_on_dev": by_dev.params, "grid_on_test": by_test.params,
                "over_grid_on_dev": over(by_cost, by_dev, costs), "over_grid_on_test": over(by_cost, by_test, costs),
            }
        )  # fmt: skip
    return cells


def over(one: Replayed, other: Replayed, costs: ForwardCosts) -> list[float]:
    """Gain in tokens/s, with 95 % bounds over prompts."""
    drawn = draws(len(one.counts))
    value = float(throughputs(one.counts.sum(0), costs) / throughputs(other.counts.sum(0), costs) - 1)
    resampled = throughputs(drawn @ one.counts, costs) / throughputs(drawn @ other.counts, costs) - 1
    return [round(number, 5) for number in (value, *interval(resampled))]


def shown(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="--search cost, chosen on dev, judged on test: tokens/s over the grid's choice")
    for column in ("head", "c", "threshold", "over the grid's choice on dev", "over the best on test"):
        table.add_column(column, justify="left" if column == "head" else "right")
    for cell in cells:
        gains = (
            f"{100 * gain:+.2f} % ({100 * low:+.2f} to {100 * high:+.2f})"
            for gain, low, high in (cell["over_grid_on_dev"], cell["over_grid_on_test"])
        )
        table.add_row(cell["head"], f"{cell['c']:g}", f"{cell['threshold']:g}", *gains)
    return table


if __name__ == "__main__":
    main()
