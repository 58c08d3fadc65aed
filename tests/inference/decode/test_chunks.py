"""Drafting in chunks gives the same tokens, counts and learning as asking after each token, with fewer questions."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.inference import RowPolicy, generate, make_policy
from accept_head.inference.decode import chunks, loop
from accept_head.inference.decode.chunks import RECONSIDERED, Chunks, asks, best_chunk, chunk_cost, measured_seconds
from accept_head.inference.decode.drafted import Drafted
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.policies.drafting import Drafting, DraftProgress
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.registry import POLICIES
from tests.inference.support.decoders import LLAMA
from tests.inference.support.decoders import POLICIES as EVERY
from tests.inference.support.toy import ragged_prompts

SAMPLED, GREEDY = Sampling(temperature=1.5, top_k=20), Sampling(temperature=0)
PROMPTS = ragged_prompts(5, longest=16)
# They decide with the host after each token, or go by how often they were asked.
ONE_BY_ONE = {"head online", "head trains", "adaspec", "budget retrospective"}
CHUNKED = [name for name in EVERY if name not in ONE_BY_ONE]


# What a round leaves behind, which the next one makes anew.
OF_A_ROUND = {"predicted", "predicted_next", "drawn", "features", "tokens", "survivals", "seen", "earlier", "running"}
OF_A_ROUND |= {"survival", "state", "pending", "decided", "judged", "counted", "steps", "rho", "longest"}
OF_A_ROUND |= {"token_price", "step_price"}


def run(name, **options):
    """name: of EVERY, or a policy's class → (tokens and statistics, but for the clock and what was wasted; what the
    policy has learnt; forwards wasted)."""
    options = {
        "sampling": SAMPLED,
        "max_new_tokens": 14,
        "end_token_ids": [7, 14, 20],
        "batch_size": 2,
        "seed": 5,
        "allow_lossy": True,
        **options,
    }
    policy = EVERY[name](LLAMA[1]) if isinstance(name, str) else name()
    result = generate(*LLAMA, PROMPTS, policy=policy, **options)
    rows = [(ids, replace(each, seconds=0.0, wasted=0)) for ids, each in zip(result.tokens, result.stats, strict=True)]
    if getattr(policy, "recalibration", None):
        policy.recalibration._sum_up()
    return rows, learnt(policy), sum(each.wasted for each in result.stats)


def learnt(value, depth=0):
    """All that lasts of a policy's state, as plain values."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [learnt(each, depth) for each in value]
    if is_dataclass(value):
        return [learnt(getattr(value, field.name), depth) for field in fields(value)]
    if isinstance(value, torch.nn.Module) or callable(value) or depth > 3:
        return None
    if hasattr(value, "__dict__"):
        return {name: learnt(each, depth + 1) for name, each in vars(value).items() if name not in OF_A_ROUND}
    return value if isinstance(value, (int, float, str, bool)) else None


def alike(one, other):
    """Equal, but for the order in which numbers were added up."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def test_every_policy_is_tried_but_that_by_the_clock():
    assert set(POLICIES) - {name.split()[0] for name in EVERY} == {"bandit"}  # which learns from seconds


@pytest.mark.parametrize(
    ("sampling", "batch_size", "sizes"),
    [
        (SAMPLED, 2, (3,)),
        *(
            pytest.param(sampling, batch, (2, 3, 50), marks=pytest.mark.slow)
            for batch in (1, 3)
            for sampling in (SAMPLED, GREEDY)
        ),
    ],
)
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_change_neither_tokens_nor_counts_nor_what_is_learnt(name, sampling, batch_size, sizes):
    """Five prompts, of responses that end at different times: rows come and go."""
    options = {"sampling": sampling, "batch_size": batch_size}
    asked = Drafting(EVERY[name](LLAMA[1]))
    assert asked.in_chunks or not asked.stops_early
    rows, state, wasted = run(name, **options)
    assert wasted == 0
    for chunk in sizes:
        in_chunks = run(name, **options, chunk=chunk)
        assert in_chunks[0] == rows and alike(in_chunks[1], state)


@pytest.mark.parametrize("name", ["confidence", "adaedl", "head lag 0"])
def test_alone_in_its_batch_a_row_wastes_what_the_device_ran_beyond_its_counts(name, monkeypatch):
    forwards, forward = [], CachedModel.forward

    def counted(model, ids, *rest, **options):
        forwards.append(model)
        return forward(model, ids, *rest, **options)

    monkeypatch.setattr(CachedModel, "forward", counted)
    ran = {}
    for chunk in (1, 2, 50):
        forwards.clear()
        *_, wasted = run(name, batch_size=1, chunk=chunk)
        ran[chunk] = len(forwards), wasted
        assert (wasted > 0) == (chunk > 1)
    assert ran[1][0] == ran[2][0] - ran[2][1] == ran[50][0] - ran[50][1]


@pytest.mark.parametrize("name", sorted(ONE_BY_ONE))
def test_policies_that_cannot_are_asked_after_each_token(name, caplog):
    policy = EVERY[name](LLAMA[1])
    asked = Drafting(policy)
    assert asked.stops_early and not asked.in_chunks
    assert run(name) == run(name, chunk=4)
    assert [record.message for record in caplog.records] == [
        f"accept-head: policy {type(policy).__name__} decides with the host after each token: chunk is 1"
    ]


def test_a_policy_of_the_users_is_asked_after_each_token_unless_it_says_that_it_need_not(caplog):
    class Counts(RowPolicy):
        """Keeps its own count of tokens: what is not drafted must not be counted."""

        max_draft_tokens = 5

        def __init__(self):
            self.asked = 0

        def keep_drafting(self, step):
            self.asked += 1
            return step.active & (step.token_ids % 3 > 0)

    class Wrong(Counts):
        in_chunks = True

    caplog.set_level(logging.WARNING)
    assert run(Counts) == run(Counts, chunk=3)
    assert len(caplog.records) == 1
    assert run(Wrong)[1] != run(Wrong, chunk=3)[1]


def test_the_target_verifies_no_more_than_what_was_drafted():
    widths = []
    run(
        "confidence", chunk=4, watch=lambda seen: widths.append((seen.logits.shape[1], int(seen.drafted.lengths.max())))
    )
    assert all(width == drafted + 1 for width, drafted in widths) and len(set(widths)) > 1


# --- what a chunk costs -----------------------------------------------------------------------------------------------


def cost_by_hand(chunk, ends, t_draft, t_sync):
    """Walk through each round as the loop does."""
    seconds = 0.0
    for stop, probability in enumerate(ends, 1):
        drafted, since = 0, 0
        while True:
            drafted, since = drafted + 1, since + 1
            last = drafted == len(ends)
            if since == chunk or last:
                if not (last and since == 1):  # it was asked just before, or there was but one token
                    seconds += probability * t_sync
                since = 0
                if last or drafted >= stop:
                    break
        seconds += probability * (drafted - stop) * t_draft
    return seconds


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_the_cost_is_that_of_a_walk_through_each_round(most):
    weights = np.random.default_rng(most).random(most)
    ends = list(weights / weights.sum())
    for chunk, t_sync in itertools.product(range(1, most + 1), (0.0, 0.3, 4.0)):
        assert chunk_cost(chunk, ends, 1.0, t_sync) == pytest.approx(cost_by_hand(chunk, ends, 1.0, t_sync))


def test_what_is_dear_is_done_seldom():
    even = [1 / 8] * 8
    assert best_chunk(even, t_draft=1.0, t_sync=0.0) == best_chunk(even, t_draft=1.0, t_sync=0.01) == 1
    assert best_chunk(even, t_draft=0.0, t_sync=1.0) == 7  # asked once either way: after 7, or at the end
    sizes = [best_chunk(even, t_draft=1.0, t_sync=t_sync) for t_sync in (0.1, 0.5, 1.0, 2.0, 10.0)]
    assert sizes == sorted(sizes) and len(set(sizes)) > 2
    always_long = [0.0] * 7 + [1.0]
    assert best_chunk(always_long, t_draft=1.0, t_sync=0.01) == 7  # 8 needs the same one question, at the end


def test_when_the_host_asks():
    assert [depth for depth in range(1, 7) if asks(depth, 6, 1)] == [1, 2, 3, 4, 5]
    assert [depth for depth in range(1, 7) if asks(depth, 6, 2)] == [2, 4, 6]
    assert [depth for depth in range(1, 7) if asks(depth, 6, 5)] == [5]
    assert [depth for depth in range(1, 7) if asks(depth, 6, 9)] == [6]
    assert [depth for depth in range(1, 7) if asks(depth, 6, 1, peeks=True)] == [1, 2, 3, 4, 5, 6]
    assert not asks(1, 1, 1) and not asks(1, 1, 4)


def test_auto_follows_where_rounds_end():
    policy = make_policy("confidence:0.4,k_max=8", LLAMA[1])
    auto = Chunks("auto", Drafting(policy), (1.0, 0.6))
    first = auto.size

    def rounds(stop):
        for _ in range(8 * RECONSIDERED):
            lengths, drafted = torch.zeros(1, dtype=torch.long), Drafted(*[torch.zeros(1, dtype=torch.long)] * 3)
            for depth in range(1, 9):
                lengths = lengths + (depth <= stop)
                progress = DraftProgress(lengths, lengths < 0 if depth >= stop else lengths > 0, lengths, lengths * 0)
                if auto.over(drafted, progress, depth, 8):
                    break

    rounds(1)
    assert auto.size == 1 < first
    rounds(8)
    assert auto.size == 7  # one question


def test_auto_is_one_on_a_cpu_and_for_policies_that_cannot():
    assert Chunks("auto", Drafting(FixedPolicy(0)), None).size == 1
    assert Chunks("auto", Drafting(make_policy("confidence", LLAMA[1])), None).size == 1
    assert Chunks("auto", Drafting(EVERY["adaspec"](LLAMA[1])), (1.0, 50.0)).size == 1
    assert Chunks("auto", Drafting(make_policy("confidence", LLAMA[1])), (1.0, 50.0)).size > 1


@pytest.mark.parametrize("t_sync", [0.0, 10.0])
def test_auto_measures_and_changes_nothing(t_sync, monkeypatch):
    """As on a GPU, whose times are taken before the first request is there."""
    measured = []

    def times(draft, batch):
        measured.append(measured_seconds(draft, batch, repeats=1))
        return 1.0, t_sync

    right = run("head before")
    monkeypatch.setattr(chunks, "works_ahead", lambda device: True)
    monkeypatch.setattr(loop, "measured_seconds", times)
    rows, state, wasted = run("head before", chunk="auto")
    assert (rows, state) == right[:2] and (wasted > 0) == (t_sync > 0)
    assert len(measured) == 1 and min(measured[0]) > 0
    run("fixed", chunk="auto")
    assert len(measured) == 1


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "all", True])
def test_a_chunk_that_is_none_is_refused(chunk):
    requests = make_requests([[1]], 4)
    decoder = make_decoder(*LLAMA, requests, FixedPolicy(1), batch_size=1, greedy=True)
    assert decoder.chunk == "auto"
    with pytest.raises(InputError, match=r"chunk is .*, expected auto or a positive integer"):
        run("fixed", chunk=chunk)
