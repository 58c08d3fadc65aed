"""Online training: its gradient against a formula, the truth it must find, rounds it must ignore, and its hosts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from accept_head import AcceptanceHead, InputError, Sampling
from accept_head.alternatives import Alternatives
from accept_head.calibration import DepthCalibration
from accept_head.head.scorer import make_scorer
from accept_head.head_config import HeadConfig
from accept_head.inference import generate, make_policy
from accept_head.inference.adapters.vllm.host import PolicyHost, Verdict
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.training import Judged, OnlineTraining
from accept_head.inference.policy import Signal
from accept_head.inference.replay.asking import replay
from tests.inference.support.foreign import Engine
from tests.inference.support.made_up import make_sample
from tests.inference.support.online_heads import DEPTHS, HIDDEN, correction, linear_head
from tests.inference.support.rounds import outcome
from tests.inference.support.rules_by_hand import head_of
from tests.inference.support.toy import random_head, toy_pair

CPU = torch.device("cpu")
SIGNALS = random_head(16, reads="before", signals=True)


# --- labels ----------------------------------------------------------------------------------------------------------


def test_labels_are_outcomes_or_where_they_are_told_their_chances():
    coins = outcome([3, 3], [1, 3])
    assert coins.labels(3).tolist() == [[1, 0, 0], [1, 1, 1]]
    told = outcome([3, 3], [1, 3], acceptance=torch.tensor([[0.9, 0.2], [0.6, 0.7]]))
    assert torch.equal(told.labels(3), torch.tensor([[0.9, 0.2, 0.0], [0.6, 0.7, 1.0]]))
    assert told.labels(1).shape == (2, 1) and told.labels(0).shape == (2, 0)


@pytest.mark.parametrize("verifier", ["ratio", "match"])
def test_the_decode_loop_tells_the_chance_by_the_ratio_test_alone(verifier):
    """Against p and q of the models themselves; and by the sampler match nothing is told."""
    pair, seen, rounds = toy_pair(), [], []

    class Watching(RecalibratedHeadPolicy):
        def observe(self, outcome):
            super().observe(outcome)
            seen.append(outcome)

    def watch(made):
        shown = [torch.stack(part, 1) for part in (made.drafted.probabilities, made.drafted.ids) if part]
        rounds.append((made.scores.softmax(-1), *shown))

    policy = Watching(random_head(16, reads="before"), 0.9, k_max=4, online=True)
    assert Signal.ACCEPTANCE in policy.needs
    generate(pair.target, pair.draft, [[1, 2], [3, 4, 0]], policy=policy, max_new_tokens=30, end_token_ids=(),
             sampling=Sampling(temperature=1.0), verifier=verifier, watch=watch)  # fmt: skip
    assert len(seen) == len(rounds) > 3
    if verifier == "match":
        assert all(each.acceptance is None for each in seen)
        return
    compared = 0
    for each, (p, *drawn) in zip(seen, rounds, strict=True):
        for row in range(len(each.judged)):
            for slot in range(int(each.judged[row]) if each.live[row] else 0):
                q, ids = drawn
                y = ids[row, slot]
                chance = min(1.0, float(p[row, slot, y] / q[row, slot, y]))
                assert float(each.acceptance[row, slot]) == pytest.approx(chance, abs=1e-5)
                compared += 1
    assert compared > 20


# --- one step --------------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_corrected_cross_entropy():
    """−∂/∂w Σ log-likelihood = mean of (σ(s·z + u·x + b_d) − a)·s·h, of a linear head."""
    random, head = np.random.default_rng(0), linear_head()
    train, corrected = OnlineTraining(head), correction()
    corrected.pooled = torch.tensor([0.3, 0.1, -0.2, 0.4, 0.5], dtype=torch.float64)
    h, label = random.normal(size=(50, HIDDEN)), random.random(50)
    depth, weight = random.integers(DEPTHS, size=50), random.integers(2, size=50)
    numbers = [torch.from_numpy(v) for v in (h, np.zeros((50, 3)), np.zeros(50), depth, label, weight)]
    tokens = Judged(*[v.long() if i in (2, 3) else v.float() for i, v in enumerate(numbers)])
    train._loss(tokens, corrected).backward()
    w, b = (p.detach().double().numpy() for p in (head.output.weight[0], head.output.bias))
    slope, intercepts = np.exp(0.3), np.array([0.1, -0.2, 0.4, 0.5])
    p = 1 / (1 + np.exp(-(slope * (h @ w + b) + intercepts[depth])))
    expected = ((p - label) * weight)[:, None] * slope * h
    np.testing.assert_allclose(train.learner.output.weight.grad[0], expected.mean(0), atol=1e-6)


def test_decisions_are_made_by_the_average_of_the_steps_and_the_given_head_stays():
    head = linear_head()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    train = OnlineTraining(head, lr=0.1)
    learn(train, rounds=train.INTERVAL, rows=64, truth=np.zeros(HIDDEN))
    mean = before["output.weight"].clone()
    learner = OnlineTraining(head, lr=0.1)
    for _ in range(learner.STEPS):  # the same two steps, and the average by hand
        learner.memory, learner.noted = train.memory, train.noted
        learner.optimizer.zero_grad()
        learner._loss(learner._sample(learner.MOST), correction()).backward()
        learner.optimizer.step()
        mean += learner.AVERAGE * (learner.learner.output.weight.detach() - mean)
    torch.testing.assert_close(train.served.output.weight, mean)
    assert not torch.equal(train.served.output.weight, train.learner.output.weight)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())


# --- what it finds ---------------------------------------------------------------------------------------------------


def learn(train, *, rounds, rows=16, truth, soft=False, seed=0):
    random, corrected = np.random.default_rng(seed), correction()
    for _ in range(rounds):
        train.start_round()
        h = random.normal(size=(rows, DEPTHS, HIDDEN)).astype(np.float32)
        chance = 1 / (1 + np.exp(-(h @ truth)))
        for depth in range(DEPTHS):
            train.score(torch.from_numpy(h[:, depth]))
        passed = random.random((rows, DEPTHS)) < chance
        accepted = passed.cumprod(-1).sum(-1)
        told = torch.from_numpy(chance).float() if soft else None
        train.observe(outcome(np.full(rows, DEPTHS), accepted, acceptance=told), corrected)


TRUTH = np.linspace(-1.5, 2.0, HIDDEN)


def distance(train):
    return np.linalg.norm(train.served.output.weight.detach().numpy()[0] - TRUTH)


def test_it_finds_the_weights_that_made_the_verdicts():
    train = OnlineTraining(linear_head(), lr=0.03)
    learn(train, rounds=2000, truth=TRUTH)
    assert distance(train) < 0.15


def test_it_finds_them_sooner_where_chances_are_told():
    found = []
    for soft in (False, True):
        train = OnlineTraining(linear_head(), lr=0.03)
        learn(train, rounds=2000, truth=TRUTH, soft=soft)
        found.append(distance(train))
    assert found[1] < 0.7 * found[0]


# --- what it learns from ---------------------------------------------------------------------------------------------


def test_only_judged_tokens_of_live_rows_are_ever_drawn():
    train = OnlineTraining(linear_head())
    train.start_round()
    for depth in range(3):
        train.score(torch.full((3, HIDDEN), float(depth)) + torch.arange(3)[:, None] / 10)
    # Row 0: Y_1 accepted, Y_2 rejected; row 1 did not take part; row 2 submitted one token alone.
    told = torch.full((3, 3), float("nan"))
    told[0, :2], told[2, 0] = torch.tensor([0.75, 0.25]), 0.5
    train.observe(outcome([3, 3, 1], [1, 0, 0], live=[True, False, True], acceptance=told), correction())
    sample = train._sample(500)
    drawn = {(round(float(h[0]), 1), int(d), float(a)) for h, d, a in zip(sample.hidden, sample.depth, sample.label)}  # noqa: B905
    assert drawn == {(0.0, 0, 0.75), (1.0, 1, 0.25), (0.2, 0, 0.5)}


def test_it_keeps_copies_of_what_a_host_writes_over_and_forgets_rounds_whose_rows_changed():
    train, shown = OnlineTraining(linear_head()), torch.zeros(1, HIDDEN)
    for value in (1.0, 2.0):
        train.start_round()
        shown.fill_(value)
        train.score(shown)
        if value == 2.0:
            train.forget_round()
        train.observe(outcome([1], [1]), correction())
    shown.fill_(9.0)
    assert set(train._sample(50).hidden[:, 0].tolist()) == {1.0}


def test_new_tokens_take_the_place_of_the_oldest(monkeypatch):
    monkeypatch.setattr(OnlineTraining, "SLOTS", 10)
    train = OnlineTraining(linear_head())
    for number in range(9):
        train.start_round()
        train.score(torch.full((3, HIDDEN), float(number)))
        train.observe(outcome([1] * 3, [1] * 3), correction())
    assert set(train._sample(400).hidden[:, 0].tolist()) == {6.0, 7.0, 8.0}


def test_what_is_no_number_does_not_stay_in_the_weights(monkeypatch):
    monkeypatch.setattr(OnlineTraining, "FEWEST", 1)
    train = OnlineTraining(random_head(HIDDEN, reads="before", signals=True))
    broken = torch.tensor([[float("nan")] * HIDDEN, [float("inf")] * HIDDEN, [1.0] * HIDDEN])
    others = torch.tensor([0.5, float("nan"), 0.5, 0.5]).expand(3, 1, -1)
    for _ in range(2 * train.INTERVAL):
        train.start_round()
        train.score(broken, broken[:, :3], torch.zeros(3, dtype=torch.long))
        told = outcome([1] * 3, [1] * 3, acceptance=torch.tensor([[0.5], [0.5], [float("nan")]]))
        object.__setattr__(told, "alternatives", Alternatives(torch.zeros(3, 1, 4, dtype=int), others, others))
        train.observe(told, correction())
    assert all(each.isfinite().all() for each in train.served.parameters())
    assert train._sample(200).label.unique().tolist() == [0.5]


def test_where_nothing_was_judged_a_step_changes_nothing(monkeypatch):
    monkeypatch.setattr(OnlineTraining, "FEWEST", 1)
    train = OnlineTraining(linear_head())
    before = train.served.output.weight.clone()
    for _ in range(train.INTERVAL):
        train.start_round()
        train.score(torch.ones(2, HIDDEN))
        train.observe(outcome([0, 0], [0, 0]), correction())
    assert torch.equal(train.served.output.weight, before)


def test_it_learns_in_vllms_inference_mode():
    with torch.inference_mode():
        train = OnlineTraining(linear_head(), lr=0.1)
        before = train.served.output.weight.clone()
        learn(train, rounds=2 * train.INTERVAL, truth=TRUTH)
    assert not torch.equal(train.served.output.weight, before)


# --- in a policy -----------------------------------------------------------------------------------------------------


def test_it_is_refused_where_it_could_not_be_trusted_or_does_not_fit():
    head, both = linear_head(), AcceptanceHead(HeadConfig(hidden_size=HIDDEN, depth=1, predicts="both"))
    for options in ({}, {"online": True, "per_tenant": True}, {"online": True, "tenant_share": 0.5}):
        with pytest.raises(InputError, match="head train is true, which goes with online=true"):
            RecalibratedHeadPolicy(head, 0.5, train=True, **options)
    maps = DepthCalibration(method="affine", slopes=(1.0,), intercepts=(0.0,))
    with pytest.raises(InputError, match="head train is true, and calibration, too"):
        RecalibratedHeadPolicy(head, 0.5, train=True, online=True, calibration=maps)
    with pytest.raises(InputError, match="predicts 'token', this one 'both'"):
        RecalibratedHeadPolicy(both, 0.5, train=True, online=True)
    with pytest.raises(InputError, match="lr is -1"):
        OnlineTraining(head, lr=-1)


def test_without_a_table_the_scorer_follows_weights_that_move():
    """As a table of projected embeddings would not."""
    head = random_head(16, reads="before", embeddings=torch.randn(9, 16))
    hidden, ids = torch.randn(5, 16), torch.tensor([0, 3, 8, 3, 1])
    live, folded = make_scorer(head, table=False), make_scorer(head)
    assert torch.allclose(live(hidden, None, ids), folded(hidden, None, ids), atol=1e-6)
    with torch.no_grad():
        head.embedding_input.weight.mul_(3.0)
    moved = head.probability(hidden, token_ids=ids)
    assert torch.allclose(live(hidden, None, ids), moved, atol=1e-6)
    assert not torch.allclose(folded(hidden, None, ids), moved, atol=1e-3)


def test_text_is_the_targets_own_whatever_it_learns():
    pair, prompts = toy_pair(), [[1, 2, 3], [4], [0, 1], [2, 2, 2, 1], [3, 3]]
    policy = RecalibratedHeadPolicy(
        random_head(16, reads="before", signals=True), 0.8, k_max=4, online=True, train=True
    )
    eager(policy)
    before = policy.training.served.output.weight.clone()
    texts = [
        generate(pair.target, pair.draft, prompts, policy=each, sampling=Sampling(temperature=0), max_new_tokens=40,
                 batch_size=3)[0]
        for each in ("none", policy)
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert not torch.equal(policy.training.served.output.weight, before)


def test_what_it_learns_changes_what_is_drafted_and_frozen_it_is_the_head(folder):
    traces = make_sample(3, responses=30, max_new_tokens=40).couple(folder)
    head = head_of(reads="before", signals=True)
    plain = replay(traces, HeadPolicy(head, 0.6, k_max=5), "plain", batch=3)
    for learning in (True, False):
        policy = RecalibratedHeadPolicy(head, 0.6, k_max=5, online=True, train=True, prior=math.inf)
        eager(policy)
        policy.recalibration.learning = learning
        counts = replay(traces, policy, "trained", batch=3).counts
        assert (counts != plain.counts).any() == learning
        assert torch.equal(policy.training.served.output.weight, head.output.weight) != learning


def test_frozen_it_keeps_what_it_remembers(folder):
    traces = make_sample(3, responses=30, max_new_tokens=40).couple(folder)
    policy = RecalibratedHeadPolicy(head_of(reads="before", signals=True), 0.6, k_max=5, online=True, train=True)
    eager(policy)
    replay(traces, policy, "trained", batch=3)
    before = [part.clone() for part in policy.training.memory]
    assert before[-1].sum() > 0
    for learning in (False, True):
        policy.recalibration.learning = learning
        replay(traces, policy, "trained", batch=2)
        same = [torch.equal(one, other) for one, other in zip(before, policy.training.memory, strict=True)]
        assert all(same) != learning


def test_what_it_learnt_outlives_start_and_can_be_saved(folder, tmp_path):
    policy = RecalibratedHeadPolicy(head_of(reads="before", signals=True), 0.6, k_max=5, online=True, train=True)
    eager(policy)
    replay(make_sample(3, responses=30, max_new_tokens=40).couple(folder), policy, "trained", batch=3)
    weight = policy.training.served.output.weight.clone()
    policy.start(2, CPU)
    assert torch.equal(policy.training.served.output.weight, weight)
    policy.training.served.save_pretrained(tmp_path)
    assert torch.equal(AcceptanceHead.from_pretrained(tmp_path).output.weight, weight)


def test_in_a_foreign_loop_it_learns_from_the_outcomes_alone():
    """vLLM's host, which tells no chances: the verdict comes with the next round, whose rows are others."""
    policy = RecalibratedHeadPolicy(
        random_head(16, reads="before", signals=True), 1.0, k_max=3, online=True, train=True
    )
    host, engine = PolicyHost(policy, rows=4, limit=3, device=CPU, greedy=False), Engine(3, 3, seed=0)
    engine.round(host, ["a", "b", "c"])
    verdict = Verdict(submitted=torch.tensor([3, 3]), accepted=torch.tensor([3, 1]))  # of c and a; b is gone
    Engine(2, 3, seed=1).round(host, ["c", "a"], verdict=verdict)
    sample = policy.training._sample(300)
    drawn = {(int(d), float(a), tuple(h.tolist())) for h, d, a in zip(sample.hidden, sample.depth, sample.label)}  # noqa: B905
    expected = {"a": [1.0, 0.0], "c": [1.0, 1.0, 1.0]}
    assert drawn == {
        (depth, label, tuple(engine.hidden[depth]["abc".index(name)].tolist()))
        for name, labels in expected.items()
        for depth, label in enumerate(labels)
    }


def test_a_spec_turns_it_on(tmp_path):
    head = SIGNALS
    head.save_pretrained(tmp_path / "head")
    policy = make_policy(f"head:{tmp_path / 'head'}:0.5,online=true,train=true", toy_pair())
    assert isinstance(policy, RecalibratedHeadPolicy) and policy.training is not None
    assert policy.recalibration.state == 0  # the last layer is learnt with the others


def eager(policy):
    """It steps as soon as a test can wait for."""
    policy.training.INTERVAL, policy.training.FEWEST = 2, 1
