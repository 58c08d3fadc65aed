"""The limits around a policy: no row drafts beyond its budget, continues after a stop, or submits undrafted tokens."""

from __future__ import annotations

import torch

from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policy import RowPolicy
from tests.inference.support.rounds import one_round


class Answers(RowPolicy):
    """Gives the answers that it is given: the budgets, who goes on after each token, and what is kept."""

    max_draft_tokens = 4

    def __init__(self, budgets, goes_on, kept):
        self.budgets, self.goes_on, self.kept = budgets, goes_on, torch.tensor(kept)

    def start_round(self, live):
        return torch.tensor(self.budgets)

    def keep_drafting(self, step):
        return torch.tensor(self.goes_on[step.depth - 1])


class Trimming(Answers):
    def trim(self, drafted):
        return self.kept


def test_a_row_drafts_its_budget_and_no_more_beside_rows_that_may_draft_more():
    for room, expected in ((99, [1, 2, 4, 0]), (3, [1, 2, 3, 0])):
        policy = Answers([1, 2, 4, 4], [[True] * 4] * 4, [])
        assert one_round(policy, [True, True, True, False], room=room)[0].tolist() == expected


def test_a_row_that_has_stopped_does_not_go_on_when_the_policy_says_so():
    policy = Answers([4, 4], [[False, True], [True, True], [True, True], [True, True]], [])
    assert one_round(policy, [True, True])[0].tolist() == [1, 4]


def test_no_row_submits_more_than_it_drafted_or_less_than_nothing():
    policy = Trimming([1, 2, 4, 4], [[True] * 4] * 4, [3, 1, -2, 4])
    drafted, submitted = one_round(policy, [True] * 4)
    assert drafted.tolist() == [1, 2, 4, 4] and submitted.tolist() == [1, 1, 0, 4]


class MayRest(Answers):
    may_rest = True


def test_who_may_rest_is_asked_in_ever_fewer_rounds_while_nothing_is_drafted():
    drafting = Drafting(MayRest([0], [], []))
    asked = [number for number in range(1, 61) if not drafting.prepare([True], drafted=False)]
    assert asked == [*range(1, 9), 10, 12, 14, 18, 21, *range(24, 61, 4)]
    assert not any(drafting.prepare([True], drafted=number == 0) for number in range(8))  # from the beginning
    other = Drafting(Answers([0], [], []))
    assert not any(other.prepare([True], drafted=False) for _ in range(60))


class Planning(MayRest):
    planned = 0

    def plan(self, live):
        assert live == [True, False]
        self.planned += 1


def test_a_policy_plans_each_round_in_which_it_is_asked():
    policy = Planning([0], [], [])
    drafting = Drafting(policy)
    rests = [drafting.prepare([True, False], drafted=number < 3) for number in range(60)]
    assert policy.planned == rests.count(False) < 60


def test_a_policy_that_is_left_out_is_not_asked():
    drafting, live = Drafting(MayRest([4, 4], [], [])), torch.tensor([True, False])
    assert drafting.begin(live, 9).budget.tolist() == [4, 0]
    resting = drafting.begin(live, 9, rests=True)
    assert not any(each.any() for each in resting) and resting.active.dtype == torch.bool
