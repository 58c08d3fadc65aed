"""transformers' own two rules against transformers itself: against its class, and against its decoding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from accept_head import InputError
from accept_head.inference import generate
from accept_head.inference.policies.hf_confidence import HfConfidencePolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from accept_head.inference.policy import DraftStep
from tests.inference.support.rounds import Given, Reference, Rowwise, begin, compare, one_round, outcome
from tests.inference.support.toy import ragged_prompts, two


class Theirs:
    """transformers' class, without models, as the reference of one row."""

    def __init__(self, schedule="constant", threshold=0.0, k=20):
        self.generator = generator = object.__new__(AssistedCandidateGenerator)
        generator.assistant_generation_config = SimpleNamespace(
            num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=threshold
        )
        generator.generation_config = SimpleNamespace(assistant_confidence_threshold=threshold)
        generator.num_assistant_tokens, generator.probs, generator.matches = k, [], []

    def drafts(self, shown, room):
        return min(room, self.generator.num_assistant_tokens)

    def verified(self, round):
        self.generator.update_candidate_strategy(None, [range(round.drafted + 1)], round.accepted)


# --- +2, −1 ----------------------------------------------------------------------------------------------------------


def test_the_heuristic_is_transformers_own_for_each_row():
    rates = np.array([[0.05], [0.2], [0.4], [0.6]])  # of rounds that are accepted as a whole

    def given(number, random):
        wins = (random.random((4, 1)) < rates) | (random.random((4, 30)) < 0.8)
        room = np.where(random.random(4) < 0.5, 30, random.integers(0, 30, 4))  # the end of the response
        return Given(random.random(4) < 0.9, wins, room=room)

    reference = Rowwise(lambda: Theirs("heuristic_transient"))
    played = compare(HfHeuristicPolicy(k_max=10_000), reference, given, 300, [3] * 4, moves=50)
    assert {1, 2, 20, 22} <= set(played.drafted.flat)


def test_the_heuristic_stays_at_its_cap_and_comes_down_at_once():
    policy = HfHeuristicPolicy(5, k_max=8)
    begin(policy, [3] * 1)
    seen = []
    for accepted in (5, 7, 8, 8, 0, 0):
        k = policy.start_round(torch.tensor([True]))
        seen.append(int(k[0]))
        policy.observe(outcome(k, [accepted]))
    assert seen == [5, 7, 8, 8, 8, 7]
    policy = HfHeuristicPolicy(k_max=8)
    begin(policy, [3] * 1)
    assert policy.start_round(torch.tensor([True])).tolist() == [8]


def test_the_schedule_that_persists_hands_the_mean_on_and_the_transient_one_does_not():
    for persist, expected in ((True, 9), (False, 6)):
        policy = HfHeuristicPolicy(6, persist=persist)
        begin(policy, [3] * 3)
        for _ in range(3):
            policy.observe(outcome([6, 6, 6], [6, 6, 0], [True, True, False]))
        policy.observe(outcome([6, 6, 6], [6, 0, 6], [True, True, False]))  # 14, 11 and an idle row
        policy.observe(outcome([6, 6, 6], [0, 0, 0], [False, True, False]))  # 10
        policy.observe(outcome([6, 6, 6], [0, 0, 0], [False, True, False]))  # 9
        policy.admit(torch.tensor([2]), torch.tensor([4]))
        live = torch.ones(3, dtype=torch.bool)
        assert policy.start_round(live).tolist() == [14, 9, expected]
        begin(policy, [3] * 2)
        assert policy.start_round(live[:2]).tolist() == [expected] * 2


# --- the threshold and its curve -------------------------------------------------------------------------------------


class Threshold(Reference):
    """θ of all rows together; they draft all that they may."""

    def __init__(self, policy):
        self.policy, self.theirs, self.seen = policy, Theirs(threshold=0.4).generator, set()

    def drafts(self, live, given, lengths):
        self.shown = {row: given.of(row)[0]["logprob"] for row in live}
        return [given.of(row)[1] for row in live]

    def verified(self, rounds):
        for each in rounds:
            self.theirs.probs.extend(np.exp(self.shown[each.row][: each.drafted]).tolist())
            self.theirs.update_candidate_strategy(None, [range(each.drafted + 1)], each.accepted)

    def state(self):
        assert len(self.policy.matches) == len(self.theirs.matches)
        assert self.policy.matches.sum() == sum(self.theirs.matches)
        self.seen.add(round(self.policy.threshold, 3))
        return {"threshold": self.theirs.assistant_generation_config.assistant_confidence_threshold}


@pytest.mark.parametrize("rows", [1, 4])
def test_the_threshold_is_transformers_own_after_every_round(rows):
    def given(number, random):
        q = random.integers(1, 50, (rows, 7)) / 50  # few values, so that ties are common
        wins = random.random((rows, 7)) < q
        return Given(random.random(rows) < 0.9, wins, {"logprob": np.log(q)}, random.integers(0, 7, rows))

    policy = HfConfidencePolicy(k_min=7)
    reference = Threshold(policy)
    for seed in (rows, rows + 4):  # another batch: what was learnt stays
        compare(policy, reference, given, 75, [3] * rows, moves=50, seed=seed)
    assert len(reference.seen) > 3 and 0.4 in reference.seen


def play(policy, drafted, accepted, q):
    """One round of one row that drafts so many of the tokens with these probabilities."""
    one_round(policy, [True], {"logprob": np.log(q)}, drafted)
    policy.observe(outcome([drafted], [accepted]))


def test_the_threshold_waits_for_enough_tokens_of_both_kinds():
    policy, q = HfConfidencePolicy(0.4, k_min=6), [[0.9, 0.8, 0.7, 0.1, 0.1, 0.1]]
    play(policy, 6, 6, q)
    assert policy.threshold == 0.4 and len(policy.matches) == 6
    play(policy, 3, 1, q)  # the third token is not judged
    assert len(policy.matches) == 8 and policy.threshold == pytest.approx(0.1)
    policy = HfConfidencePolicy(0.4, k_min=6)
    play(policy, 5, 4, q)
    assert policy.threshold == 0.4, "five tokens are not enough"
    play(policy, 1, 1, q)
    assert policy.threshold == pytest.approx(0.7)


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


def test_a_token_below_the_threshold_is_kept_and_the_last():
    policy = HfConfidencePolicy(0.4, k_min=2)
    assert policy.start_round(torch.tensor([True] * 3)).tolist() == [20] * 3
    active = torch.tensor([True, True, False])
    for depth, expected in ((1, [True, True, False]), (2, [True, False, False])):
        logprob = torch.tensor([0.41, 0.39, 0.9]).log()
        assert policy.keep_drafting(DraftStep(depth, None, active, logprob=logprob)).tolist() == expected
    policy.threshold = float(logprob[0].exp())
    assert policy.keep_drafting(DraftStep(3, None, active, logprob=logprob)).tolist() == [True, False, False]


# --- both, decoding --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "policy",
    [HfHeuristicPolicy(3), HfHeuristicPolicy(3, persist=True), HfConfidencePolicy(0.4)],
    ids=["heuristic", "persist", "confidence"],
)
def test_the_text_is_the_targets_whatever_is_learned(policy):
    target, draft = two(LlamaForCausalLM, LlamaConfig)
    prompts = ragged_prompts(6)
    plain = generate(target, draft, prompts, policy="none", max_new_tokens=24, batch_size=3).tokens
    tokens, stats = generate(target, draft, prompts, policy=policy, max_new_tokens=24, batch_size=3)
    assert tokens == plain
    assert sum(row.drafted for row in stats) > 50 and sum(row.accepted for row in stats) > 10
    if isinstance(policy, HfConfidencePolicy):
        judged = policy.matches
        assert judged.sum() == sum(row.accepted for row in stats) and 0 < policy.threshold != 0.4


@pytest.mark.parametrize(
    "make",
    [
        lambda: HfHeuristicPolicy(0),
        lambda: HfHeuristicPolicy(k_max=0),
        lambda: HfConfidencePolicy(0.0),
        lambda: HfConfidencePolicy(1.1),
        lambda: HfConfidencePolicy(window=5),
        lambda: HfConfidencePolicy(k_min=3, k_max=2),
    ],
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(InputError, match="expected"):
        make()
