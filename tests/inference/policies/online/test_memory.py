"""The memory of online training when a host reports only outcomes, and when the memory is full."""

from __future__ import annotations

import torch

from accept_head.inference.policies.online.training import OnlineTraining
from tests.inference.support.online_heads import HIDDEN, correction, linear_head
from tests.inference.support.rounds import outcome


def judge(train, values):
    """A round of one row, whose tokens have these states."""
    train.start_round()
    for value in values:
        train.score(torch.full((1, HIDDEN), value))


def remembered(train):
    """(state, label) of what can be drawn."""
    sample = train._sample(300)
    known = sample.weight > 0
    return set(zip(sample.hidden[known, 0].tolist(), sample.label[known].tolist(), strict=True))


def test_of_outcomes_alone_the_first_rejected_token_is_the_last_that_is_learnt():
    train = OnlineTraining(linear_head())
    judge(train, [1.0, 2.0, 3.0, 4.0])
    train.observe(outcome([4], [1]), correction())
    assert remembered(train) == {(1.0, 1.0), (2.0, 0.0)}


def test_a_place_that_is_taken_again_by_tokens_without_a_verdict_is_empty(monkeypatch):
    monkeypatch.setattr(OnlineTraining, "SLOTS", 2)
    train = OnlineTraining(linear_head())
    judge(train, [1.0, 2.0])
    train.observe(outcome([2], [2]), correction())
    judge(train, [3.0])
    train.forget_round()
    train.observe(outcome([1], [1]), correction())
    assert remembered(train) == {(2.0, 1.0)}
