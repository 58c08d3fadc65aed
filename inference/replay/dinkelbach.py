"""Dinkelbach's iteration: finds the fastest policy of a family indexed by the policy's own throughput."""

from __future__ import annotations

from collections.abc import Callable

from accept_head.cost import ForwardCosts
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.walk import Replayed

STEPS = 20  # at most; about 5 are enough
CLOSE = 1e-4  # relative change of the throughput at which the iteration ends


def dinkelbach(at: Callable[[float], Replayed], costs: ForwardCosts) -> Replayed:
    """The fastest of the policies at(λ), where λ is the throughput of the previous one; the first λ is the target's.

    If at(λ) maximises E[tokens] − λ·E[seconds] of a round, λ rises to the largest throughput (Dinkelbach 1967). A rule
    that only comes close to that maximum can end in a cycle: then the best policy of the cycle counts.
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
