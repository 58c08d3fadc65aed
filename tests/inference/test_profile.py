"""`accept-head profile` finds the costs that are there: of a made-up clock exactly, of noisy rounds nearly.

No test looks at how long anything really took.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from accept_head import InputError, Sampling
from accept_head.cli import main
from accept_head.inference import profile as module
from accept_head.inference.cache import CachedModel
from accept_head.inference.profile import fit_batch_cost, measure_forwards, regress_rounds

T_DRAFT, T_TARGET, T_ALONE = 0.002, 0.011, 0.010
ALPHA, BETA, GAMMA = 3e-7, 4e-5, 0.006
PROMPTS = [[1, 5, 6, 7], [1, 8, 9], [1, 10, 11, 12, 13, 14]]


@pytest.fixture
def clock(monkeypatch):
    """Stops the clock; only forwards move it, each by `clock.cost(model, batch, width, start)`."""
    clock = SimpleNamespace(now=100.0, cost=None)
    forward = CachedModel.forward

    def timed(cached, input_ids, starts, longest_start):
        clock.now += clock.cost(cached.model, *input_ids.shape, int(longest_start))
        return forward(cached, input_ids, starts, longest_start)

    monkeypatch.setattr(CachedModel, "forward", timed)
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


def test_the_regression_over_real_rounds_finds_the_clocks_costs(pair_clock, random_pair):
    fit = regress_rounds(random_pair, PROMPTS, max_new_tokens=14)
    assert fit.costs.t_draft == pytest.approx(T_DRAFT)
    assert fit.costs.t_target == pytest.approx(T_TARGET)
    assert fit.costs.t_autoregressive == pytest.approx(T_ALONE)
    assert fit.r_squared == pytest.approx(1)
    assert fit.rounds > 20


def test_a_sampled_regression_finds_them_too(pair_clock, random_pair):
    fit = regress_rounds(random_pair, PROMPTS, sampling=Sampling(temperature=1), max_new_tokens=12)
    assert fit.costs.t_draft == pytest.approx(T_DRAFT) and fit.costs.t_target == pytest.approx(T_TARGET)


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
        calls = self.rounds[len(module.DRAFT_LENGTHS) + 1 :]
        lengths, seconds = np.array([round_ for call in calls for round_ in call if round_[0]]).T
        features = np.stack([lengths, np.ones_like(lengths)], axis=1)
        coefficients, (unexplained,), *_ = np.linalg.lstsq(features, seconds, rcond=None)
        return coefficients, 1 - unexplained / (seconds.var() * len(seconds)), len(seconds)


def regress(monkeypatch, pair, rounds):
    monkeypatch.setattr(module, "_timed_rounds", rounds)
    return regress_rounds(pair, PROMPTS, max_new_tokens=24)


def test_noiseless_rounds_give_the_coefficients_exactly(monkeypatch, random_pair):
    fit = regress(monkeypatch, random_pair, Rounds())
    costs = (fit.costs.t_draft, fit.costs.t_target, fit.costs.t_autoregressive)
    assert costs == pytest.approx((T_DRAFT, T_TARGET, T_ALONE))
    assert fit.r_squared == pytest.approx(1)


def test_noisy_rounds_give_the_coefficients_nearly(monkeypatch, random_pair):
    rounds = Rounds(noise=0.05)
    fit = regress(monkeypatch, random_pair, rounds)
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx(rounds.reference()[0], rel=0.03)
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx((T_DRAFT, T_TARGET), rel=0.03)
    assert fit.costs.t_autoregressive == pytest.approx(T_ALONE, rel=0.02)
    assert 0.9 < fit.r_squared < 1


def test_a_few_very_slow_rounds_hardly_matter(monkeypatch, random_pair):
    """3 % of the rounds take 50 times as long: somebody else had the processor."""
    rounds = Rounds(noise=0.02, every=33)
    fit = regress(monkeypatch, random_pair, rounds)
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx(rounds.reference()[0], rel=0.03)
    assert fit.costs.t_autoregressive == pytest.approx(T_ALONE, rel=0.02)
    assert fit.r_squared > 0.9


def test_with_the_outliers_left_in_they_matter(monkeypatch, random_pair):
    monkeypatch.setattr(module, "OUTLIER", float("inf"))
    fit = regress(monkeypatch, random_pair, Rounds(noise=0.02, every=33))
    assert fit.costs.t_draft > 1.5 * T_DRAFT or fit.costs.t_target > 1.5 * T_TARGET


def test_the_fit_of_all_rounds_is_numpys(monkeypatch, random_pair):
    monkeypatch.setattr(module, "OUTLIER", float("inf"))
    rounds = Rounds(noise=0.2)
    fit = regress(monkeypatch, random_pair, rounds)
    coefficients, r_squared, count = rounds.reference()
    assert (fit.costs.t_draft, fit.costs.t_target) == pytest.approx(coefficients)
    assert (fit.r_squared, fit.rounds) == (pytest.approx(r_squared), count)


def test_draft_lengths_take_turns_and_the_first_prompt_warms_up(monkeypatch, random_pair):
    rounds = Rounds()
    regress(monkeypatch, random_pair, rounds)
    ks = [0, *module.DRAFT_LENGTHS]
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
    monkeypatch.setattr(module, "BATCHES", (1, 2, 4))
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

    monkeypatch.setattr(module, "_seconds", seconds)
    monkeypatch.setattr(module, "CachedModel", lambda *_, **__: SimpleNamespace(fill=lambda *_: None))
    monkeypatch.setattr(module, "BATCHES", (1, 3, 7))  # no product of which is another's
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
    monkeypatch.setattr(module, "_timed_rounds", rounds)
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
    return ["profile", *(str(word) for name in options for word in (f"--{name}", options[name]))]


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
    assert (done.returncode, done.stderr) == (0, "")
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
    cost = module.BatchForwardCost(alpha=ALPHA, beta=BETA, gamma=GAMMA, r_squared=0.5)
    monkeypatch.setattr(module, "fit_batch_cost", lambda model: cost)
    bare = module.ForwardCosts(t_draft=0.001, t_target=0.008, t_autoregressive=0.007)
    monkeypatch.setattr(module, "measure_forwards", lambda pair, prompts: bare)
    rounds = Rounds()
    monkeypatch.setattr(module, "_timed_rounds", rounds)
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
    own = {tuple(embedded_pair.tokenizer(text)["input_ids"]) for text in module.TEXTS}
    assert {tuple(prompt) for _, prompt in quick.asked} == own


def test_it_decodes_as_many_prompts_as_are_asked_for(quick, random_pair_folder, tmp_path):
    assert main(arguments(tmp_path, random_pair_folder, max_prompts=3)) == 0
    assert len(quick.asked) == (3 + 1) * (len(module.DRAFT_LENGTHS) + 1)


REFUSED = {
    "a response longer than the context": (lambda f: {"max_new_tokens": 128}, ["128", "context"]),
    "no prompts wanted": (lambda f: {"max_prompts": 0}, ["max_prompts", "0"]),
    "a missing prompts file": (lambda f: {"prompts": f / "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "a negative temperature": (lambda f: {"temperature": -1}, ["temperature", "-1"]),
    "a target that does not exist": (lambda f: {"target": f / "nowhere"}, ["--target", "nowhere"]),
    "an output that is a folder": (lambda f: {"out": f}, ["--out"]),
    "an output below a file": (lambda f: {"out": "/proc/version/costs.json"}, ["--out", "/proc/version"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_that_names_it(name, quick, random_pair_folder, tmp_path, capsys):
    change, named = REFUSED[name]
    options = arguments(tmp_path, random_pair_folder, **change(tmp_path))
    assert main(options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("accept-head: ")]
    assert line.startswith("accept-head: error: ") and all(words in line for words in named)
    assert not list(tmp_path.iterdir())


def test_print_config_prints_a_yaml_that_it_reads(run_warm, random_pair_folder, tmp_path):
    printed = run_warm(*arguments(tmp_path, random_pair_folder), "--print_config")
    assert (printed.returncode, printed.stderr) == (0, "")
    config = tmp_path / "profile.yaml"
    config.write_text(printed.stdout)
    assert run_warm("profile", "--config", config, "--print_config").stdout == printed.stdout
    assert "max_new_tokens: 24" in printed.stdout
