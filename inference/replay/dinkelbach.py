"""The policy that is fastest, found from the throughput that it reaches itself: Dinkelbach's iteration."""

from __future__ import annotations

from collections.abc import Callable

from accept_head.cost import ForwardCosts
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.walk import Replayed

STEPS = 20  # replays at most; about 5 are enough
CLOSE = 1e-4  # relative: as near as throughputs have to come to each other


def dinkelbach(at: Callable[[float], Replayed], costs: ForwardCosts) -> Replayed:
    """The fastest of the policies at(λ), λ the throughput of the one before; from the target's own on.

    Where at(λ) maximises E[tokens] − λ·E[seconds] of a round, λ rises to the largest throughput there is (Dinkelbach
    1967). A rule that only comes near that maximum can go round in a circle at the end: then the best one counts.
    """
    speed = 1 / costs.t_target
    found: dict[float, Replayed] = {}
    for _ in range(STEPS):
        replayed = at(speed)
        reached = float(throughputs(replayed.counts.sum(0), costs))
        done = reached in found or abs(reached / speed - 1) < CLOSE
        found[reached] = replayed
        if done:
            break
        speed = reached
    return found[max(found)]
