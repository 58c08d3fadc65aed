"""Costs (eqs 3.1, 3.2, 5.1) against calculations by hand, and the oracle (theorem 4.1) against every schedule."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accept_head.cost import (
    DecodeCounts,
    ForwardCosts,
    oracle_counts,
    oracle_gap_closed,
    speedup,
    throughput,
    time_per_token,
    total_time,
)
from accept_head.errors import InputError

COSTS = ForwardCosts(t_draft=0.02, t_target=0.1)

# Three rounds that draft 4 tokens each and accept 4, 1 and 2 of them:
#   N = (4 + 1) + (1 + 1) + (2 + 1) = 10     N_discarded = 0 + 3 + 2 = 5     N_target = 3     N_draft = 3·4 = 12
COUNTS = DecodeCounts(generated=10, discarded=5, target_forwards=3, draft_forwards=12)


def test_total_time_is_equation_3_1():
    # 0.02·12 + 0.1·3 = 0.24 + 0.30
    assert total_time(COSTS, draft_forwards=12, target_forwards=3) == pytest.approx(0.54, rel=1e-12)


def test_rates_are_counts_per_generated_token():
    assert COUNTS.discard_rate == 0.5  # 5 / 10
    assert COUNTS.verification_rate == 0.3  # 3 / 10
    assert COUNTS.block_efficiency == pytest.approx(10 / 3)
    assert COSTS.ratio == pytest.approx(0.2)  # 0.02 / 0.1


def test_time_per_token_is_equation_5_1():
    # 0.02 + 0.02·0.5 + (0.1 − 0.02)·0.3 = 0.020 + 0.010 + 0.024 = 0.054 s
    # 1 / 0.054 = 18.5185…     0.1 / 0.054 = 1.85185…
    rates = {"discard_rate": 0.5, "verification_rate": 0.3}
    assert time_per_token(COSTS, **rates) == pytest.approx(0.054, rel=1e-12)
    assert throughput(COSTS, **rates) == pytest.approx(18.518518518518519, rel=1e-12)
    assert speedup(COSTS, **rates) == pytest.approx(1.8518518518518519, rel=1e-12)


def test_autoregressive_decoding_has_a_speedup_of_one():
    assert speedup(COSTS, discard_rate=0, verification_rate=1) == pytest.approx(1, rel=1e-12)


positive = st.floats(1e-4, 10, allow_nan=False)


@settings(derandomize=True, deadline=None)
@given(positive, positive, st.integers(1, 5000), st.integers(0, 5000), st.data())
def test_equation_3_1_is_the_generated_tokens_times_equation_5_1(t_draft, t_target, generated, discarded, data):
    target_forwards = data.draw(st.integers(1, generated))
    counts = DecodeCounts(
        generated=generated,
        discarded=discarded,
        target_forwards=target_forwards,
        draft_forwards=generated + discarded - target_forwards,
    )
    costs = ForwardCosts(t_draft=t_draft, t_target=t_target)
    by_rates = generated * time_per_token(
        costs, discard_rate=counts.discard_rate, verification_rate=counts.verification_rate
    )
    by_counts = total_time(costs, draft_forwards=counts.draft_forwards, target_forwards=counts.target_forwards)
    assert by_counts == pytest.approx(by_rates, rel=1e-9)


def test_counts_are_added_before_rates_are_taken():
    other = DecodeCounts(generated=30, discarded=1, target_forwards=5, draft_forwards=26)
    total = DecodeCounts.total([COUNTS, other])
    assert total == DecodeCounts(generated=40, discarded=6, target_forwards=8, draft_forwards=38)
    assert total == COUNTS + other
    assert total.discard_rate == 0.15  # 6 / 40, whereas the mean of the two rates is (0.5 + 0.0333) / 2 = 0.2667


@pytest.mark.parametrize("value", [0, 0.0, -0.1, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["t_draft", "t_target"])
def test_a_forward_time_that_is_no_positive_number_is_an_input_error_that_names_it(field, value):
    with pytest.raises(InputError, match=f"^{field} is "):
        ForwardCosts(**{"t_draft": 0.02, "t_target": 0.1, field: value})


# --- the oracle: positions 1..N of a response, each with "would the draft's proposal be accepted here"


def schedules(accepted, start=0):
    """The counts of every stopping schedule: at each round every candidate length that can still matter."""
    remaining = len(accepted) - start
    if remaining == 0:
        yield (0, 0)
        return
    for length in range(remaining + 1):
        matched = next((k for k in range(length) if not accepted[start + k]), length)
        emitted = min(matched + 1, remaining)
        for draft_forwards, target_forwards in schedules(accepted, start + emitted):
            yield (length + draft_forwards, 1 + target_forwards)


def cheapest(accepted, costs):
    return min(total_time(costs, draft_forwards=d, target_forwards=t) for d, t in set(schedules(accepted)))


def oracle_time(generated, rejections, costs):
    counts = oracle_counts(generated=generated, rejections=rejections)
    return total_time(costs, draft_forwards=counts.draft_forwards, target_forwards=counts.target_forwards)


RATIOS = [ForwardCosts(t_draft=c, t_target=1.0) for c in (0.01, 0.2, 0.9)]
PATTERNS = [pattern for length in range(1, 7) for pattern in itertools.product([True, False], repeat=length)]


@pytest.mark.parametrize("costs", RATIOS, ids=lambda costs: f"c={costs.ratio}")
def test_the_oracle_is_the_cheapest_of_all_schedules(costs):
    """S is counted before the last position: the round that stops just before that one emits it either way."""
    for accepted in PATTERNS:
        found = oracle_time(len(accepted), accepted[:-1].count(False), costs)
        assert found == pytest.approx(cheapest(accepted, costs), rel=1e-12), accepted


def test_one_rejection_in_six_tokens_costs_the_oracle_two_target_and_four_draft_forwards():
    # accept, accept, REJECT, accept, accept, accept: draft 2 and verify (emits 3), draft 2 and verify (emits 3).
    counts = oracle_counts(generated=6, rejections=1)
    assert counts == DecodeCounts(generated=6, discarded=0, target_forwards=2, draft_forwards=4)


def test_the_share_of_the_oracle_gap_is_zero_at_the_best_fixed_length_and_one_at_the_oracle():
    assert oracle_gap_closed(18.0, best_fixed=18.0, oracle=27.0) == 0
    assert oracle_gap_closed(27.0, best_fixed=18.0, oracle=27.0) == 1
    assert oracle_gap_closed(20.25, best_fixed=18.0, oracle=27.0) == 0.25  # 2.25 / 9
    assert oracle_gap_closed(16.2, best_fixed=18.0, oracle=27.0) == pytest.approx(-0.2)  # −1.8 / 9: worse than fixed
