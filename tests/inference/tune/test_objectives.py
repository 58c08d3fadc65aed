"""The choice among policies with known counts, against resampling with a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from accept_head import InputError
from accept_head.cost import ForwardCosts
from accept_head.inference.replay.walk import Replayed
from accept_head.inference.tune.objectives import objective_of

COSTS = ForwardCosts(t_draft=0.01, t_target=0.1, t_autoregressive=0.1)
GENERATED, CALLS = 100, 40
NONE = np.zeros(1)


def made(discarded, calls, noise=0.0, prompts=60):
    """noise: deviation of the calls from prompt to prompt; their sum stays."""
    generator = np.random.default_rng([discarded, calls])
    offsets = np.round(noise * generator.standard_normal(prompts))
    offsets[0] -= offsets.sum()
    rows = [(GENERATED, discarded, calls + offset, GENERATED - calls + discarded) for offset in offsets]
    return Replayed(
        name=f"{discarded}/{calls}", params={}, counts=np.array(rows), draft_lengths=NONE, at_risk=NONE, accepted=NONE
    )


FIXED = made(50, CALLS)


def chosen(policies, objective="discard", **options):
    value = objective_of(objective, ["a"] * len(FIXED.counts), COSTS, FIXED, **options)
    return max(policies, key=value).name


def share_of_resamples_with_no_more_calls(policy, draws=400):
    generator, count = np.random.default_rng(7), 0
    for _ in range(draws):
        prompts = generator.integers(len(FIXED.counts), size=len(FIXED.counts))
        rates = [one.counts[prompts, 2].sum() / one.counts[prompts, 0].sum() for one in (policy, FIXED)]
        count += rates[0] <= rates[1]
    return count / draws


def test_least_discard_among_those_that_surely_call_no_more():
    often, clear, fewer = made(10, 42), made(30, 38), made(40, 36)
    assert chosen([often, clear, fewer]) == clear.name
    assert chosen([FIXED, fewer]) == fewer.name
    assert chosen([FIXED, made(60, 30)]) == FIXED.name, "exactly as many calls are no more"


@pytest.mark.parametrize(("noise", "sure"), [(1.0, True), (12.0, False)])
def test_fewer_calls_on_these_prompts_are_not_enough(noise, sure):
    """The same sum of calls; what differs is how much prompts differ."""
    by_chance, clear = made(20, 39, noise), made(30, 36)
    assert by_chance.total.verification_rate < FIXED.total.verification_rate
    assert (share_of_resamples_with_no_more_calls(by_chance) > 0.99) == sure
    assert sure or share_of_resamples_with_no_more_calls(by_chance) < 0.95, "too near to tell"
    assert chosen([by_chance, clear]) == (by_chance if sure else clear).name
    assert chosen([by_chance, clear], seed=1) == (by_chance if sure else clear).name


def test_where_all_call_more_the_one_that_calls_least():
    assert chosen([made(10, 45), made(40, 41), made(20, 43)]) == "40/41"


def test_tokens_a_second_look_at_neither():
    """10 ms a drafted token, 100 a target forward: fewer calls are worth more than what they discard."""
    assert chosen([made(10, 42), made(30, 38), made(60, 34)], "mean") == "60/34"


def test_an_unknown_objective_is_refused():
    with pytest.raises(InputError, match=r"'best'.*mean.*worst-domain.*discard"):
        objective_of("best", ["a"], COSTS, FIXED)
