"""Eq. 5.1 against the figures that SpecDec++ prints (arXiv:2405.19715v3).

The project's text of the paper gives throughputs, speed-ups and forward times, but no discard rate and no verification
rate of any row. These rates are only plotted (figures 3 and 5), and theorem 4.1's average |S| was lost with the other
formulas. So eq. 5.1 cannot be recomputed row by row. What can be checked is checked within 1 %:

- autoregressive decoding at the stand-alone forward time gives the printed 9.26 tokens/s;
- every printed speed-up is its throughput over that, and every printed improvement the ratio of two throughputs;
- at the printed forward times, the rates that eq. 3.1 implies for a printed throughput give it back through eq. 5.1,
  for every fixed length K of the paper's sweep; K = 2 would need a negative discard rate for GSM8K;
- eq. 5.1 and theorem 4.1 give the printed oracle speed-up for the one verification rate that fits it.

Gemma (table 4) has speed-ups without forward times, so its figures cannot be put into eq. 5.1.
"""

import pytest

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

WITHIN = 0.01

# Section 5.2 and table 2, rows "average" of SpecDec (0.0236, 0.112) and SpecDec++ (0.0231, 0.111), and their mean.
COSTS = ForwardCosts(t_draft=0.0234, t_target=0.112)
TABLE_2_AVERAGES = [(0.0236, 0.112), (0.0231, 0.111)]
# Table 2, row "average" of the stand-alone setting, and section 4.1: "the average throughput for the target model".
STAND_ALONE = ForwardCosts(t_draft=0.0207, t_target=0.108)
STAND_ALONE_THROUGHPUT = 9.26

# Table 1, tokens/s, and the abstract and introduction: speed-ups, and improvements of SpecDec++ over the baseline.
# (The list of contributions exchanges the improvements of GSM8K and HumanEval; the abstract is the one that fits.)
TABLE_1 = {
    # dataset: SpecDec++, SpecDec (baseline), speed-up of each, improvement in %
    "Alpaca": (18.88, 17.62, 2.04, 1.90, 7.2),
    "HumanEval": (20.61, 18.55, 2.23, 2.00, 11.1),
    "GSM8K": (20.95, 19.14, 2.26, 2.07, 9.4),
}
# Table 3, row "6 | 3" (w_rej 6, depth 3), and the speed-ups and "over 99.3% of the best" of section 5.3.
PUBLISHED_HEAD = {"Alpaca": (18.80, 2.03), "HumanEval": (20.47, 2.21), "GSM8K": (20.95, 2.26)}
# Section 4.1, greedy decoding on Alpaca: oracle speed-up, and throughput and speed-up of the best fixed K.
ORACLE_SPEEDUP, GREEDY_FIXED_THROUGHPUT, GREEDY_FIXED_SPEEDUP = 2.92, 17.58, 1.90
# Section 5.1: the baseline's sweep.
FIXED_LENGTHS = range(2, 15)

ROWS = [
    *[pytest.param(row[0], row[2], id=f"SpecDec++ {name}") for name, row in TABLE_1.items()],
    *[pytest.param(row[1], row[3], id=f"SpecDec {name}") for name, row in TABLE_1.items()],
    *[pytest.param(*row, id=f"published head {name}") for name, row in PUBLISHED_HEAD.items()],
    pytest.param(GREEDY_FIXED_THROUGHPUT, GREEDY_FIXED_SPEEDUP, id="SpecDec greedy Alpaca"),
]


def autoregressive(costs):
    return throughput(costs, discard_rate=0, verification_rate=1)


def rates_of_fixed_length(length, tokens_per_second):
    """(discard rate, verification rate) of a fixed K that reaches this throughput, by eq. 3.1 alone.

    A round costs K·t_draft + t_target and there are v of them per token: 1/thr = v·(K·t_draft + t_target). Of the K·v
    drafted tokens per token, 1 − v are kept (the rest of a token is drawn by the target): discarded = (K + 1)·v − 1.
    """
    verification_rate = 1 / (tokens_per_second * (length * 0.0234 + 0.112))
    return (length + 1) * verification_rate - 1, verification_rate


def test_the_forward_times_are_the_mean_of_table_2():
    for name, column in (("t_draft", 0), ("t_target", 1)):
        assert getattr(COSTS, name) == pytest.approx(sum(row[column] for row in TABLE_2_AVERAGES) / 2, rel=WITHIN)


def test_autoregressive_decoding_has_the_printed_throughput():
    assert autoregressive(STAND_ALONE) == pytest.approx(STAND_ALONE_THROUGHPUT, rel=WITHIN)


@pytest.mark.parametrize(("tokens_per_second", "printed_speedup"), ROWS)
def test_a_printed_speedup_is_the_throughput_over_stand_alone_decoding(tokens_per_second, printed_speedup):
    assert tokens_per_second / autoregressive(STAND_ALONE) == pytest.approx(printed_speedup, rel=WITHIN)


@pytest.mark.parametrize("name", TABLE_1)
def test_a_printed_improvement_is_the_ratio_of_the_throughputs(name):
    policy, baseline, _, _, improvement = TABLE_1[name]
    assert policy / baseline == pytest.approx(1 + improvement / 100, rel=WITHIN)


@pytest.mark.parametrize("name", TABLE_1)
def test_the_published_head_reaches_over_99_3_percent_of_the_best(name):
    assert 0.993 <= PUBLISHED_HEAD[name][0] / TABLE_1[name][0] <= 1


@pytest.mark.parametrize(("tokens_per_second", "printed_speedup"), ROWS)
def test_equation_5_1_gives_a_printed_throughput_from_the_rates_of_equation_3_1(tokens_per_second, printed_speedup):
    for length in FIXED_LENGTHS:
        discard_rate, verification_rate = rates_of_fixed_length(length, tokens_per_second)
        rates = {"discard_rate": discard_rate, "verification_rate": verification_rate}
        assert throughput(COSTS, **rates) == pytest.approx(tokens_per_second, rel=1e-9)
        # `speedup` is relative to the t_target it is given, 0.112 s; the paper's to the stand-alone 0.108 s.
        ours = speedup(COSTS, **rates)
        assert ours * STAND_ALONE.t_target / COSTS.t_target == pytest.approx(printed_speedup, rel=WITHIN)
        assert ours != pytest.approx(printed_speedup, rel=WITHIN)

        counts = DecodeCounts(
            generated=512,
            discarded=discard_rate * 512,
            target_forwards=verification_rate * 512,
            draft_forwards=length * verification_rate * 512,
        )
        seconds = total_time(COSTS, draft_forwards=counts.draft_forwards, target_forwards=counts.target_forwards)
        by_rates = time_per_token(COSTS, discard_rate=counts.discard_rate, verification_rate=counts.verification_rate)
        assert 512 / seconds == pytest.approx(tokens_per_second, rel=1e-9)
        assert seconds / 512 == pytest.approx(by_rates, rel=1e-9)


def test_two_candidates_are_too_few_for_the_throughput_on_gsm8k():
    # All accepted: discard rate 0, verification rate 1/3.  0.0234 + 0.0886/3 = 0.05293 s;  1/0.05293 = 18.89 < 19.14
    best_of_two = throughput(COSTS, discard_rate=0, verification_rate=1 / 3)
    assert best_of_two == pytest.approx(18.89, rel=WITHIN)
    assert TABLE_1["Alpaca"][1] < best_of_two < TABLE_1["GSM8K"][1]
    assert rates_of_fixed_length(2, TABLE_1["GSM8K"][1])[0] < 0, "it would have to discard less than nothing"


def test_the_oracle_of_theorem_4_1_has_the_printed_speedup():
    # 2.92·9.26 = 27.04 tokens/s.  1/27.04 = 0.0234 + 0.0886·v  →  v = (0.036983 − 0.0234)/0.0886 = 0.1533
    oracle_throughput = ORACLE_SPEEDUP * STAND_ALONE_THROUGHPUT
    counts = oracle_counts(generated=10_000, rejections=1532)
    assert (counts.discard_rate, counts.verification_rate) == (0, 0.1533)
    rates = {"discard_rate": counts.discard_rate, "verification_rate": counts.verification_rate}
    assert throughput(COSTS, **rates) == pytest.approx(oracle_throughput, rel=WITHIN)
    assert throughput(COSTS, **rates) / autoregressive(STAND_ALONE) == pytest.approx(ORACLE_SPEEDUP, rel=WITHIN)
    fewer = oracle_counts(generated=10_000, rejections=1400)
    assert throughput(COSTS, discard_rate=0, verification_rate=fewer.verification_rate) != pytest.approx(
        oracle_throughput, rel=WITHIN
    )


def test_the_papers_head_closes_a_seventh_of_the_oracle_gap_on_alpaca():
    """(18.88 − 17.62)/(27.04 − 17.62) = 1.26/9.42 = 0.1338; the oracle is greedy and the rest sampled."""
    closed = oracle_gap_closed(18.88, best_fixed=17.62, oracle=ORACLE_SPEEDUP * STAND_ALONE_THROUGHPUT)
    assert closed == pytest.approx(0.1338, rel=WITHIN)
