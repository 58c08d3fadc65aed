"""Cost-aware stopping: the closed form against exact sums, and the chosen level against trying all levels.

Also the threshold that it finds against a fine grid, on real traces of the embedded pair.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accept_head import InputError, Sampling
from accept_head.cost import ForwardCosts
from accept_head.head.saved import load_head
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.cumulative_confidence import CumulativeConfidencePolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import Signal
from accept_head.inference.replay import cost_aware as module
from accept_head.inference.replay.comparison import throughputs
from accept_head.inference.replay.cost_aware import cost_aware
from accept_head.inference.replay.dinkelbach import dinkelbach
from accept_head.inference.replay.scores import score_tokens
from accept_head.inference.replay.thresholds import Setting, replay_thresholds, threshold_lengths
from accept_head.inference.replay.walk import replay_fixed, round_starts
from accept_head.pair import input_embeddings
from accept_head.prompts import load_prompts
from tests.inference.support.held_out import PERIOD, Held
from tests.inference.support.made_up import make_sample, samples
from tests.inference.support.rules_by_hand import head_of

FEW = settings(derandomize=True, deadline=None, max_examples=10)
BEFORE, DRAWN = head_of(reads="before", signals=True), head_of(signals=True)
BOTH = head_of(predicts="both")
POLICIES = {
    "before": lambda: HeadPolicy(BEFORE, 0.5),
    "lag 0": lambda: HeadPolicy(DRAWN, 0.5, lag=0),
    "lag 1": lambda: HeadPolicy(DRAWN, 0.5, lag=1),
    "predicts both": lambda: HeadPolicy(BOTH, 0.5, lag=1),
}
RATIOS = (0.05, 0.1, 0.21)


def speed(replayed, costs):
    return float(throughputs(replayed.counts.sum(0), costs))


# --- the closed form (docs/theory.md §5) -----------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.1, 0.21, 0.5])
def test_with_constant_beta_the_closed_form_is_the_best_length(beta, ratio):
    """C_k = β^k. A round of K tokens emits (1 − β^(K+1))/(1 − β) and takes K·c + 1: the best K is the first at which
    1 − C_K > h = 1 − λ·c/β, with λ the throughput at that very K."""
    lengths = np.arange(200)
    speeds = (1 - beta ** (lengths + 1)) / (1 - beta) / (lengths * ratio + 1)
    best = int(speeds.argmax())
    threshold = 1 - speeds[best] * ratio / beta
    assert int((1 - beta**lengths >= threshold).argmax()) == best
    without_beta = int((1 - beta**lengths >= 1 - speeds[best] * ratio).argmax())
    assert best == 0 or without_beta == best + 1


def constant_beta(price, chance=0.6, states=12, rounds=2000):
    """States j with C = 2^−j, where a is 1 with this chance, and else 1/2, so that β is the same everywhere: where the
    best policy stops, by iterating V(j) = max(0, 2^−j·β − price + E[V(next state)]), and where the myopic rule does."""
    gains = 0.5 ** np.arange(states) * (1 + chance) / 2 - price
    values = np.zeros(states + 1)
    for _ in range(rounds):
        goes_on = gains + chance * values[:-1] + (1 - chance) * values[1:]
        values[:-1] = np.maximum(0, goes_on)
    return goes_on <= 1e-12, gains <= 0


def changing_beta(price, betas):
    """a is 0 or 1: while it was 1, after each token, where the best policy stops, and where the myopic rule does."""
    value, stops = 0.0, []
    for beta in betas[::-1]:
        goes_on = beta - price + beta * value
        stops.append(goes_on <= 0)
        value = max(0.0, goes_on)
    return np.array(stops[::-1]), np.array(betas) <= price


@pytest.mark.parametrize("price", [0.03, 0.1, 0.3, 0.6])
def test_the_myopic_rule_is_the_best_where_the_gain_never_rises(price):
    best, myopic = constant_beta(price)
    assert np.array_equal(best, myopic) and myopic.any() and not myopic[0]
    best, myopic = changing_beta(price, [0.9, 0.8, 0.8, 0.5, 0.2, 0.02])
    assert np.array_equal(best, myopic) and myopic.any() and not myopic[0]


def test_the_myopic_rule_stops_too_early_before_a_rise_and_never_too_late():
    best, myopic = changing_beta(0.3, [0.2, *[0.95] * 6])
    assert myopic[0] and not best[0]
    random = np.random.default_rng(0)
    for _ in range(200):
        best, myopic = changing_beta(random.random(), random.random(8).tolist())
        assert (best <= myopic).all()


# --- Dinkelbach ------------------------------------------------------------------------------------------------------


def test_dinkelbach_finds_the_best_of_all_lengths(folder):
    traces = make_sample(3, responses=40, accept=0.8).couple(folder)
    fixed = replay_fixed(traces, range(1, 7))
    for ratio in RATIOS:
        costs, steps = ForwardCosts(t_draft=ratio, t_target=1.0), []

        def at(rate, costs=costs, steps=steps):
            steps.append(rate)

            def gained(replayed):
                """Of a round, in the mean."""
                tokens, _, rounds, drafts = replayed.counts.sum(0)
                return (tokens - rate * (drafts * costs.t_draft + rounds * costs.t_target)) / rounds

            return max(fixed, key=gained)

        found = dinkelbach(at, costs)
        assert found is max(fixed, key=lambda replayed: speed(replayed, costs))
        assert steps == sorted(steps) and len(steps) < 7


def test_a_rule_that_goes_round_in_a_circle_ends_with_its_best(folder):
    fixed = replay_fixed(make_sample(3, responses=40).couple(folder), range(1, 7))
    costs, calls = ForwardCosts(t_draft=0.1, t_target=1.0), []

    def at(rate):
        calls.append(rate)
        return fixed[len(calls) % 3]

    assert dinkelbach(at, costs) is max(fixed[:3], key=lambda replayed: speed(replayed, costs))
    assert len(calls) == 4


# --- the choice of a level -------------------------------------------------------------------------------------------


def gain(traces, policy, starts, threshold, k_max, price):
    """Σ over rounds of accepted tokens − price·draft forwards at a threshold, from the lengths that replay gives."""
    setting = Setting(threshold=threshold, k_max=k_max)
    lengths = threshold_lengths(traces, policy, [setting], score_tokens(traces, policy))[starts, 0].long()
    most = traces.drafts[starts].clamp(max=k_max)
    extra_forwards = (lengths < most) & (policy.lag == 0 and Signal.DRAWN_HIDDEN in policy.reads)
    return float((torch.minimum(lengths, traces.leading[starts]) - price * (lengths + extra_forwards).double()).sum())


@pytest.mark.parametrize("name", POLICIES)
@FEW
@given(sample=samples(k_max=6), k_max=st.integers(2, 6), price=st.floats(0.05, 0.9), begin=st.integers(1, 6))
def test_the_level_is_the_best_of_all_there_are(folder, name, sample, k_max, price, begin):
    traces, policy = sample.couple(folder), POLICIES[name]()
    starts = round_starts(traces, traces.drafts.clamp(max=begin))
    decisions = module._Decisions(traces, policy, k_max)
    level = decisions.best_level(starts, price, 0.0)
    found = gain(traces, policy, starts, 1 - level, k_max, price)
    statistics = decisions.statistic[decisions.statistic.isfinite()].unique().tolist()
    levels = [0.0, 1.0, *((a + b) / 2 for a, b in pairwise(statistics))]
    if len(levels) < 60:
        best = max(gain(traces, policy, starts, 1 - each, k_max, price) for each in levels)
        assert found == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_lengths_are_those_that_replay_gives(folder, name):
    traces, policy = make_sample(4, responses=20, accept=0.8).couple(folder), POLICIES[name]()
    decisions = module._Decisions(traces, policy, 5)
    for threshold in (0.0, 0.21, 0.53, 0.87, 1.0):
        setting = Setting(threshold=threshold, k_max=5)
        lengths = threshold_lengths(traces, policy, [setting], score_tokens(traces, policy))[:, 0]
        assert torch.equal(decisions.lengths(policy.level_of(threshold)), lengths.long())


@pytest.mark.parametrize("changes", [{"max_new_tokens": 1}, {"accept": 1.0, "ends": 0.0}, {"accept": 0.0}])
def test_nothing_to_decide_is_no_trouble(folder, changes):
    traces = make_sample(1, **changes).couple(folder)
    for make in POLICIES.values():
        threshold, found = cost_aware(traces, make(), ForwardCosts(t_draft=0.1, t_target=1.0))
        assert 0 <= threshold <= 1 and found.params["threshold"] == threshold


def test_params_are_those_of_a_threshold_rule(folder):
    traces, costs = make_sample(4, responses=20).couple(folder), ForwardCosts(t_draft=0.1, t_target=1.0)
    threshold, found = cost_aware(traces, POLICIES["lag 1"](), costs, name="head:x", k_max=4)
    assert found.params == {"threshold": threshold, "k_min": 1, "k_max": 4, "lag": 1}
    assert found.name == f"head:x:{threshold:g}" and round(threshold, 4) == threshold
    setting = Setting(threshold=threshold, k_max=4)
    (again,) = replay_thresholds(traces, POLICIES["lag 1"](), [setting], "head:x")
    assert np.array_equal(again.counts, found.counts)


@pytest.mark.parametrize("policy", [ConfidencePolicy(0.5), CumulativeConfidencePolicy(0.5)])
def test_rules_that_predict_nothing_are_refused_by_name(folder, policy):
    traces = make_sample(1).couple(folder)
    with pytest.raises(InputError, match=type(policy).__name__):
        cost_aware(traces, policy, ForwardCosts(t_draft=0.1, t_target=1.0))


def test_longer_rounds_than_the_rollouts_are_refused(folder):
    traces = make_sample(1, k_max=4).couple(folder)
    with pytest.raises(InputError, match="up to 5 tokens"):
        cost_aware(traces, POLICIES["before"](), ForwardCosts(t_draft=0.1, t_target=1.0), k_max=5)


# --- the embedded pair -----------------------------------------------------------------------------------------------

REAL = {"sampled": Sampling(top_k=0), "greedy": Sampling(temperature=0)}


@pytest.fixture(scope="module")
def real(embedded_pair, embedded_pair_folder, tmp_path_factory):
    """real(name, prompts, tokens) → traces of held-out prompts, and the shipped head."""
    path = str(embedded_pair_folder / "prompts" / "dev.jsonl")

    def make(name, count, tokens):
        prompts = [list(p.ids[:32]) for p in load_prompts(path, embedded_pair.tokenizer, max_prompts=count)]
        held = Held(embedded_pair, prompts, tmp_path_factory.mktemp(name) / "traces", REAL[name], [PERIOD], tokens)
        options = {"hidden_size": 128, "embeddings": input_embeddings(embedded_pair.draft)}
        return held.traces, load_head(str(embedded_pair_folder / "heads" / name), **options)

    return make


def shortfalls(traces, head):
    """Behind the best threshold of a fine grid at each ratio: of cost-aware stopping, and of the level λ·t_draft
    itself, as if C_k were the whole chance that the next token is accepted."""
    policy = HeadPolicy(head, 0.5)
    grid = [Setting(threshold=t, k_max=traces.k_max) for t in np.linspace(0.02, 0.98, 49).round(2).tolist()]
    tried, found = replay_thresholds(traces, policy, grid, "head"), []
    for ratio in RATIOS:
        costs = ForwardCosts(t_draft=ratio, t_target=1.0)
        best = max(speed(replayed, costs) for replayed in tried)
        _, mine = cost_aware(traces, policy, costs)
        naive = Setting(threshold=max(0.0, 1 - speed(mine, costs) * ratio), k_max=traces.k_max)
        (other,) = replay_thresholds(traces, policy, [naive], "head")
        found.append([1 - speed(replayed, costs) / best for replayed in (mine, other)])
    return np.array(found)


def test_it_is_near_the_best_threshold_of_a_grid(real):
    """On 1,000 tokens the best of a grid owes some of its speed to chance: 0.5 % takes more (below)."""
    mine, naive = shortfalls(*real("sampled", 48, 32)).max(0)
    assert mine < 0.015 < naive


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_it_is_within_half_a_percent_of_the_best_threshold_of_a_grid(real, name):
    mine, naive = shortfalls(*real(name, 160, 80)).max(0)
    assert mine < min(0.005, naive)
