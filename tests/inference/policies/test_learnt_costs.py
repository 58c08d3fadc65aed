"""Costs learnt from the seconds of rounds: they come to the true ones, follow a change, and shrug off outliers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from accept_head import InputError
from accept_head.cost import PairCosts
from accept_head.inference import generate, make_policy
from accept_head.inference.adapters.vllm.metrics import DraftMetrics
from accept_head.inference.costs.host import PACKED, PADDED, VLLM_V2
from accept_head.inference.costs.learnt import OF_TARGET, TRIAL, LearntCosts, Timed, fitted
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.batch_stop import BatchStopPolicy
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policy import Signal
from accept_head.sampling import Sampling
from tests.inference.support.rounds import begin, one_round, outcome
from tests.inference.support.scalar_rules import (
    DearFirst,
    InBlocks,
    OtherWhenPlain,
    blocks,
    by_block_of,
    first_more,
    pair_costs,
)
from tests.inference.support.toy import toy_pair

COSTS = pair_costs(0.02, 0.004, 0.1, row=0.001, context=1e-5)

RULES = {
    "batch stop": lambda costs: BatchStopPolicy(FixedPolicy(8), costs),
    "goodput": lambda costs: GoodputPolicy(costs, k_max=8),
}


def seconds_of(costs, host, drafted, lengths):
    """(of the round, of drafting in it), by the cost model, of live rows that draft so many tokens."""
    slots = by_block_of(costs) * (host.block * blocks(host, len(drafted), sum(drafted)) - sum(drafted))
    rows, context, longest = len(drafted), sum(lengths), max(drafted)
    steps = max(longest, int(host.feeds))
    fed = rows * steps if host.drafts_stopped else sum(drafted)
    drafting = steps * (costs.draft.gamma + costs.draft.alpha * context) + fed * costs.draft.beta
    drafting += first_more(costs) if steps else 0.0
    verified = rows * (1 + longest) if host.verifies_padding else rows + sum(drafted)
    rest = costs.verify_seconds(verified, context) if longest else costs.plain_seconds(rows, context)
    return drafting + float(rest) + slots, drafting


def serve(policy, costs, host, rounds, rows, acceptance, random, spoilt=0.0, machine=lambda number: 1.0):
    """Rounds whose seconds are the model's, give or take 3 %; a share `spoilt` takes ten times as long. machine: how
    many times as long each round takes. Returns the longest draft of each, and its tokens and seconds by the model."""
    drafting = Drafting(policy, host=host)
    begin(policy, [100] * rows)
    lengths, longest, speed = [100] * rows, [], []
    for number in range(rounds):
        drafted, _ = one_round(policy, torch.ones(rows, dtype=torch.bool))
        wins = random.random((rows, policy.max_draft_tokens)) < acceptance
        accepted = torch.minimum(drafted, torch.from_numpy(np.cumprod(wins, axis=1).sum(1)))
        noise = machine(number) * random.normal(1, 0.03, 2) * (10 if random.random() < spoilt else 1)
        whole, draft_part = seconds_of(costs, host, drafted.tolist(), lengths)
        lengths = [length + 1 + int(new) for length, new in zip(lengths, accepted, strict=True)]
        draft_part, rest = draft_part * noise[0], (whole - draft_part) * noise[1]
        forwards = max(int(drafted.max()), int(host.feeds))
        told = {"seconds": draft_part + rest, "draft_seconds": draft_part, "draft_forwards": forwards}
        drafting.observe(outcome(drafted, accepted, lengths=lengths, **told))
        longest.append(int(drafted.max()))
        speed.append((rows + int(accepted.sum()), whole))
    return longest, np.array(speed)


@pytest.mark.parametrize("spoilt", [0.0, 0.1])
@pytest.mark.parametrize("host", [PACKED, PADDED, VLLM_V2], ids=["packed", "padded", "vllm"])
def test_they_come_to_the_seconds_of_rounds(host, spoilt):
    policy = BatchStopPolicy(FixedPolicy(6), LearntCosts())
    assert Signal.SECONDS in Drafting(policy).needs
    serve(policy, COSTS, host, 120, 4, 0.7, np.random.default_rng(0), spoilt)
    assert host.block > 1 or policy.costs.by_block == 0
    for tokens in (4, 12, 20):
        context = 4 * 300
        right = float(COSTS.verify_seconds(tokens, context))
        assert float(policy.costs.verify_seconds(tokens, context)) == pytest.approx(right, rel=0.1)
    right = float(COSTS.draft_seconds(4, 4 * 300))
    assert float(policy.costs.draft_seconds(4, 4 * 300)) == pytest.approx(right, rel=0.1)


def test_a_slower_machine_is_not_taken_for_longer_texts():
    """Both come by and by. When new, short texts arrive, forwards would seem to take next to no time."""
    policy = BatchStopPolicy(FixedPolicy(6), LearntCosts())
    costs = pair_costs(0.02, 0.004, 0.1)
    serve(policy, costs, PACKED, 120, 4, 0.5, np.random.default_rng(0), machine=lambda number: 1 + number / 240)
    long, short = (float(policy.costs.verify_seconds(8, 4 * length)) for length in (300, 100))
    assert short > 0.8 * long
    price = policy.costs.target.beta / (policy.costs.target.gamma + 8 * policy.costs.target.beta)
    assert price == pytest.approx(costs.target.beta / float(costs.verify_seconds(8, 0)), rel=0.25)


@pytest.mark.parametrize("acceptance", [0.35, 0.7])
def test_a_round_without_drafts_has_costs_of_its_own(acceptance):
    """It takes a fifth less than its tokens say. So drafting is given up where it pays by the other rounds alone."""
    costs = OtherWhenPlain(**vars(pair_costs(0.005, 0.004, 0.1)))
    policy = BatchStopPolicy(FixedPolicy(6), LearntCosts())
    longest, _ = serve(policy, costs, PACKED, 250, 4, acceptance, np.random.default_rng(0))
    plain = [float(each.plain_seconds(4, 4 * 300)) for each in (policy.costs, costs)]
    assert plain[0] == pytest.approx(plain[1], rel=0.05)
    right = float(costs.verify_seconds(8, 4 * 300))
    assert float(policy.costs.verify_seconds(8, 4 * 300)) == pytest.approx(right, rel=0.07)
    assert (np.mean(longest[100:]) < 0.7) == (acceptance == 0.35)


def test_few_rounds_with_drafts_are_no_outliers_among_many_without():
    """Of a real pair with 16 rows: the last four of the first rounds that drafted, and thirteen that did not. What a
    token costs once followed the noise of the latter, 4 ms, and nothing was drafted any more."""
    drafted = [(48, 99.7, 7), (80, 118.8, 9), (32, 112.1, 11), (64, 115.3, 12)]
    plain = [64.5, 72.4, 74.2, 70.1, 73.3, 81.2, 73.5, 70.8, 71.6, 70.8, 74.1, 71.4, 90.3, 71.6, 77.2]
    rounds = [Timed(1, seconds / 1e3, number, 16, 2000, tokens, tokens) for tokens, seconds, number in drafted]
    rounds += [
        Timed(0, each / 1e3, at, 16, 2000, 16, 16) for each, at in zip(plain, (8, 10, *range(13, 26)), strict=True)
    ]
    target, alone, _ = fitted(sorted(rounds, key=lambda each: each.number), 0.0, *OF_TARGET)
    for tokens in (32, 48, 64, 80):
        assert target.seconds(context_tokens=2000, batch_tokens=tokens) == pytest.approx(0.111, rel=0.15)
    assert alone.seconds(context_tokens=2000, batch_tokens=16) == pytest.approx(0.073, rel=0.05)


@pytest.mark.parametrize("policy", [GoodputPolicy, AdaSpecPolicy])
@pytest.mark.parametrize(("costs", "drafts"), [(PairCosts, True), (OtherWhenPlain, False)])
def test_drafting_is_held_against_a_round_without_drafts(policy, costs, drafts):
    """One of 1 s or of 0.8, where a token that is taken to be accepted in 6 or 7 of 10 cases takes 0.45 s to draft."""
    rule = policy(costs(**vars(pair_costs(0.45))))
    begin(rule, [10, 20])
    assert (rule.start_round(torch.ones(2, dtype=torch.bool)) > 0).tolist() == [drafts] * 2


@pytest.mark.parametrize("seed", [0, 3, 5])
@pytest.mark.parametrize("host", [PACKED, VLLM_V2], ids=["packed", "vllm"])
def test_the_first_draft_step_has_costs_of_its_own(host, seed):
    """It takes three times as long. Divided among the steps that would make the others too dear. With two seeds nearly
    all rounds of our loop draft two tokens, which alone do not tell."""
    costs = DearFirst(**vars(pair_costs(0.01, 0.002, 0.1)))
    policy = BatchStopPolicy(FixedPolicy(6), LearntCosts())
    serve(policy, costs, host, 250, 4, 0.6, np.random.default_rng(seed))
    for steps in (1, 2, 4):
        right = float(costs.draft_seconds(4, 4 * 300, steps))
        assert float(policy.costs.draft_seconds(4, 4 * 300, steps)) == pytest.approx(right, rel=0.1), steps
    assert float(policy.costs.draft_seconds(4, 4 * 300, 0)) == 0.0
    several = policy.costs.draft_seconds(4, 4 * 300, torch.arange(3))
    assert several.tolist() == [float(policy.costs.draft_seconds(4, 4 * 300, steps)) for steps in range(3)]


def ragged(costs, rounds, random, rows=16, learnt=None):
    """LearntCosts after so many rounds in which each row drafts 0 to 3 tokens, with seconds off by 10 %."""
    learnt = learnt or LearntCosts()
    learnt.host = PACKED
    for _ in range(rounds):
        drafted = random.integers(0, random.integers(1, 5), rows)
        lengths = random.integers(100, 300, rows)
        whole, draft_part = seconds_of(costs, PACKED, drafted.tolist(), lengths.tolist())
        told = {"seconds": draft_part + (whole - draft_part) * random.normal(1, 0.1), "draft_seconds": draft_part}
        counts = torch.from_numpy(drafted)
        learnt.observe(outcome(counts, counts, lengths=lengths.tolist(), draft_forwards=int(drafted.max()), **told))
    return learnt


@pytest.mark.parametrize("kind", [PairCosts, InBlocks])
def test_what_goes_by_blocks_is_learnt(kind):
    """Nothing, or two thirds of a token that is verified. In the mean of eight runs of 128 rounds a token's price is
    right to a seventh, and the part of blocks to a fifth of it."""
    costs = kind(**vars(pair_costs(0.02, 0.003, 0.1)))
    runs = [ragged(costs, 140, np.random.default_rng(seed)) for seed in range(8)]
    assert np.mean([run.target.beta for run in runs]) == pytest.approx(0.003, rel=0.15)
    assert np.mean([run.by_block for run in runs]) / 0.003 == pytest.approx(by_block_of(costs) / 0.003, abs=0.2)


def test_noise_is_averaged_over_many_rounds():
    """Seconds are off by 10 %. After 500 rounds the part of blocks is known to 6 % of a token in the mean; from 128 of
    them, to 15 %."""
    costs = InBlocks(**vars(pair_costs(0.02, 0.003, 0.1)))
    found = np.array([ragged(costs, 500, np.random.default_rng(seed)).by_block for seed in range(8)])
    assert np.abs(found - by_block_of(costs)).mean() < 0.06 * 0.003


@pytest.mark.parametrize(("rows", "rounds"), [(4, 140), (16, 520)])
def test_what_a_token_cost_before_is_forgotten(rows, rounds):
    """With fewer rows verifying is a matter of memory, and tokens cost next to nothing: that is known soon. If the
    machine becomes another under the same load, it takes longer."""
    random = np.random.default_rng(0)
    learnt = ragged(pair_costs(0.005, 0.004, 0.1), 500, random)
    assert learnt.target.beta == pytest.approx(0.004, rel=0.2)
    ragged(pair_costs(0.005, 0.0, 0.1), rounds, random, rows, learnt)
    assert learnt.target.beta < 0.0005


def test_a_few_slow_rounds_do_not_end_drafting():
    """All four of the first rounds that drafted took three times as long. In none of eight runs drafts end, and in most
    of them soon as much is drafted as without those rounds, two tokens."""
    longest = []
    for seed in range(8):
        policy, slow = BatchStopPolicy(FixedPolicy(6), LearntCosts()), (6, 8, 10, 11)
        given = COSTS, PACKED, 150, 4, 0.7, np.random.default_rng(seed)
        seen, _ = serve(policy, *given, machine=lambda number: 3.0 if number in slow else 1.0)  # noqa: B023
        longest.append(np.mean(seen[60:]))
    assert min(longest) > 0.9 and np.median(longest) > 1.8, longest


def test_the_first_rounds_try_several_lengths():
    policy = BatchStopPolicy(FixedPolicy(3), LearntCosts())
    longest, _ = serve(policy, COSTS, PACKED, 2 * len(TRIAL), 2, 0.7, np.random.default_rng(0))
    assert longest == [min(3, length) for length in TRIAL] * 2


@pytest.mark.parametrize("rule", ["batch stop", "goodput"])
def test_nothing_is_learnt_of_the_first_rounds(rule):
    """In which graphs are captured and kernels compiled: on an H100 a draft step seemed five times as dear as it is,
    and nothing was drafted any more."""
    policy = RULES[rule](LearntCosts())
    slow = pair_costs(3.0, 0.5, 1.0)
    serve(policy, slow, PACKED, len(TRIAL), 4, 0.7, np.random.default_rng(0))
    assert policy.costs.draft == LearntCosts().draft and not policy.costs.rests
    longest, _ = serve(policy, COSTS, PACKED, 60, 4, 0.7, np.random.default_rng(0))
    assert policy.costs.draft.gamma < 0.05 and np.mean(longest[20:]) > 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", [0.01, 0.5])
def test_it_settles_where_the_true_costs_do(draft, rule):
    """Drafting is nearly free, or dearer than verifying: a file with the true costs says how much to draft."""
    costs = pair_costs(draft, 0.02, 0.2, row=0.001)
    made = {}
    for name, given in (("told", costs), ("learnt", LearntCosts())):
        _, speed = serve(RULES[rule](given), costs, PACKED, 300, 4, 0.6, np.random.default_rng(1))
        tokens, seconds = speed[100:].sum(0)
        made[name] = tokens / seconds
    assert made["learnt"] > 0.98 * made["told"], made


def test_it_follows_a_machine_that_becomes_another():
    """Drafting becomes thirty times as dear: after 90 rounds, fewer than it knew before, next to nothing is drafted."""
    policy, random = BatchStopPolicy(FixedPolicy(8), LearntCosts()), np.random.default_rng(2)
    cheap, _ = serve(policy, pair_costs(0.01, 0.0, 0.2), PACKED, 150, 2, 0.6, random)
    assert np.mean(cheap[50:]) > 2
    dear, _ = serve(policy, pair_costs(0.3, 0.0, 0.2), PACKED, 120, 2, 0.6, random)
    assert np.mean(dear[90:]) < 0.2


@pytest.mark.parametrize("rule", ["batch stop", "goodput"])
def test_it_tries_again_where_drafting_was_too_dear(rule):
    """Drafting costs more than verifying, and then next to nothing: within 200 rounds that is known. Few are tried
    meanwhile; goodput also tries by itself."""
    policy, random = RULES[rule](LearntCosts()), np.random.default_rng(3)
    dear, _ = serve(policy, pair_costs(0.5, 0.0, 0.2), PACKED, 300, 2, 0.6, random)
    assert 1 <= sum(dear[100:]) <= (2 if rule == "batch stop" else 8)
    cheap, _ = serve(policy, pair_costs(0.002, 0.0, 0.2), PACKED, 300, 2, 0.6, random)
    assert np.mean(cheap[200:]) > 2


class FreeBeyondEight(PairCosts):
    """Each of the first eight tokens takes longer to verify, and no further one."""

    def verify_seconds(self, batch_tokens, context_tokens):
        return super().verify_seconds(min(batch_tokens, 8), context_tokens)


def test_a_load_at_which_nothing_was_drafted_yet_is_tried_at_once():
    """Two rows' drafts are not worth verifying. By the line through their seconds, eight rows' are not either."""
    policy, random = BatchStopPolicy(FixedPolicy(4), LearntCosts()), np.random.default_rng(5)
    costs = FreeBeyondEight(**vars(pair_costs(0.001, 0.05, 0.1)))
    few, _ = serve(policy, costs, PACKED, 200, 2, 0.4, random)
    assert np.mean(few[100:]) < 0.3
    many, _ = serve(policy, costs, PACKED, 250, 8, 0.4, random)
    assert many[:2] == [0, 1] and np.mean(many[150:]) > 0.8, many


@pytest.mark.parametrize("spec", ["confidence:0.2,k_max=6,costs=auto", "goodput,k_max=6", "adaspec:auto", "budget"])
def test_costs_that_are_learnt_leave_the_text_the_targets(spec):
    """With a real clock, greedily: whatever it takes the costs to be."""
    pair = toy_pair()
    prompts = [[1], [2, 3, 4, 0], [4, 4], [0, 1, 2], [3]]
    options = {"max_new_tokens": 24, "end_token_ids": [], "sampling": Sampling(temperature=0), "batch_size": 3}
    policy = make_policy(spec, pair.draft)
    made = generate(pair.target, pair.draft, prompts, policy=policy, **options)
    assert made.tokens == generate(pair.target, pair.draft, prompts, policy="none", **options).tokens
    assert policy.costs.host == PACKED and policy.costs.rounds > len(TRIAL)
    size = {"context_tokens": 60, "batch_tokens": 6}
    # What is believed, not what policies are told: while drafts are tried, they are free.
    assert policy.costs.target.seconds(**size) > 0 and policy.costs.draft.seconds(**size) > 0


def test_a_drafting_time_that_is_missing_would_show():
    """Without the split into drafting and the rest, all of a round would count as verification."""
    policy = BatchStopPolicy(FixedPolicy(4), LearntCosts())
    begin(policy, [5])
    drafted, _ = one_round(policy, torch.ones(1, dtype=torch.bool))
    told = outcome(drafted, drafted, lengths=[10], seconds=1.0, draft_seconds=0.9, draft_forwards=2)
    for _ in range(2 * len(TRIAL)):
        policy.costs.observe(told)
    assert float(policy.costs.verify_seconds(1, 5)) < 0.2
    with pytest.raises(AssertionError):
        policy.costs.observe(replace(told, draft_seconds=None))


def test_vllms_metrics_say_what_is_believed(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ACCEPT_HEAD_METRICS_DIR", str(tmp_path))
    costs, metrics = LearntCosts(), DraftMetrics(4, logger=logging.getLogger("serving"))
    serve(BatchStopPolicy(FixedPolicy(4), costs), COSTS, VLLM_V2, 60, 4, 0.7, np.random.default_rng(0))
    metrics.costs = costs
    with caplog.at_level("INFO", logger="serving"):
        metrics.log(metrics.flush())
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["costs"]["target"]["gamma"] == pytest.approx(0.1, rel=0.2)
    assert f"draft {1000 * costs.draft.gamma:.1f} ms + " in caplog.text


def test_other_words_than_auto_are_files():
    with pytest.raises(InputError, match="automatic"):
        make_policy("fixed:4,costs=automatic", toy_pair().draft)
