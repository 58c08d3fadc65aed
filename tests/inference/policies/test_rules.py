"""Rules of other authors against scalar references written from their formulas, and the loop's reports to a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.inference import RowPolicy, generate
from accept_head.inference.policies.adaedl import AdaEdlPolicy
from accept_head.inference.policies.max_prob import MeanMaxProbPolicy
from accept_head.inference.policy import DraftStep, Signal
from tests.inference.support.references import ScalarAdaEdl
from tests.inference.support.rounds import Given, Rowwise, begin, compare, outcome
from tests.inference.support.toy import ragged_prompts, toy_pair, two

T, F = True, False


def step(depth, active, **signals):
    return DraftStep(depth=depth, token_ids=None, active=torch.tensor(active), **signals)


# --- AdaEDL ----------------------------------------------------------------------------------------------------------


def test_adaedl_is_its_formula_for_each_row_over_many_rounds():
    def given(number, random):
        wins = random.random((5, 6)) < (0.95 if number % 2 else 0.6)
        return Given(random.random(5) < 0.9, wins, {"entropy": random.gamma(1.0, 0.8, size=(5, 6))})

    policy = AdaEdlPolicy(0.6, k_max=6)
    reference = Rowwise(lambda: ScalarAdaEdl(0.6, 6), levels="level", rates="rate")
    played = compare(policy, reference, given, 200, [3] * 5, moves=150)
    assert 100 < (played.drafted < 6).sum() < 999
    assert len({round(level, 4) for level in policy.levels.tolist()}) > 2, "rows must have gone their own ways"


def test_adaedl_always_draws_k_min_tokens_and_keeps_its_level_where_nothing_was_drafted():
    policy = begin(AdaEdlPolicy(0.9, k_min=2, k_max=5), [3, 3])
    spread = torch.tensor([5.0, 5.0])
    assert policy.draw_next(step(1, [T, T], entropy=spread)).tolist() == [T, T]
    assert policy.draw_next(step(2, [T, F], entropy=spread)).tolist() == [T, F]
    assert policy.draw_next(step(3, [T, T], entropy=spread)).tolist() == [F, F]
    policy.observe(outcome([0, 3], [0, 0], [T, F]))
    assert policy.levels.tolist() == pytest.approx([0.9, 0.9])


def test_adaedl_forgets_a_row_that_is_given_to_another_request_and_follows_rows_that_move():
    policy = begin(AdaEdlPolicy(0.5, k_max=4), [3] * 3)
    for accepted in ([0, 1, 4], [0, 2, 4], [1, 0, 4]):
        policy.observe(outcome([4, 4, 4], accepted))
    levels, rates = policy.levels.clone(), policy.rates.clone()
    policy.select(torch.tensor([2, 0]))
    assert policy.levels.tolist() == levels[[2, 0]].tolist() and policy.rates.tolist() == rates[[2, 0]].tolist()
    policy.admit(torch.tensor([1]), torch.tensor([7]))
    assert policy.levels.tolist() == pytest.approx([float(levels[2]), 0.5])
    assert policy.rates.tolist() == pytest.approx([float(rates[2]), 0.9])


# --- the mean of the batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "active", "goes_on"),
    [
        ([0.9, 0.1], [T, T], T),  # 0.5
        ([0.8, 0.1], [T, T], F),  # 0.45
        ([0.8, 0.1], [T, F], T),  # the row that is done does not count
        ([0.3, 0.99], [T, F], F),
    ],
)
def test_the_mean_rule_stops_all_rows_together(probabilities, active, goes_on):
    kept = MeanMaxProbPolicy(0.5).keep_drafting(step(1, active, max_prob=torch.tensor(probabilities)))
    assert kept.tolist() == [goes_on and row for row in active]


@pytest.mark.parametrize(
    "make", [lambda: MeanMaxProbPolicy(1.5), lambda: MeanMaxProbPolicy(0.5, k_max=0), lambda: AdaEdlPolicy(-0.1)]
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(InputError, match=r"is (1\.5|0|-0\.1), expected"):
        make()


# --- what the loop tells ---------------------------------------------------------------------------------------------


class Listener(RowPolicy):
    """Declines to draw by a coin, and remembers what it is told."""

    needs = frozenset({Signal.ENTROPY, Signal.MAX_PROB, Signal.DIVERGENCE, Signal.SECONDS})
    max_draft_tokens = 5

    def __init__(self):
        self.random = np.random.default_rng(1)
        self.peeked, self.kept, self.outcomes = [], [], []

    def draw_next(self, step):
        self.peeked.append(step)
        return step.active & torch.from_numpy(self.random.random(len(step.active)) < 0.7)

    def keep_drafting(self, step):
        self.kept.append(step)
        return step.active

    def observe(self, outcome):
        self.outcomes.append(replace(outcome, drafted=outcome.drafted.clone(), accepted=outcome.accepted.clone()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_that_peeks_sees_the_distribution_and_not_the_token(temperature):
    pair, policy = toy_pair(), Listener()
    prompts = ragged_prompts(4, vocab=5, longest=6)
    sampling = Sampling(temperature=temperature, top_k=0)
    _, stats = generate(pair.target, pair.draft, prompts, policy=policy, sampling=sampling, max_new_tokens=12)
    assert all(step.token_ids is None and step.logprob is None for step in policy.peeked)
    by_depth = [(peek, keep) for peek in policy.peeked for keep in policy.kept if keep is not peek]
    assert by_depth and {step.depth for step in policy.peeked} == {1, 2, 3, 4, 5}
    drafted = sum(int(outcome.drafted.sum()) for outcome in policy.outcomes)
    assert drafted == sum(row.drafted for row in stats)
    # Each refusal costs the forward that the distribution came from.
    assert sum(row.draft_forwards for row in stats) > drafted
    assert all(outcome.seconds > 0 for outcome in policy.outcomes)


def test_peeking_changes_no_greedy_token():
    target, draft = two(*_llama())
    prompts = ragged_prompts(5)
    plain = generate(target, draft, prompts, policy="none", max_new_tokens=20).tokens
    assert generate(target, draft, prompts, policy=Listener(), max_new_tokens=20).tokens == plain


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_divergence_is_that_of_both_models_on_the_text_itself(temperature):
    target, draft = two(*_llama())
    (prompt,), policy = [[3, 1, 4]], Listener()
    sampling = Sampling(temperature=temperature, top_k=3)
    tokens, _ = generate(target, draft, [prompt], policy=policy, sampling=sampling, max_new_tokens=20, seed=3)
    place, compared = len(prompt), 0
    for told in policy.outcomes:
        judged = int(told.judged[0])
        for slot in range(judged):
            prefix = torch.tensor([[*prompt, *tokens[0]][: place + slot]])
            with torch.no_grad():
                p, q = (
                    (model(prefix).logits[0, -1].double() / (temperature or 1.0)).softmax(-1).numpy()
                    for model in (target, draft)
                )
            expected = float((p * (np.log(p) - np.log(q))).sum())
            assert float(told.divergence[0, slot]) == pytest.approx(expected, rel=1e-3, abs=1e-4)
            compared += 1
        place += int(told.accepted[0]) + 1
        assert int(told.lengths[0]) == min(place, len(prompt) + 20)
    assert compared > 5


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM, LlamaConfig
