"""The figures of `accept-head bench` against numbers made here: order of runs, speeds, noise, attainment, timelines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accept_head import Sampling
from accept_head.cost import ForwardCosts
from accept_head.inference import make_policy
from accept_head.inference.bench.arms import arm_maker, resolved
from accept_head.inference.bench.arrivals import Arrival
from accept_head.inference.bench.figures import (
    SLO_SCALES,
    TWIN,
    Cell,
    attainment,
    fixed_by_domain,
    noise_floor,
    priced,
    rows,
    slo_limits,
    times_per_token,
)
from accept_head.inference.bench.measure import Chunk, Stage, Timed, count_oracle, make_chunks, side_by_side, warm_up
from accept_head.inference.bench.replay import (
    Replay,
    Step,
    latency_noise,
    replay_rows,
    time_scale_for,
    timeline,
    trace_requests,
)
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.rows import DecodeStats, Finished
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine import cache
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.prompts import Prompt
from tests.inference.support.replayed import standing_in
from tests.inference.support.toy import TOKENS, pair_of, ragged_prompts, toy_pair, two

NAMES = ("none", "fixed:1", "fixed:2", "rule", "fixed:2" + TWIN)


def stats(generated=10, drafted=8, submitted=6, accepted=4, rounds=5, draft_forwards=9, seconds=1.0):
    return DecodeStats(
        generated=generated,
        drafted=drafted,
        submitted=submitted,
        accepted=accepted,
        rounds=rounds,
        draft_forwards=draft_forwards,
        seconds=seconds,
    )


def requests(count, tokens=8):
    return make_requests([[1 + index % 3] * (1 + index % 5) for index in range(count)], tokens)


# --- chunks, and the order of runs ------------------------------------------------------------------------------------


def test_chunks_are_of_one_domain_and_hold_every_request_once():
    domains = ["a"] * 23 + ["b"] * 9 + ["c"] * 40
    chunks = make_chunks(requests(72), domains, batch=4)
    assert sorted(request.index for chunk in chunks for request in chunk.requests) == list(range(72))
    for chunk in chunks:
        assert {domains[request.index] for request in chunk.requests} == {chunk.domain}
        assert 8 <= len(chunk.requests) <= 12  # twice the batch, and what is left over spread
    assert [chunk.domain for chunk in chunks] != sorted(chunk.domain for chunk in chunks)
    assert make_chunks(requests(72), domains, batch=4) == chunks != make_chunks(requests(72), domains, batch=4, seed=1)


@pytest.mark.parametrize(("batch", "sizes"), [(1, [4, 4, 4]), (16, [12]), (3, [6, 6])])
def test_mixed_chunks_are_as_large_as_they_should_be(batch, sizes):
    chunks = make_chunks(requests(12), [None] * 12, batch=batch)
    assert [len(chunk.requests) for chunk in chunks] == sizes
    assert {chunk.domain for chunk in chunks} == {None}


def test_every_arm_runs_on_a_chunk_before_the_next_and_keeps_its_policy_within_a_repeat():
    made, ran = [], []

    def maker(name):
        def make():
            made.append(SimpleNamespace(name=name))
            return made[-1]

        return make

    def time(these, policy, seed):
        ran.append((tuple(request.index for request in these), policy, seed))
        return 1.0, 0.5, 3, []

    chunks = [Chunk(None, requests(6)[start : start + 2]) for start in (0, 2, 4)]
    arms = {name: maker(name) for name in NAMES}
    runs = list(side_by_side(SimpleNamespace(time=time), arms, chunks, repeats=2, seed=5))
    assert len(made) == 2 * len(NAMES)
    orders = []
    for start in range(0, len(runs), len(NAMES)):
        part, seen = runs[start : start + len(NAMES)], ran[start : start + len(NAMES)]
        (place,) = {(run.repeat, run.chunk) for run in part}
        assert {indexes for indexes, _, _ in seen} == {tuple(r.index for r in chunks[place[1]].requests)}
        assert {seed for _, _, seed in seen} == {5 + place[0]}
        assert sorted(run.arm for run in part) == sorted(NAMES)
        assert [policy.name for _, policy, _ in seen] == [run.arm for run in part]
        orders.append([run.arm for run in part])
    assert len(set(map(tuple, orders))) > 2
    for repeat in (0, 1):
        of_repeat = [policy for (_, policy, _), run in zip(ran, runs, strict=True) if run.repeat == repeat]
        assert len(set(map(id, of_repeat))) == len(NAMES)
    assert (runs[0].wall, runs[0].cpu, runs[0].rounds) == (1.0, 0.5, 3)


# --- a cell's figures -------------------------------------------------------------------------------------------------


def made_cell(seed=0, repeats=2, domains=("a", "b", "a", "b", "b")):
    """A cell of random runs, and the same numbers as plain arrays (arm, repeat, chunk)."""
    random = np.random.default_rng(seed)
    shape = (len(NAMES), repeats, len(domains))
    wall, cpu = random.uniform(1, 3, shape), random.uniform(0.5, 1, shape)
    tokens = random.integers(20, 90, shape)
    runs = []
    for repeat in range(repeats):
        for chunk in range(len(domains)):
            for arm in random.permutation(len(NAMES)):
                done = [
                    Finished(
                        SimpleNamespace(index=10 * chunk + half),
                        [int(arm == 3 and half and repeat), chunk],
                        stats(generated=int(part), seconds=float(random.uniform(1, 2))),
                    )
                    for half, part in enumerate((7, tokens[arm, repeat, chunk] - 7))
                ]
                place = arm, repeat, chunk
                runs.append(Timed(repeat, chunk, NAMES[arm], wall[place], cpu[place], 4, done))
    chunks = [Chunk(domain, []) for domain in domains]
    cell = Cell(runs, chunks, NAMES, ["fixed:1", "fixed:2"], "fixed:2")
    return SimpleNamespace(cell=cell, runs=runs, tokens=tokens, seconds=wall)


def by_name(table):
    return {row["name"]: row for row in table}


def test_speeds_and_gains_are_ratios_of_sums():
    made = made_cell()
    speeds = made.tokens.sum((1, 2)) / made.seconds.sum((1, 2))
    best = max(speeds[1], speeds[2])
    table = by_name(rows(made.cell, same_tokens=True))
    assert list(table) == list(NAMES)
    for index, name in enumerate(NAMES):
        assert table[name]["throughput"] == pytest.approx(speeds[index])
        assert table[name]["speedup"] == pytest.approx(speeds[index] / speeds[0])
        assert table[name]["gain_over_best_fixed"] == pytest.approx(speeds[index] / best - 1)
    assert made.cell.best_fixed() == ("fixed:1" if best == speeds[1] else "fixed:2")


def test_the_interval_of_a_ratio_is_of_chunks_drawn_for_both_arms_together():
    """An arm that is 1.3 x another on each chunk is so in each resample, however uneven the chunks are."""
    chunks = [Chunk("a", [])] * 6
    runs = []
    for chunk in range(6):
        for name, speed in (("none", 1.0), ("fixed:1", 1.3), ("fixed:1" + TWIN, 1.3)):
            done = [Finished(SimpleNamespace(index=chunk), [1], stats(generated=10 + 50 * chunk))]
            runs.append(Timed(0, chunk, name, (chunk + 1) ** 2 / speed, 1.0, 1, done))
    cell = Cell(runs, chunks, ["none", "fixed:1", "fixed:1" + TWIN], ["fixed:1"], "fixed:1")
    table = by_name(rows(cell, same_tokens=False))
    assert table["fixed:1"]["ci95"]["speedup"] == pytest.approx([1.3, 1.3])
    assert table["none"]["ci95"]["gain_over_best_fixed"] == pytest.approx([1 / 1.3 - 1, 1 / 1.3 - 1])
    low, high = table["fixed:1"]["ci95"]["throughput"]
    assert low < table["fixed:1"]["throughput"] < high and high > 1.2 * low
    assert noise_floor(cell)["floor"] == pytest.approx(0)
    assert table["none"]["beyond_noise"]


def test_where_all_chunks_are_equally_fast_however_long_the_interval_is_a_point():
    runs = []
    for chunk, tokens in enumerate((10, 70, 300, 20)):
        for name in ("none", "fixed:1", "fixed:1" + TWIN):
            done = [Finished(SimpleNamespace(index=chunk), [1], stats(generated=tokens))]
            runs.append(Timed(0, chunk, name, tokens / 7, 1.0, 1, done))
    cell = Cell(runs, [Chunk("a", [])] * 4, ["none", "fixed:1", "fixed:1" + TWIN], ["fixed:1"], "fixed:1")
    for row in rows(cell, same_tokens=False):
        assert row["ci95"]["throughput"] == pytest.approx([7, 7])


def test_rates_come_from_counts():
    row = by_name(rows(made_cell().cell, same_tokens=True))["rule"]
    generated, responses = row["counts"]["generated"], 2 * 5 * 2
    assert row["counts"]["drafted"] == 8 * responses
    assert row["discard_rate"] == pytest.approx(4 * responses / generated)
    assert row["verification_rate"] == pytest.approx(5 * responses / generated)
    assert row["block_efficiency"] == pytest.approx(1 / row["verification_rate"])
    assert (row["mean_drafted"], row["mean_submitted"]) == (8 / 5, 6 / 5)
    assert row["mean_live_rows"] == pytest.approx(5 * responses / (4 * 10))


def test_responses_that_are_not_the_targets_own_are_counted_and_nowhere_else():
    table = by_name(rows(made_cell().cell, same_tokens=True))
    # The rule's second response of each chunk begins with another token in the second repeat.
    assert {name: row["differs_from_none"] for name, row in table.items()} == {**dict.fromkeys(NAMES, 0), "rule": 5}
    assert all(row["differs_from_none"] is None for row in rows(made_cell().cell, same_tokens=False))


def test_the_noise_floor_is_the_spread_of_two_runs_of_one_policy():
    made = made_cell()
    floor = noise_floor(made.cell, seed=3)
    first, second = (made.tokens[index] / made.seconds[index] for index in (2, 4))
    per_chunk = np.abs(second / first - 1).ravel()
    assert floor["name"] == "fixed:2"
    assert floor["per_chunk"]["p50"] == pytest.approx(np.median(per_chunk))
    assert floor["per_chunk"]["p100"] == pytest.approx(per_chunk.max())
    whole = [made.tokens[index].sum() / made.seconds[index].sum() for index in (2, 4)]
    assert floor["ratio"] == pytest.approx(whole[1] / whole[0])
    assert floor["per_repeat"] == pytest.approx(
        [
            abs(
                made.tokens[4, r].sum()
                / made.seconds[4, r].sum()
                / (made.tokens[2, r].sum() / made.seconds[2, r].sum())
                - 1
            )
            for r in (0, 1)
        ]
    )
    low, high = floor["ratio_ci95"]
    assert low < floor["ratio"] < high
    assert floor["floor"] == pytest.approx(max(1 - low, high - 1))
    for row in rows(made.cell, same_tokens=True, seed=3):
        assert row["noise_floor"] == floor["floor"]
        assert row["beyond_noise"] == (abs(row["gain_over_best_fixed"]) > floor["floor"])


def test_the_best_fixed_length_of_each_domain():
    made = made_cell()
    of_a, of_b = [0, 2], [1, 3, 4]
    speeds = {
        domain: made.tokens[..., which].sum((1, 2)) / made.seconds[..., which].sum((1, 2))
        for domain, which in (("a", of_a), ("b", of_b))
    }
    best = {domain: max((1, 2), key=lambda arm: values[arm]) for domain, values in speeds.items()}
    found = fixed_by_domain(made.cell)
    assert found["names"] == {domain: NAMES[arm] for domain, arm in best.items()}
    tokens = sum(made.tokens[best[d]][:, which].sum() for d, which in (("a", of_a), ("b", of_b)))
    seconds = sum(made.seconds[best[d]][:, which].sum() for d, which in (("a", of_a), ("b", of_b)))
    assert found["throughput"] == pytest.approx(tokens / seconds)
    table = by_name(rows(made.cell, same_tokens=True))
    assert table["rule"]["domains"] == pytest.approx({"a": speeds["a"][3], "b": speeds["b"][3]})
    speed = table["rule"]["throughput"]
    assert table["rule"]["gain_over_best_fixed_per_domain"] == pytest.approx(speed * seconds / tokens - 1)


def test_mixed_chunks_say_nothing_of_domains():
    made = made_cell(domains=(None, None))
    assert fixed_by_domain(made.cell) == {"names": {}, "throughput": None}
    row = by_name(rows(made.cell, same_tokens=True))["rule"]
    assert row["gain_over_best_fixed_per_domain"] is None and row["domains"] == {}


def test_raw_seconds_and_tokens_are_kept_in_the_order_of_repeats_and_chunks():
    made = made_cell()
    for index, row in enumerate(rows(made.cell, same_tokens=True)):
        assert row["chunks"]["generated"] == made.tokens[index].ravel().tolist()
        assert row["chunks"]["seconds"] == pytest.approx(made.seconds[index].ravel())
    assert [len(order) for order in made.cell.order] == [len(NAMES)] * 10
    assert made.cell.order[7] == [run.arm for run in made.runs if (run.repeat, run.chunk) == (1, 2)]


# --- the limit of time per token --------------------------------------------------------------------------------------


def test_attainment_is_the_share_within_a_multiple_of_p90_of_the_target_alone():
    random = np.random.default_rng(1)
    alone, policy = (
        [stats(generated=int(random.integers(1, 60)), seconds=random.gamma(2, 1)) for _ in range(count)]
        for count in (41, 37)
    )
    paces = sorted(row.seconds / row.generated for row in alone)
    p90 = paces[36]  # 0.9 · 40 = 36, so that no interpolation is needed
    limits = slo_limits(alone)
    assert limits == pytest.approx({f"{scale:g}": scale * p90 for scale in SLO_SCALES})
    assert list(limits) == ["0.8", "0.9", "1", "1.1", "1.2"]
    shares = attainment(times_per_token(policy), limits)
    for scale in SLO_SCALES:
        within = sum(row.seconds / row.generated <= scale * p90 for row in policy)
        assert shares[f"{scale:g}"] == pytest.approx(within / 37)
    assert attainment(times_per_token(alone), limits)["1"] == pytest.approx(37 / 41)


def test_a_spec_can_ask_for_the_limit():
    assert resolved("adaspec:c.json,slo_ms=p90,k_max=4", 0.0123456) == "adaspec:c.json,slo_ms=12.3456,k_max=4"
    assert resolved("fixed:3", 0.5) == "fixed:3"


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_a_policy_that_is_captured_is_made_once_and_any_other_anew():
    pair = toy_pair()
    for name, once in (("fixed:2", True), ("max-prob:0.5", True), ("dsde:3", True), ("hf-confidence:0.4", False)):
        make = arm_maker(name, pair)
        assert (make() is make()) == once, name


def test_what_the_warm_up_has_captured_serves_all_runs_of_a_policy(monkeypatch):
    """No policy pays for its graphs while it is timed, however many it has; also not in another repeat. One that learns
    begins each run anew."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)
    pair, names = near_pair(), ["none", "fixed:2", "max-prob:0.6,k_max=3", "fixed:3,costs=0.2"]
    names += ["adaedl:0.4,k_max=3", "dsde:2,k_max=3", "hf-heuristic:2,k_max=3", "online-logistic:0.4,k_max=3"]
    arms = {name: arm_maker(name, pair) for name in names}
    with standing_in() as backend:
        stage, these = staged(pair, ragged_prompts(2, longest=8), 20, Sampling(temperature=0), 2, 3, compile="graphs")
        warm_up(stage, arms, these)
        captured = backend.captures
        timed = list(side_by_side(stage, arms, [Chunk(None, these)], repeats=2, seed=0))
    assert len(timed) == 2 * len(names) and backend.captures == captured > 0


# --- the oracle -------------------------------------------------------------------------------------------------------


def staged(pair, prompts, tokens, sampling, batch, longest=20, compile="none"):
    these = make_requests(prompts, tokens)
    decoder = make_decoder(
        pair.target,
        pair.draft,
        these,
        FixedPolicy(longest),
        batch_size=batch,
        greedy=sampling.greedy,
        compile=compile,
    )
    stage = Stage(decoder, replace(pair, tokenizer=None), sampling)
    stage.stopping = Stopping([], [], torch.device("cpu"))
    return stage, these


def near_pair():
    from transformers import LlamaConfig, LlamaForCausalLM

    return pair_of(*two(LlamaForCausalLM, LlamaConfig, noise=0.2))


@pytest.mark.parametrize("batch", [1, 4])
def test_the_oracles_rejections_are_where_the_draft_would_say_something_else(batch):
    pair, tokens = near_pair(), 24
    prompts = ragged_prompts(6, longest=12)
    stage, these = staged(pair, prompts, tokens, Sampling(temperature=0), batch)
    counts = count_oracle(stage, these, 0)
    rejections = []
    for done in stage.run(these, FixedPolicy(0), 0):
        text = torch.tensor([[*done.request.prompt, *done.token_ids]])
        said = pair.draft(text).logits[0, len(done.request.prompt) - 1 : -1].argmax(-1)
        wrong = int((said != text[0, len(done.request.prompt) :])[:-1].sum())  # all positions but the last
        found = counts[done.request.index]
        assert (found.generated, found.discarded) == (len(done.token_ids), 0)
        assert found.target_forwards == wrong + 1
        assert found.draft_forwards == found.generated - found.target_forwards
        rejections.append(wrong)
    assert 0 < sum(rejections) < 6 * (tokens - 1)


def test_a_draft_that_is_the_target_leaves_the_oracle_one_verification_however_long_the_response():
    pair = near_pair()
    stage, these = staged(
        pair_of(pair.target, pair.target), ragged_prompts(3, longest=10), 50, Sampling(temperature=0), 2
    )
    assert {counts.target_forwards for counts in count_oracle(stage, these, 0).values()} == {1}


def test_prices_are_of_counts_not_of_clocks():
    """Arms are timed at random here; their prices follow from eq. 3.1 and their own forwards."""
    pair, tokens = near_pair(), 16
    prompts = ragged_prompts(5, longest=10)
    stage, these = staged(pair, prompts, tokens, Sampling(temperature=0), 5)
    names, runs = ["none", "fixed:1", "fixed:4", "fixed:4" + TWIN], []
    for arm, name in enumerate(names):
        done = list(stage.run(these, make_policy(name.removesuffix(TWIN), pair.draft), 0))
        runs.append(Timed(0, 0, name, 1.0 + arm, 1.0, 9, done))
    cell = Cell(runs, [Chunk(None, these)], names, ["fixed:1", "fixed:4"], "fixed:4")
    costs = ForwardCosts(t_draft=0.01, t_target=0.1)
    prices = priced(cell, count_oracle(stage, these, 0), costs)
    assert list(prices) == ["none", "fixed:1", "fixed:4", "oracle"]
    for name in names[:3]:
        total = [done.stats for done in cell.finished[name]]
        seconds = sum(0.01 * row.draft_forwards + 0.1 * row.rounds for row in total)
        assert prices[name]["throughput"] == pytest.approx(sum(row.generated for row in total) / seconds)
    best = max(prices["fixed:1"]["throughput"], prices["fixed:4"]["throughput"])
    gap = prices["oracle"]["throughput"] - best
    assert gap > 0
    assert prices["none"]["oracle_gap_closed"] == pytest.approx((prices["none"]["throughput"] - best) / gap)


# --- traces -----------------------------------------------------------------------------------------------------------


def asked(*prompts):
    return [Prompt(i, "", "", tuple(ids), tenant=f"t{i}", k_max=i) for i, ids in enumerate(prompts)]


def test_a_trace_becomes_requests_with_its_own_lengths():
    arrivals = [Arrival(0.0, 9, 50), Arrival(1.0, 2, 3), Arrival(2.0, 5, 1)]
    found, by = trace_requests(arrivals, asked([1] * 5, [2] * 9, [3] * 2), max_new_tokens=20)
    assert by == "length"
    assert [(r.index, list(r.prompt), r.max_new_tokens) for r in found] == [
        (0, [2] * 9, 20),
        (1, [3] * 2, 3),
        (2, [1] * 5, 1),
    ]
    assert [(r.tenant, r.k_max) for r in found] == [("t1", 1), ("t2", 2), ("t0", 0)]
    again, by = trace_requests([Arrival(0.0, 900, 5)] * 3, asked([1, 2]), max_new_tokens=20)
    assert by == "order" and len({request.key for request in again}) == 3  # the same prompt, other random numbers


def test_the_time_scale_makes_the_load_what_it_should_be():
    scale = time_scale_for(0.8, busy=40.0, span=1000.0)
    assert 40.0 / (scale * 1000.0) == pytest.approx(0.8)
    assert time_scale_for(0.8, busy=40.0, span=0.0) == 0


def made_replays():
    arrivals = [0.0, 1.0, 1.5]
    table = {
        # repeat, arm: handed, ended, seconds of each response
        (0, "none"): ([0.0, 1.0, 2.0], [2.0, 3.0, 5.5], [2.0, 2.0, 3.5]),
        (0, "fixed:1"): ([0.0, 1.0, 1.5], [1.0, 2.0, 3.0], [1.0, 1.0, 1.5]),
        (0, "fixed:1" + TWIN): ([0.0, 1.0, 1.5], [1.0, 2.2, 3.0], [1.0, 1.2, 1.5]),
        (1, "none"): ([0.0, 1.0, 2.5], [2.5, 3.5, 6.0], [2.5, 2.5, 3.5]),
        (1, "fixed:1"): ([0.0, 1.0, 1.5], [1.5, 2.5, 3.0], [1.5, 1.5, 1.5]),
        (1, "fixed:1" + TWIN): ([0.0, 1.0, 1.5], [1.5, 2.0, 3.0], [1.5, 1.0, 1.5]),
    }
    replays = []
    for (repeat, arm), (handed, ended, seconds) in table.items():
        done = [
            Finished(SimpleNamespace(index=index), [7, int(arm == "fixed:1" and index == 2)], stats(seconds=value))
            for index, value in enumerate(seconds)
        ]
        steps = [Step(time, torch.tensor([2, 0]), torch.tensor([True, False])) for time in ended]
        replays.append(Replay(repeat, arm, handed, ended, done[::-1], steps))
    return arrivals, replays


def test_latency_queueing_and_attainment_of_a_replay():
    arrivals, replays = made_replays()
    table, limits = replay_rows(replays, ["none", "fixed:1", "fixed:1" + TWIN], arrivals, same_tokens=True)
    found = by_name(table)
    latencies = {"none": [2.0, 2.0, 4.0, 2.5, 2.5, 4.5], "fixed:1": [1.0, 1.0, 1.5, 1.5, 1.5, 1.5]}
    for name, values in latencies.items():
        assert found[name]["latency"]["mean"] == pytest.approx(np.mean(values))
        assert found[name]["latency"]["p90"] == pytest.approx(np.percentile(values, 90))
    assert found["fixed:1"]["latency_speedup"] == pytest.approx(
        np.mean(latencies["none"]) / np.mean(latencies["fixed:1"])
    )
    assert found["none"]["queueing"]["mean"] == pytest.approx((0.5 + 1.0) / 6)
    assert found["fixed:1"]["queueing"]["p99"] == 0
    assert limits["1"] == pytest.approx(np.percentile([0.2, 0.2, 0.35, 0.25, 0.25, 0.35], 90))
    assert found["none"]["slo_attainment"]["0.8"] == pytest.approx(4 / 6)
    assert found["fixed:1"]["slo_attainment"]["0.8"] == 1
    assert found["none"]["throughput"] == pytest.approx(60 / (5.5 + 6.0))
    assert [row["differs_from_none"] for row in table] == [0, 2, 0]
    assert all(
        row["differs_from_none"] is None for row in replay_rows(replays, list(found), arrivals, same_tokens=False)[0]
    )


def test_the_noise_of_a_replay_is_that_of_its_twin():
    arrivals, replays = made_replays()
    noise = latency_noise(replays[::-1], arrivals, "fixed:1")
    first, second = np.array([1.0, 1.0, 1.5, 1.5, 1.5, 1.5]), np.array([1.0, 1.2, 1.5, 1.5, 1.0, 1.5])
    assert noise["floor"] == pytest.approx(abs(second.mean() / first.mean() - 1))
    assert noise["per_request"]["p90"] == pytest.approx(np.percentile(np.abs(second / first - 1), 90))


def test_a_timeline_is_means_over_the_rounds_of_each_bin():
    on, off = True, False
    steps = [
        Step(0.5, torch.tensor([3, 0]), torch.tensor([on, off])),
        Step(1.0, torch.tensor([1, 5]), torch.tensor([on, on])),
        Step(7.9, torch.tensor([0, 0]), torch.tensor([on, on])),
        Step(8.0, torch.tensor([4]), torch.tensor([on])),
    ]
    line = timeline(steps, 8.0, bins=4)
    assert line["seconds"] == [1.0, 3.0, 5.0, 7.0]
    assert line["mean_drafted"] == [9 / 3, None, None, 4 / 3]
    assert line["live_rows"] == [3 / 2, None, None, 3 / 2]


def test_the_cells_of_a_toy_pair_are_measured_whatever_the_policy_learns():
    """Policies with state over chunks, in a real loop: greedy tokens are the target's in every chunk and repeat."""
    pair, prompts = toy_pair(), ragged_prompts(9, vocab=TOKENS, longest=6)
    stage, these = staged(pair, prompts, 12, Sampling(temperature=0), 3)
    arms = {
        name: (lambda name=name: make_policy(name.removesuffix(TWIN), pair.draft))
        for name in ("none", "fixed:2", "bandit:3", "online-logistic", "hf-heuristic", "fixed:2" + TWIN)
    }
    chunks = make_chunks(these, [None] * 9, batch=2)
    runs = list(side_by_side(stage, arms, chunks, repeats=2, seed=0))
    cell = Cell(runs, chunks, list(arms), ["fixed:2"], "fixed:2")
    table = by_name(rows(cell, same_tokens=True))
    assert {row["differs_from_none"] for row in table.values()} == {0}
    assert all(row["counts"]["generated"] == 2 * 9 * 12 for row in table.values())
    assert table["none"]["counts"]["drafted"] == 0 < table["bandit:3"]["counts"]["drafted"]
    assert all(1 <= row["mean_live_rows"] <= 3 for row in table.values())
