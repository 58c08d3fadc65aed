"""`accept-head profile` finds the true costs: exactly with a simulated clock, nearly with noisy rounds.

No test depends on real time.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import nnls
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError, Sampling
from accept_head.cli import main
from accept_head.cost import BatchForwardCost, ForwardCosts
from accept_head.inference.costs.batch_table import FIELD, best_table, read_batch_table
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.engine import cache
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.profile import forwards, regression
from accept_head.inference.profile import rounds as grid_module
from accept_head.inference.profile.forwards import fit_batch_cost, measure_forwards
from accept_head.inference.profile.prompts import TEXTS
from accept_head.inference.profile.regression import regress_rounds
from accept_head.inference.profile.rounds import fit_round_costs, measure_rounds
from accept_head.inference.verbs import profile as verb
from tests.inference.support.replayed import standing_in
from tests.inference.support.toy import pair_of, two

T_DRAFT, T_TARGET, T_ALONE = 0.002, 0.011, 0.010
ALPHA, BETA, GAMMA = 3e-7, 4e-5, 0.006
PROMPTS = [[1, 5, 6, 7], [1, 8, 9], [1, 10, 11, 12, 13, 14]]


@pytest.fixture
def clock(monkeypatch):
    """Stops the clock; only forwards move it, each by `clock.cost(model, batch, width, start)`."""
    clock = SimpleNamespace(now=100.0, cost=None)
    forward = CachedModel.forward

    def timed(cached, input_ids, starts, longest_start, **options):
        clock.now += clock.cost(cached.model, *input_ids.shape, int(longest_start))
        return forward(cached, input_ids, starts, longest_start, **options)

    monkeypatch.setattr(CachedModel, "forward", timed)
    for module in (regression, forwards):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.fixture
def pair_clock(clock, random_pair):
    """A clock on which a draft forward takes T_DRAFT, a target's T_ALONE on one token and T_TARGET on more."""

    def cost(model, batch, width, start):
        return T_DRAFT if model is random_pair.draft else T_ALONE if width == 1 else T_TARGET

    clock.cost = cost
    return clock


# --- eq. 3.1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_regression_over_real_rounds_finds_the_clocks_costs(pair_clock, random_pair, temperature):
    fit = regress_rounds(random_pair, PROMPTS, sampling=Sampling(temperature=temperature), max_new_tokens=14)
    costs = (fit.costs.t_draft, fit.costs.t_target, fit.costs.t_autoregressive)
    assert costs == pytest.approx((T_DRAFT, T_TARGET, T_ALONE))
    assert fit.r_squared == pytest.approx(1)
    assert fit.rounds > 20


def test_a_rounds_time_does_not_hold_the_prefill(pair_clock, random_pair, monkeypatch):
    """The first round of a prompt comes with its prefill and is left out."""
    fill = CachedModel.fill

    def slow(*arguments):
        pair_clock.now += 1000
        fill(*arguments)

    monkeypatch.setattr(CachedModel, "fill", slow)
    fit = regress_rounds(random_pair, PROMPTS, max_new_tokens=12)
    assert fit.costs.t_target == pytest.approx(T_TARGET)


class Rounds:
    """Stands for `_timed_rounds`: made-up seconds, and what it was asked. every: the how many-th round of each length
    takes 50 times as long."""

    def __init__(self, *, noise=0.0, every=0):
        self.random, self.noise, self.every = np.random.default_rng(0), noise, every
        self.asked, self.rounds, self.seen = [], [], Counter()

    def __call__(self, pair, prompt, policy, sampling, max_new_tokens):
        k = policy.max_draft_tokens
        lengths = [k] * 60 + list(range(min(k, 3)))[::-1]  # a response's last rounds draft less
        self.asked.append((k, tuple(prompt)))
        self.rounds.append([(length, self._seconds(length)) for length in lengths])
        return [(length, seconds * (50 if self._slow(length) else 1)) for length, seconds in self.rounds[-1]]

    def _seconds(self, length):
        clean = length * T_DRAFT + T_TARGET if length else T_ALONE
        return clean * (1 + self.noise * self.random.standard_normal())

    def _slow(self, length):
        self.seen[length] += 1
        return self.every and self.seen[length] % self.every == self.every // 2

    def reference(self):
        """(t_draft, t_target), R² and how many, by numpy's least squares over all rounds but the warm-up's and those
        that drafted nothing, before any was made slow."""
        calls = self.rounds[len(regression.DRAFT_LENGTHS) + 1 :]
        lengths, seconds = np.array([round_ for call in calls for round_ in call if round_[0]]).T
        features = np.stack([lengths, np.ones_like(lengths)], axis=1)
        coefficients, (unexplained,), *_ = np.linalg.lstsq(features, seconds, rcond=None)
        return coefficients, 1 - unexplained / (seconds.var() * len(seconds)), len(seconds)


def regress(monkeypatch, pair, rounds):
    monkeypatch.setattr(regression, "_timed_rounds", rounds)
    return regress_rounds(pair, PROMPTS, max_new_tokens=24)


@pytest.mark.parametrize(
    ("noise", "every", "near", "r_squared"),
    [(0, 0, 1e-9, (1 - 1e-9, 1 + 1e-9)), (0.05, 0, 0.03, (0.9, 1)), (0.02, 33, 0.03, (0.9, 1))],
    ids=["noiseless", "noisy", "3 % take 50 times as long: somebody else had the processor"],
)
def test_rounds_give_the_coefficients_and_a_few_very_slow_ones_hardly_matter(
    monkeypatch, random_pair, noise, every, near, r_squared
):
    rounds = Rounds(noise=noise, every=every)
    fit = regress(monkeypatch, random_pair, rounds)
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx(rounds.reference()[0], rel=near)
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx((T_DRAFT, T_TARGET), rel=near)
    assert fit.costs.t_autoregressive == pytest.approx(T_ALONE, rel=near)
    assert r_squared[0] < fit.r_squared < r_squared[1]


def test_with_the_outliers_left_in_they_matter(monkeypatch, random_pair):
    monkeypatch.setattr(regression, "OUTLIER", float("inf"))
    fit = regress(monkeypatch, random_pair, Rounds(noise=0.02, every=33))
    assert fit.costs.t_draft > 1.5 * T_DRAFT or fit.costs.t_target > 1.5 * T_TARGET


def test_the_fit_of_all_rounds_is_numpys(monkeypatch, random_pair):
    monkeypatch.setattr(regression, "OUTLIER", float("inf"))
    rounds = Rounds(noise=0.2)
    fit = regress(monkeypatch, random_pair, rounds)
    coefficients, r_squared, count = rounds.reference()
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx(coefficients)
    assert (fit.r_squared, fit.rounds) == (pytest.approx(r_squared), count)


def test_draft_lengths_take_turns_and_the_first_prompt_warms_up(monkeypatch, random_pair):
    rounds = Rounds()
    regress(monkeypatch, random_pair, rounds)
    ks = [0, *regression.DRAFT_LENGTHS]
    assert rounds.asked == [(k, tuple(prompt)) for prompt in [PROMPTS[0], *PROMPTS] for k in ks]


# --- bare forwards and the batch model ------------------------------------------------------------------------------


def test_bare_forwards_are_medians_of_the_clock(pair_clock, random_pair):
    slow = iter([1000.0] * 3 + [0.0] * 10_000)
    cost = pair_clock.cost
    pair_clock.cost = lambda *arguments: cost(*arguments) + next(slow)
    forward = measure_forwards(random_pair, PROMPTS)
    assert (forward.t_draft, forward.t_target, forward.t_autoregressive) == pytest.approx((T_DRAFT, T_TARGET, T_ALONE))


def batch_cost(model, batch, width, start):
    return ALPHA * batch * start + BETA * batch * width + GAMMA


@pytest.mark.parametrize("context", [512, 128])
def test_the_batch_model_finds_the_clocks_coefficients(clock, random_llama, monkeypatch, context):
    """At a context of 128 tokens two of the three context lengths do not fit."""
    monkeypatch.setattr(forwards, "BATCHES", (1, 2, 4))
    clock.cost = batch_cost
    fit = fit_batch_cost(random_llama(1, layers=1, context=context), repeats=2)
    assert (fit.alpha, fit.beta, fit.gamma) == pytest.approx((ALPHA, BETA, GAMMA))
    assert fit.r_squared == pytest.approx(1)
    assert fit.seconds(context_tokens=900, batch_tokens=12) == pytest.approx(ALPHA * 900 + BETA * 12 + GAMMA)


def test_the_batch_model_is_numpys_least_squares_of_medians(random_llama, monkeypatch):
    random, seen = np.random.default_rng(0), {}

    def seconds(cached, new, start):
        batch, width = new.shape
        value = batch_cost(None, batch, width, start) * random.lognormal(0, 0.05)
        seen.setdefault((batch * start, batch * width, 1), []).append(value * (20 if random.random() < 0.05 else 1))
        return seen[batch * start, batch * width, 1][-1]

    monkeypatch.setattr(forwards, "_seconds", seconds)
    monkeypatch.setattr(forwards, "fill", lambda *_: None)
    monkeypatch.setattr(forwards, "CachedModel", lambda *_, **__: None)
    monkeypatch.setattr(forwards, "BATCHES", (1, 3, 7))  # no product of which is another's
    fit = fit_batch_cost(random_llama(1, layers=1, context=512), repeats=9)
    assert len(seen) == 27 and {len(times) for times in seen.values()} == {10}
    measured = np.array([np.median(times[1:]) for times in seen.values()])  # the first is a warm-up
    features = np.array(list(seen), dtype=float)
    coefficients, (unexplained,), *_ = np.linalg.lstsq(features, measured, rcond=None)
    assert (fit.alpha, fit.beta, fit.gamma) == pytest.approx(coefficients)
    assert fit.r_squared == pytest.approx(1 - unexplained / (measured.var() * len(measured)))
    assert (fit.alpha, fit.beta, fit.gamma) == pytest.approx((ALPHA, BETA, GAMMA), rel=0.3)


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_a_context_too_short_for_the_response_is_refused(random_pair):
    with pytest.raises(InputError, match="no prompt leaves room for 126 more tokens"):
        regress_rounds(random_pair, PROMPTS, max_new_tokens=126)
    with pytest.raises(InputError, match="no prompt leaves room for 5 more tokens"):
        measure_forwards(random_pair, [[1] * 124])


def test_prompts_that_leave_no_room_are_passed_over(monkeypatch, random_pair):
    rounds = Rounds()
    monkeypatch.setattr(regression, "_timed_rounds", rounds)
    regress_rounds(random_pair, [[1] * 120, *PROMPTS], max_new_tokens=24)
    assert {prompt for _, prompt in rounds.asked} == {tuple(prompt) for prompt in PROMPTS}


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
def test_responses_too_short_for_a_regression_are_refused(pair_clock, random_pair, max_new_tokens):
    """A prompt's first round is left out, and its last one drafts less: two tokens leave nothing to measure."""
    with pytest.raises(InputError, match="max_new_tokens"):
        regress_rounds(random_pair, PROMPTS, max_new_tokens=max_new_tokens)


# --- the command ----------------------------------------------------------------------------------------------------


def arguments(folder, pair_folder, **options):
    options = {
        "target": pair_folder / "target",
        "draft": pair_folder / "draft",
        "prompts": pair_folder / "prompts" / "train.jsonl",
        "out": folder / "costs.json",
        "max_new_tokens": 24,
        **options,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return ["profile", *(str(word) for name, value in given.items() for word in (f"--{name}", value))]


def map_options(folder, **options):
    sizes = {"batch_sizes": "[3,1,2]", "draft_lengths": "[0,2]"}
    return {"batch_map": folder / "map.json", "max_prompts": 4, **sizes, **options}


def check_numbers(costs):
    assert all(costs[name] > 0 for name in ("t_draft", "t_target", "t_autoregressive"))
    assert 0 < costs["r_squared"] <= 1
    assert costs["rounds"] > 50
    assert set(costs["forward"]) == {"t_draft", "t_target", "t_autoregressive"}
    assert all(seconds > 0 for seconds in costs["forward"].values())
    assert set(costs["batch"]) == {"draft", "target"}
    for cost in costs["batch"].values():
        assert set(cost) == {"alpha", "beta", "gamma", "r_squared"} and all(map(math.isfinite, cost.values()))
        assert cost["r_squared"] <= 1


def test_the_command_writes_all_measurements(run_warm, random_pair_folder, tmp_path):
    done = run_warm(*arguments(tmp_path, random_pair_folder, max_prompts=2, max_new_tokens=32))
    assert done.returncode == 0 and all(line.startswith("profile: ") for line in done.stderr.splitlines())
    costs = json.loads((tmp_path / "costs.json").read_text())
    check_numbers(costs)
    assert (costs["target"], costs["draft"]) == tuple(str(random_pair_folder / name) for name in ("target", "draft"))
    assert (costs["dtype"], costs["threads"]) == ("float32", 1)
    assert {"accept-head", "torch", "transformers"} <= set(costs["versions"])
    assert costs["device"] and costs["date"]
    assert f"{1e3 * costs['t_draft']:.2f} ms" in done.stdout and "wrote" in done.stdout
    assert len(done.stdout.splitlines()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


@pytest.fixture
def quick(monkeypatch):
    """The command in this process, without its measurements."""
    cost = BatchForwardCost(alpha=ALPHA, beta=BETA, gamma=GAMMA, r_squared=0.5)
    monkeypatch.setattr(verb, "fit_batch_cost", lambda model, compile: cost)
    bare = ForwardCosts(t_draft=0.001, t_target=0.008, t_autoregressive=0.007)
    monkeypatch.setattr(verb, "measure_forwards", lambda pair, prompts, compile: bare)
    rounds = Rounds()
    monkeypatch.setattr(regression, "_timed_rounds", rounds)
    return rounds


def test_the_command_writes_what_was_measured(quick, random_pair_folder, tmp_path, capsys):
    assert main(arguments(tmp_path, random_pair_folder)) == 0
    costs = json.loads((tmp_path / "costs.json").read_text())
    names = ("t_draft", "t_target", "t_autoregressive")
    assert [costs[name] for name in names] == pytest.approx([T_DRAFT, T_TARGET, T_ALONE])
    assert costs["forward"] == {"t_draft": 0.001, "t_target": 0.008, "t_autoregressive": 0.007}
    assert costs["batch"]["draft"] == {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA, "r_squared": 0.5}
    assert "t_draft 2.00 ms, t_target 11.00 ms, target alone 10.00 ms (c = 0.182)" in capsys.readouterr().out


def test_without_prompts_it_decodes_a_text_of_its_own(quick, embedded_pair, embedded_pair_folder, tmp_path):
    options = arguments(tmp_path, embedded_pair_folder)
    place = options.index("--prompts")
    assert main(options[:place] + options[place + 2 :]) == 0
    own = {tuple(embedded_pair.tokenizer(text)["input_ids"]) for text in TEXTS}
    assert {tuple(prompt) for _, prompt in quick.asked} == own


def test_it_decodes_as_many_prompts_as_are_asked_for(quick, random_pair_folder, tmp_path):
    assert main(arguments(tmp_path, random_pair_folder, max_prompts=3)) == 0
    assert len(quick.asked) == (3 + 1) * (len(regression.DRAFT_LENGTHS) + 1)


REFUSED = {
    "a response longer than the context": (lambda f: {"max_new_tokens": 128}, ["128", "context"]),
    "no prompts wanted": (lambda f: {"max_prompts": 0}, ["max_prompts", "0"]),
    "a number of no prompts": (lambda f: {"prompts": None, "max_prompts": 2}, ["--max_prompts", "--prompts"]),
    "a missing prompts file": (lambda f: {"prompts": f / "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "a negative temperature": (lambda f: {"temperature": -1}, ["temperature", "-1"]),
    "a target that does not exist": (lambda f: {"target": f / "nowhere"}, ["--target", "nowhere"]),
    "an output that is a folder": (lambda f: {"out": f}, ["--out"]),
    "an output below a file": (lambda f: {"out": "/proc/version/costs.json"}, ["--out", "/proc/version"]),
    "a size without a map": (lambda f: {"batch_sizes": "[1]"}, ["batch_sizes", "--batch_map"]),
    "no batch size 1": (lambda f: map_options(f, batch_sizes="[2,4]"), ["batch_sizes", "[2, 4]", "expected 1"]),
    "batch size 0": (lambda f: map_options(f, batch_sizes="[0,1]"), ["batch_sizes", "[0, 1]"]),
    "no draft length 0": (lambda f: map_options(f, draft_lengths="[1,2]"), ["draft_lengths", "[1, 2]", "expected 0"]),
    "a map that is a folder": (lambda f: map_options(f, batch_map=f), ["--batch_map", "folder"]),
    "both into one file": (lambda f: map_options(f, batch_map=f / "costs.json"), ["--batch_map", "costs.json"]),
    "too short for long drafts": (lambda f: map_options(f, draft_lengths="[0,12]"), ["max_new_tokens is 24", "26"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_that_names_it(name, quick, random_pair_folder, tmp_path, capsys):
    change, named = REFUSED[name]
    options = arguments(tmp_path, random_pair_folder, **change(tmp_path))
    assert main(options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("accept-head: ")]
    assert line.startswith("accept-head: error: ") and all(words in line for words in named)
    assert not quick.asked and not list(tmp_path.iterdir())


# --- captured forwards and steps: the stand-in for CUDA graphs --------------------------------------------------------


@pytest.fixture
def captures(monkeypatch):
    """The stand-in, which counts; with short extents, so that short texts pass through several."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)
    with standing_in() as backend:
        yield backend


def noting(backend, function, noted):
    """`function`, which adds to `noted` how many graphs each call captures."""

    def call(*arguments):
        before = backend.captures
        result = function(*arguments)
        noted.append(backend.captures - before)
        return result

    return call


def test_rounds_that_are_timed_capture_nothing(captures, random_pair, monkeypatch):
    noted = []
    monkeypatch.setattr(regression, "DRAFT_LENGTHS", (1, 3))
    monkeypatch.setattr(regression, "_timed_rounds", noting(captures, regression._timed_rounds, noted))
    with suppress(InputError):  # of seconds that mean nothing
        regress_rounds(random_pair, PROMPTS[:2], max_new_tokens=12, compile="graphs")
    assert len(noted) == 2 * 2 * 3 and sum(noted[:6]) > 0 and not any(noted[6:])


def test_bare_forwards_are_those_that_were_captured(captures, random_pair, monkeypatch):
    monkeypatch.setattr(forwards, "WARM_UP", 1)
    monkeypatch.setattr(forwards, "REPEATS", 3)
    measure_forwards(random_pair, PROMPTS, compile="graphs")
    assert captures.captures > 0 and captures.replays >= 2 * 3 * 4 - 3  # the very first of a model makes its cache


def test_a_grid_in_graphs_sees_the_rounds_of_one_without(captures, noisy_pair, monkeypatch):
    noted = []
    options = {"sampling": Sampling(temperature=1.5, top_k=0), "max_new_tokens": 12, "turns": 1}
    plain = measure_rounds(noisy_pair, PROMPTS, (1, 2), (0, 2), **options)
    monkeypatch.setattr(grid_module, "_full_rounds", noting(captures, grid_module._full_rounds, noted))
    graphs = measure_rounds(noisy_pair, PROMPTS, (1, 2), (0, 2), **options, compile="graphs")
    assert all(noted[::2]) and not any(noted[1::2])
    for name in ("rounds", "at_risk", "accepted", "context_tokens"):
        np.testing.assert_array_equal(getattr(graphs, name), getattr(plain, name))
    assert 0 < plain.accepted.sum() < plain.at_risk.sum()
    monkeypatch.setattr(grid_module, "_copied", lambda outcome: outcome)
    wrong = measure_rounds(noisy_pair, PROMPTS, (1, 2), (0, 2), **options, compile="graphs")
    assert (wrong.context_tokens != plain.context_tokens).any()  # each round was the last one


def test_a_grid_captures_once_for_all_turns(captures, noisy_pair):
    """Each turn with a decoder of its own would capture hundreds of graphs on a GPU."""
    options = {"sampling": Sampling(temperature=1.5, top_k=0), "max_new_tokens": 12, "compile": "graphs"}
    counts = []
    for turns in (1, 3):
        before = captures.captures
        measure_rounds(noisy_pair, PROMPTS[:2], (1, 2), (0, 2), turns=turns, **options)
        counts.append(captures.captures - before)
    assert 0 < counts[0] <= counts[1] < 1.5 * counts[0]


def test_the_command_measures_what_it_is_asked_to_decode_with(quick, random_pair_folder, tmp_path, monkeypatch):
    seen = []
    cost = BatchForwardCost(alpha=ALPHA, beta=BETA, gamma=GAMMA, r_squared=0.5)
    monkeypatch.setattr(verb, "fit_batch_cost", lambda model, compile: seen.append(compile) or cost)
    make = regression.make_decoder

    def noting(*arguments, **options):
        seen.append(options["compile"])
        return make(*arguments, **options)

    monkeypatch.setattr(regression, "make_decoder", noting)
    assert main(arguments(tmp_path, random_pair_folder, compile="default")) == 0
    assert seen == ["default"] * 3
    assert json.loads((tmp_path / "costs.json").read_text())["compile"] == "default"


# --- the grid of a batch map ----------------------------------------------------------------------------------------

MAP_SIZES, MAP_LENGTHS = (1, 2, 5), (0, 1, 3)


def round_cost(draft):
    """A draft forward takes 2 ms and 0.1 ms a row, a target's 10 ms and 0.4 ms a token."""

    def cost(model, batch, width, start):
        return 2e-3 + 1e-4 * batch if model is draft else 1e-2 + 4e-4 * batch * width

    return cost


def round_seconds(size, k):
    return k * (2e-3 + 1e-4 * size) + 1e-2 + 4e-4 * size * (k + 1)


@pytest.fixture(scope="module")
def noisy_pair():
    """A draft that is right about half of the time, so that rows go their own ways."""
    return pair_of(*two(LlamaForCausalLM, LlamaConfig))


@pytest.fixture
def grid_clock(clock, noisy_pair, monkeypatch):
    """The clock for rounds of a batch; a prefill takes 1000 s."""
    fill = CachedModel.fill

    def slow(*arguments):
        clock.now += 1000
        fill(*arguments)

    monkeypatch.setattr(CachedModel, "fill", slow)
    monkeypatch.setattr(grid_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    clock.cost = round_cost(noisy_pair.draft)
    return clock


@pytest.fixture
def taken(monkeypatch):
    """What was measured: the size and the length of each cell in order, and its rounds."""
    taken, full_rounds = [], grid_module._full_rounds

    def noted(decoder, requests, policy, processing):
        taken.append((len(requests), policy.max_draft_tokens, full_rounds(decoder, requests, policy, processing)))
        return taken[-1][2]

    monkeypatch.setattr(grid_module, "_full_rounds", noted)
    return taken


def measured_grid(pair, temperature=0.0, **options):
    sampling = Sampling(temperature=temperature, top_k=0)
    options = {"max_new_tokens": 20, "turns": 2, **options}
    return measure_rounds(pair, PROMPTS, MAP_SIZES, MAP_LENGTHS, sampling=sampling, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_round_of_the_grid_is_of_all_rows_and_of_the_whole_length(grid_clock, taken, noisy_pair, temperature):
    """However the responses end: at a temperature of 1 some rows are done long before the others."""
    grid = measured_grid(noisy_pair, temperature)
    for size, k, rounds in taken:
        assert len(rounds.seconds) == len(rounds.outcomes) - 1 > 0
        assert rounds.seconds == pytest.approx([round_seconds(size, k)] * len(rounds.seconds))
        for outcome in rounds.outcomes:
            assert outcome.live.tolist() == [True] * size and outcome.drafted.tolist() == [k] * size
    expected = [[round_seconds(size, k) for k in MAP_LENGTHS] for size in MAP_SIZES]
    assert grid.seconds == pytest.approx(np.array(expected))
    assert grid.rounds.tolist() == [
        [sum(len(rounds.seconds) for size, k, rounds in taken if (size, k) == (s, length)) for length in MAP_LENGTHS]
        for s in MAP_SIZES
    ]
    assert grid.rounds.max() == 2 * grid_module.ROUNDS


@pytest.mark.parametrize("size", [2, 5])
def test_the_rounds_end_when_a_row_is_done(noisy_pair, size):
    """One of two that is done leaves the batch; one of five stays in it as an idle row."""
    prompts = [PROMPTS[row % 3] for row in range(size)]
    requests = [replace(row, max_new_tokens=6 if row.index == 1 else 20) for row in make_requests(prompts, 20)]
    options = {"batch_size": size, "greedy": True}
    decoder = make_decoder(noisy_pair.target, noisy_pair.draft, requests, FixedPolicy(3), **options)
    processing = Processing(Sampling(temperature=0), noisy_pair.vocab_size)
    assert len(grid_module._full_rounds(decoder, requests, FixedPolicy(0), processing).seconds) == 5


def test_the_cells_take_turns(grid_clock, taken, noisy_pair):
    measured_grid(noisy_pair, turns=3)
    assert [(size, k) for size, k, _ in taken] == 3 * [(size, k) for size in MAP_SIZES for k in MAP_LENGTHS]


def test_a_cell_is_the_median_of_its_rounds(grid_clock, noisy_pair):
    slow, cost = iter([50.0, 0, 0, 0, 0, 0, 0] * 10_000), grid_clock.cost
    grid_clock.cost = lambda *arguments: cost(*arguments) + next(slow)
    grid = measured_grid(noisy_pair)
    assert grid.seconds[:, 0] == pytest.approx([round_seconds(size, 0) for size in MAP_SIZES])


def test_the_grids_acceptance_is_that_of_its_rounds(grid_clock, taken, noisy_pair):
    grid = measured_grid(noisy_pair, temperature=1.5)
    rows = [
        (k, accepted) for _, k, rounds in taken for outcome in rounds.outcomes for accepted in outcome.accepted.tolist()
    ]
    for position in range(1, 4):
        tested = [accepted for k, accepted in rows if k >= position and accepted >= position - 1]
        assert grid.at_risk[position - 1] == len(tested) > 0
        assert grid.acceptance[position - 1] == pytest.approx(np.mean([row >= position for row in tested]))
    first, second, third = grid.acceptance
    al = [1, 1 + first, 1 + first + first * second, 1 + first + first * second + first * second * third]
    assert grid.tokens == pytest.approx(al) and grid.acceptance.min() > 0 and grid.acceptance.max() < 1
    assert grid.goodput == pytest.approx(np.array([al[0], al[1], al[3]]) / grid.seconds)


def test_the_contexts_are_the_tokens_that_the_target_had_been_fed(grid_clock, noisy_pair):
    starts, cost = [], grid_clock.cost

    def noted(model, batch, width, start):
        if model is noisy_pair.target:
            starts.append(start)
        return cost(model, batch, width, start)

    grid_clock.cost = noted
    grid = measure_rounds(noisy_pair, PROMPTS[:1], (1,), (0,), max_new_tokens=6, turns=1)
    # The second to the sixth round; the first is not timed.
    assert starts == [3, 4, 5, 6, 7, 8]
    assert grid.context_tokens.tolist() == [[np.mean(starts[1:])]]


def test_the_batch_costs_are_those_of_the_rounds(grid_clock, noisy_pair):
    bare = BatchForwardCost(alpha=0.0, beta=9.0, gamma=9.0, r_squared=0.5)
    costs = fit_round_costs(measured_grid(noisy_pair), bare, bare)
    assert (costs["draft"].beta, costs["draft"].gamma) == pytest.approx((1e-4, 2e-3))
    assert (costs["target"].beta, costs["target"].gamma) == pytest.approx((4e-4, 1e-2))
    assert costs["draft"].r_squared == costs["target"].r_squared == pytest.approx(1)


def grid_of(seconds, sizes, lengths, contexts):
    none = np.zeros(lengths[-1], dtype=int)
    return grid_module.RoundGrid(
        batch_sizes=sizes, draft_lengths=lengths, seconds=seconds, context_tokens=contexts,
        rounds=np.ones_like(seconds), at_risk=none, accepted=none,
    )  # fmt: skip


def test_a_context_tokens_share_is_that_of_bare_forwards():
    sizes, lengths = (1, 4, 8), (0, 2, 5)
    size, k = np.meshgrid(sizes, lengths, indexing="ij")
    contexts = 40.0 * size + 3 * k
    draft = BatchForwardCost(alpha=1e-6, beta=2e-4, gamma=1e-3, r_squared=1)
    target = BatchForwardCost(alpha=5e-6, beta=3e-4, gamma=8e-3, r_squared=1)
    seconds = k * draft.seconds(context_tokens=contexts, batch_tokens=size)
    seconds = seconds + target.seconds(context_tokens=contexts, batch_tokens=size * (k + 1))
    bare = {"draft": replace(draft, beta=0.5, gamma=0.5), "target": replace(target, beta=0.5, gamma=0.5)}
    costs = fit_round_costs(grid_of(seconds, sizes, lengths, contexts), **bare)
    for name, cost in (("draft", draft), ("target", target)):
        assert (costs[name].alpha, costs[name].beta, costs[name].gamma) == pytest.approx(
            (cost.alpha, cost.beta, cost.gamma)
        )


def test_no_cost_is_negative_and_the_fit_is_scipys():
    random, sizes, lengths = np.random.default_rng(0), (1, 4, 16), (0, 1, 3)
    size, k = np.meshgrid(sizes, lengths, indexing="ij")
    bare, zeros = BatchForwardCost(alpha=0.0, beta=9.0, gamma=9.0, r_squared=0.5), 0
    for _ in range(30):
        seconds = (1e-3 * k + 1e-2) * random.lognormal(0, 0.4, size.shape)
        costs = fit_round_costs(grid_of(seconds, sizes, lengths, np.zeros(size.shape)), bare, bare)
        fitted = [getattr(costs[name], term) for name in ("draft", "target") for term in ("beta", "gamma")]
        features = np.stack([k * size, k, size * (k + 1), np.ones_like(k)], axis=-1).reshape(-1, 4)
        reference, _ = nnls(features / seconds.reshape(-1, 1), np.ones(9))
        assert fitted == pytest.approx(reference, abs=1e-9)
        zeros += fitted.count(0.0)
    assert zeros > 10


def test_a_grid_of_one_batch_size_leaves_the_costs_as_they_are():
    bare = BatchForwardCost(alpha=0.0, beta=9.0, gamma=9.0, r_squared=0.5)
    alone = grid_of(np.array([[1.0, 2.0]]), (1,), (0, 1), np.ones((1, 2)))
    assert fit_round_costs(alone, bare, bare) == {"draft": bare, "target": bare}


def test_the_command_writes_a_batch_map(quick, random_pair_folder, tmp_path, capsys):
    assert main(arguments(tmp_path, random_pair_folder, **map_options(tmp_path))) == 0
    written = json.loads((tmp_path / "map.json").read_text())
    assert (written["batch_sizes"], written["draft_lengths"]) == ([1, 2, 3], [0, 2])
    table = read_batch_table(tmp_path / "map.json")
    assert written[FIELD] == [list(row) for row in table] and table[-1][1] == 3
    seconds, al = np.array(written["round_seconds"]), np.array(written["al"])
    assert seconds.shape == (3, 2) and (seconds > 0).all() and np.array(written["rounds"]).min() >= 5
    assert len(written["acceptance"]) == len(written["at_risk"]) == 2 and len(al) == 3
    assert al == pytest.approx(1 + np.concatenate([[0], np.cumsum(np.cumprod(written["acceptance"]))]))
    assert np.array(written["goodput"]) == pytest.approx(al[[0, 2]] / seconds)
    assert table == best_table(seconds, [1, 2, 3], [0, 2], al)
    costs = json.loads((tmp_path / "costs.json").read_text())
    for name in ("target", "draft", "dtype", "device", "threads", "versions", "date"):
        assert written[name] == costs[name]
    assert written["sampling"]["temperature"] == 0
    # α of the bare forwards, the rest of the rounds.
    assert all(costs["batch"][name]["alpha"] == ALPHA for name in ("draft", "target"))
    assert costs["batch"]["target"]["gamma"] != GAMMA
    printed = capsys.readouterr().out
    assert "batch size" in printed and f"wrote {tmp_path / 'map.json'}" in printed
    assert FIELD in printed or {k for _, _, k in table} == {0}


def test_what_is_printed_for_vllm_is_the_table_that_is_written(
    quick, random_pair_folder, tmp_path, capsys, monkeypatch
):
    """A made-up grid, in which two tokens pay up to a batch size of 2."""
    seconds = np.array([[1.0, 1.1], [1.0, 1.2], [1.0, 9.0]])
    grid = grid_of(seconds, (1, 2, 4), (0, 2), 40 * seconds)
    grid = replace(grid, at_risk=np.array([100, 80]), accepted=np.array([80, 40]))
    monkeypatch.setattr(verb, "measure_rounds", lambda *_, **__: grid)
    assert main(arguments(tmp_path, random_pair_folder, **map_options(tmp_path))) == 0
    table = [[1, 2, 2], [3, 4, 0]]
    assert json.loads((tmp_path / "map.json").read_text())[FIELD] == table
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vllm")]
    config = json.loads(shlex.split(line)[-1])
    assert (config["num_speculative_tokens"], config[FIELD]) == (2, table)
    assert config["model"] == str(random_pair_folder / "draft")
