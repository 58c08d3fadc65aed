"""What the loop tells a policy: distributions before it draws from them, verdicts, and how far the models are apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import Sampling
from accept_head.inference import RowPolicy, generate
from accept_head.inference.policy import Signal
from tests.inference.support.toy import ragged_prompts, toy_pair, two


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
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    prompts = ragged_prompts(5)
    plain = generate(target, draft, prompts, policy="none", max_new_tokens=20).tokens
    assert generate(target, draft, prompts, policy=Listener(), max_new_tokens=20).tokens == plain


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_divergence_is_that_of_both_models_on_the_text_itself(temperature):
    target, draft = two(LlamaForCausalLM, LlamaConfig)
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
