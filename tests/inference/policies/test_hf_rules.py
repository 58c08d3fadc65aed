"""transformers' own two rules against its decoding, and what transformers has not: a window."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from accept_head.inference import generate
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from tests.inference.support.rounds import one_round, outcome
from tests.inference.support.toy import ragged_prompts, two


def play(policy, drafted, accepted, q):
    """One round of one row that drafts so many of the tokens with these probabilities."""
    one_round(policy, [True], {"logprob": np.log(q)}, drafted)
    policy.observe(outcome([drafted], [accepted]))


def test_only_the_newest_tokens_count_where_there_is_a_window():
    random, policy = np.random.default_rng(3), HfConfidencePolicy(0.4, k_min=4, window=50)
    unbounded = HfConfidencePolicy(0.4, k_min=4)
    for number in range(80):
        q = random.random((1, 4))
        accepted = int(((q < 0.5) if number < 40 else (q > 0.8)).cumprod(1).sum())
        for each in (policy, unbounded):
            play(each, 4, accepted, q)
    assert len(policy.matches) == 50 and policy.matches.tolist() == unbounded.matches[-50:].tolist()
    assert policy.threshold > 0.75 > unbounded.threshold


@pytest.fixture
def their_rounds(monkeypatch):
    """(drafted, accepted) of each round that transformers decodes."""
    rounds, update = [], AssistedCandidateGenerator.update_candidate_strategy

    def listen(self, input_ids, scores, num_matches):
        rounds.append((len(scores[0]) - 1, int(num_matches)))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", listen)
    return rounds


@pytest.mark.parametrize("rule", ["heuristic_transient", "heuristic", "confidence"])
def test_rounds_are_those_of_transformers_token_for_token(rule, their_rounds):
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    config = draft.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold = 6, 0.0
    config.num_assistant_tokens_schedule = rule if "heuristic" in rule else "constant"
    policy = HfHeuristicPolicy(6, persist=rule == "heuristic")
    if rule == "confidence":
        config.assistant_confidence_threshold, policy = 0.4, HfConfidencePolicy(0.4, k_max=6)
    compared = []
    for prompt in ragged_prompts(4):
        if rule == "confidence":
            policy = HfConfidencePolicy(0.4, k_max=6)  # transformers loses θ with each call
        their_rounds.clear()
        # No pad token: with one, its assistant drafts as if that token in a prompt were not there.
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": None, "max_new_tokens": 36}
        output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
        rounds = []
        tokens, _ = generate(
            target,
            draft,
            [prompt],
            policy=policy,
            max_new_tokens=36,
            watch=lambda round, rounds=rounds: rounds.append(
                (int(round.outcome.drafted[0]), int(round.outcome.accepted[0]))
            ),
        )
        assert tokens[0] == output[0, len(prompt) :].tolist()
        assert rounds == their_rounds
        compared += rounds
    assert len(compared) > 30 and len({drafted for drafted, _ in compared}) > 4
