"""The batch's end decided in tensors: decided and learnt as by the rule on the host, captured or not; and forgotten."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from accept_head import Sampling
from accept_head.inference import make_policy
from accept_head.inference.decode.steps import read_by_steps
from accept_head.inference.engine import cache
from accept_head.inference.policies import BatchStopPolicy, FixedPolicy, HeadPolicy, MaxProbPolicy
from accept_head.inference.policies.batch_stop import OURS, VLLM
from accept_head.inference.policies.batch_stop_device import DeviceBatchStopPolicy, batch_stop, is_of_tensors
from accept_head.inference.policy import DraftStep
from tests.inference.replayed import standing_in
from tests.inference.test_batch_stop import CPU, Foretelling, Told, begin, one_round, outcome_of, pair_costs
from tests.inference.test_decoder_reuse import GREEDY, LLAMA, SAMPLED, new_decoder, run
from tests.inference.toy import random_head

SUMS = ("accepted", "before", "after", "totals")


class ToldInTensors(Told):
    """Its round's state goes in and out."""

    in_chunks = True
    carries = ("predicted", "predicted_next", "product")


class ForetellingInTensors(ToldInTensors, Foretelling):
    looks_ahead = True


def both(policy, costs, lengths, **options):
    """The rule on the host and in tensors, each around a policy of its own."""
    host, other = (BatchStopPolicy(copy.deepcopy(policy), costs, **options) for _ in range(2))
    return begin(host, lengths), begin(DeviceBatchStopPolicy(other), lengths)


def assert_learnt_alike(host, device, rtol=1e-9):
    for name in SUMS:
        assert torch.allclose(torch.tensor(getattr(host, name), dtype=torch.float64), getattr(device, name), rtol=rtol)
    assert host.idle == int(device.idle)


# --- as on the host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [ToldInTensors, ForetellingInTensors])
@pytest.mark.parametrize("load", ["light", "heavy"])
def test_it_decides_and_learns_as_on_the_host(load, rule):
    """Rows that are not live, whose budget is short, whose outcome is never known, that leave and that begin; a shift
    from easy to hard text and back."""
    random = np.random.default_rng(7)
    light, heavy = pair_costs(0.1, 0.02, row=0.002, context=1e-4), pair_costs(0.15, 0.15, context=1e-4)
    k_max, options = 6, {"memory": 100.0, "probe": 6, "prior": 5.0, "optimism": 0.8}
    lengths, seen = random.integers(5, 60, size=7), []
    host, device = both(rule(k_max, 0.05), light if load == "light" else heavy, lengths.tolist(), **options)
    for number in range(400):
        live = random.random(len(lengths)) < 0.8
        live[random.integers(len(lengths))] = True
        told = random.beta(*((6, 1), (1, 3), (6, 1))[number * 3 // 400], size=(len(lengths), k_max))
        told = np.where(live[:, None], told, np.nan)  # what idle rows hold is arbitrary
        ahead = random.beta(5, 2, size=told.shape) if rule.looks_ahead else np.ones(told.shape)
        room = np.where(random.random(len(lengths)) < 0.9, k_max, random.integers(1, 3, size=len(lengths)))
        arguments = torch.from_numpy(live), told, torch.from_numpy(room), ahead
        drafted = one_round(host, *arguments)
        assert torch.equal(one_round(device, *arguments), drafted), number
        seen.append(int(drafted.max()))
        wins = random.random(told.shape) < np.nan_to_num(told)
        accepted = np.minimum(drafted.numpy(), np.cumprod(wins, axis=1).sum(1))
        known = live & (random.random(len(live)) < 0.9)
        lengths = lengths + known * (accepted + 1)
        for policy in (host, device):
            policy.observe(outcome_of(drafted, accepted, torch.from_numpy(known), lengths))
        assert_learnt_alike(host, device)
        assert host.lengths == device.lengths.tolist()
        if number % 20 == 19:
            rows = random.permutation(len(lengths))[: random.integers(3, 8)]
            lengths = np.append(lengths[rows], [random.integers(5, 60)])
            for policy in (host, device):
                policy.select(torch.from_numpy(np.append(rows, rows[0])))
                policy.admit(torch.tensor([len(rows)]), torch.from_numpy(lengths[-1:]))
    assert len(set(seen)) >= (5 if load == "light" else 3)
    assert 0 in seen or load == "light"


@pytest.mark.parametrize(("draft", "probes"), [(0.9, True), (1.1, False)])
def test_it_probes_after_as_many_rounds(draft, probes):
    host, device = both(FixedPolicy(4), pair_costs(draft), [5, 5], optimism=0.1)
    live, none = torch.ones(2, dtype=torch.bool), np.zeros((2, 4))
    lengths, seen = torch.tensor([5, 5]), []
    for _ in range(80):
        drafted = one_round(host, live, none)
        assert torch.equal(one_round(device, live, none), drafted)
        lengths = lengths + 1
        for policy in (host, device):
            policy.observe(outcome_of(drafted, torch.zeros(2, dtype=torch.long), live, lengths))
        seen.append(int(drafted.max()))
    assert any(seen) == probes


def test_what_is_asked_after_all_have_stopped_is_not_learnt():
    """As in chunks: tokens that nobody drew."""
    rules = (BatchStopPolicy(ToldInTensors(6, 0.5), pair_costs(1e-6)) for _ in range(2))
    plain, asked = (begin(DeviceBatchStopPolicy(rule), [5, 6]) for rule in rules)
    live, told = torch.ones(2, dtype=torch.bool), torch.tensor([[0.8] * 6, [0.7] * 6])
    drafted = one_round(plain, live, told)
    assert torch.equal(one_round(asked, live, told), drafted) and int(drafted.max()) < 6
    for depth in range(int(drafted.max()) + 1, 7):
        step = DraftStep(depth=depth, token_ids=None, active=torch.zeros(2, dtype=torch.bool), max_prob=told[:, 0])
        assert not asked.keep_drafting(step).any()
    for policy in (plain, asked):
        policy.observe(outcome_of(drafted, [2, 1], live, [8, 8]))
    for name in SUMS:
        assert torch.equal(getattr(plain, name), getattr(asked, name))


def test_which_policies_it_is_for():
    costs = pair_costs(0.1)
    head = HeadPolicy(random_head(32), 0.5, lag=1)
    for policy, yes in (
        (FixedPolicy(3), True),
        (MaxProbPolicy(0.5), True),
        (head, True),
        (HeadPolicy(random_head(32), 0.5, lag=0), False),  # how far it looked ahead nobody tells
        (make_policy("adaedl", LLAMA[1]), False),
        (make_policy("online-logistic", LLAMA[1]), False),
    ):
        assert is_of_tensors(BatchStopPolicy(policy, costs)) == yes, policy
    assert not is_of_tensors(BatchStopPolicy(head, costs, host=VLLM))
    assert type(batch_stop(head, costs, host=OURS, device=CPU)) is BatchStopPolicy
    on_gpu = batch_stop(head, costs, host=OURS, device=torch.device("cuda"))
    assert type(on_gpu) is DeviceBatchStopPolicy and on_gpu.content == BatchStopPolicy(head, costs).content


# --- in the decode loop, captured ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)


INNER = {
    "fixed": lambda: FixedPolicy(4),
    "max-prob": lambda: MaxProbPolicy(0.05, k_max=4),
    "head": lambda: HeadPolicy(random_head(32, signals=True), 0.95, k_max=4),
}
COSTS, DEAR = pair_costs(0.05, 0.01), pair_costs(0.85)


@pytest.mark.parametrize(
    ("name", "sampling", "costs"),
    [(name, sampling, COSTS) for name in INNER for sampling in (SAMPLED, GREEDY)] + [("max-prob", SAMPLED, DEAR)],
)
def test_captured_or_not_it_decodes_as_on_the_host(name, sampling: Sampling, costs):
    """Two runs each; what the first has learnt the second goes by. With dear drafts some rounds have none."""
    host = BatchStopPolicy(INNER[name](), costs, probe=4)
    device, captured = (DeviceBatchStopPolicy(BatchStopPolicy(INNER[name](), costs, probe=4)) for _ in "ab")
    decoder = new_decoder(sampling=sampling)
    with standing_in() as backend:
        graphs = new_decoder("graphs", sampling=sampling)
        for _ in range(2):
            captures = backend.captures
            expected = run(decoder, host, sampling=sampling)
            rounds, drafted = (sum(getattr(stats, name) for *_, stats in expected) for name in ("rounds", "drafted"))
            assert (drafted < rounds) == (costs is DEAR)
            assert run(decoder, device, sampling=sampling) == expected
            assert run(graphs, captured, sampling=sampling) == expected
            assert_learnt_alike(host, captured, rtol=1e-5)  # predictions are float32, of batches of other sizes
        assert captures and backend.captures - captures < captures  # the second run goes on with what was captured
        assert {"begin", "learn"} <= {key[0] for each in graphs.steps.policies.values() for key in each.graphs.captured}
        assert not any(each.graphs.refused for each in graphs.steps.policies.values())


def test_it_forgets_in_the_same_memory():
    policy = DeviceBatchStopPolicy(BatchStopPolicy(INNER["head"](), COSTS))
    with standing_in() as backend:
        decoder = new_decoder("graphs")
        first = run(decoder, policy)
        places, captures = [each.data_ptr() for each in policy.learnt], backend.captures
        assert float(policy.totals[0]) > 5
        policy.forget()
        assert policy.totals.tolist() == [1, 1, 0, 0] and not policy.accepted.any()
        assert run(decoder, policy) == first
        assert [each.data_ptr() for each in policy.learnt] == places and backend.captures == captures


def test_what_steps_read_of_the_policy_within_is_compared():
    policy = DeviceBatchStopPolicy(BatchStopPolicy(INNER["max-prob"](), COSTS))
    before = read_by_steps(policy)
    policy.policy.level = 0.5
    assert read_by_steps(policy)["policy.level"] != before["policy.level"]
    fixed = DeviceBatchStopPolicy(BatchStopPolicy(INNER["fixed"](), COSTS))
    assert read_by_steps(fixed)["policy.max_draft_tokens"] == 4
    assert "policy.running" not in before and "survival" not in before and "accepted" in before
