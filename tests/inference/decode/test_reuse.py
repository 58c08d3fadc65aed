"""One decoder for many runs: each run equals that of a new decoder, and nothing is captured or allocated twice."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.inference import make_policy
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine import cache
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from tests.inference.support.decoders import GREEDY, LLAMA, MOST, PROMPTS, SAMPLED, new_decoder, run
from tests.inference.support.live_memory import Live
from tests.inference.support.replayed import standing_in
from tests.inference.support.toy import VOCAB, architectures, ragged_prompts, random_head

POLICIES = {
    "none": lambda: FixedPolicy(0),
    "fixed": lambda: FixedPolicy(3),
    "threshold": lambda: make_policy(f"max-prob:0.6,k_max={MOST}", LLAMA[1]),
    "head": lambda: HeadPolicy(random_head(32, signals=True), 0.7, k_max=MOST),
    "recalibrated": lambda: RecalibratedHeadPolicy(random_head(32, signals=True), 0.7, k_max=MOST, online=True),
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """So that short texts pass through several extents, and few rounds are learnt from."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)
    monkeypatch.setattr("accept_head.inference.policies.online.recalibration.OnlineRecalibration.INTERVAL", 5)


@pytest.fixture
def backend():
    with standing_in() as backend:
        yield backend


def give_up(decoder, policy, **options):
    """A run that ends in the middle of a response."""
    rounds = []

    def watch(_):
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(
            decoder.run(
                make_requests(PROMPTS, 12),
                policy=policy,
                processing=Processing(SAMPLED, VOCAB),
                stopping=Stopping([], [], torch.device("cpu")),
                watch=watch,
                **options,
            )
        )
    assert decoder.rows.live_rows


RUNS = [(name, sampling, "none") for name in POLICIES for sampling in (GREEDY, SAMPLED)]
RUNS += [(name, SAMPLED, "graphs") for name in ("head", "recalibrated")]
RUNS += [pytest.param(name, SAMPLED, "graphs", marks=pytest.mark.slow) for name in ("fixed", "threshold")]
RUNS += [pytest.param(name, GREEDY, "graphs", marks=pytest.mark.slow) for name in POLICIES]


@pytest.mark.parametrize(
    ("name", "sampling", "compile"),
    RUNS,
    ids=lambda each: f"T={each.temperature}" if each in (GREEDY, SAMPLED) else each,
)
def test_every_run_is_as_with_a_new_decoder(name, sampling, compile, backend):
    """The same again; with another seed; after one that was given up; and after one of another policy. The policies
    go on learning, both of them."""
    one, kept, fresh = new_decoder(compile, sampling=sampling), POLICIES[name](), POLICIES[name]()
    runs = [{"seed": 0}, {"seed": 0}, {"seed": 1}, {"seed": 0, "tokens": 12}]
    answers = []
    for number, options in enumerate(runs):
        if number == 2:
            give_up(one, FixedPolicy(2))
        answers.append(run(one, kept, sampling=sampling, **options))
        assert answers[-1] == run(new_decoder(compile, sampling=sampling), fresh, sampling=sampling, **options)
    tokens = [[ids for _, ids, _ in answer] for answer in answers]
    assert (tokens[2] != tokens[0]) == (sampling is SAMPLED)


CHANGES = {
    "seed": ({"seed": 1}, None),
    "seed of match": ({"verifier": "match", "seed": 1}, None),
    "sampling": ({"sampling": Sampling(temperature=0.5, top_k=20)}, None),
    "end tokens": ({"ends": (3, 9, 20)}, None),
    "verifier": ({"verifier": "match"}, None),
    "level": ({}, lambda policy: setattr(policy, "level", 0.95)),
    "k_min": ({}, lambda policy: setattr(policy, "k_min", MOST)),
}


def changed(decoder, change, backend):
    """A run, and another that is not the same in one point; all of this policy object."""
    options, mend = CHANGES[change]
    policy = POLICIES["threshold"]()
    first = run(decoder, policy, **({"verifier": "match"} if change == "seed of match" else {}))
    if mend:
        mend(policy)
    second = run(decoder, policy, **options)
    return first, second


@pytest.mark.parametrize("change", CHANGES)
def test_captured_steps_see_what_has_changed(change, backend):
    first, second = changed(new_decoder("graphs"), change, backend)
    eager = changed(new_decoder(), change, backend)
    assert eager[0] != eager[1]  # it matters
    assert (first, second) == eager


def test_a_second_run_captures_nothing(backend):
    decoder, policies = new_decoder("graphs"), [POLICIES[name]() for name in ("fixed", "threshold", "head")]
    for policy in policies:
        run(decoder, policy)
    made = backend.captures
    for policy in policies[::-1]:
        run(decoder, policy)
    assert backend.captures == made
    run(decoder, POLICIES["fixed"]())
    assert backend.captures > made


def test_another_seed_takes_one_more_graph_in_place_of_the_old(backend):
    decoder, policy = new_decoder("graphs"), FixedPolicy(3)
    run(decoder, policy)
    drawn, begun = [], []
    for seed in (1, 2):
        run(decoder, policy, seed=seed)
        own = decoder.captured.policies[id(policy)].graphs
        drawn += [graph for key, graph in decoder.captured.shared.captured.items() if key[0] == "random"]
        begun += [graph for key, graph in own.captured.items() if key[0] == "begin"]
    assert len(drawn) == len(begun) == 2 and drawn[0] is not drawn[1] and begun[0] is begun[1]


def test_steps_that_ask_no_policy_are_captured_once_for_all(backend):
    """A policy's own are `begin` and, if it stops early, `judge`; another that needs the same draws by the same."""
    decoder = new_decoder("graphs")
    run(decoder, POLICIES["threshold"]())
    names = {key[0].split()[0] for key in decoder.captured.shared.captured}
    assert names == {"random", "draw", "draft", "target", "test", "accept"}
    made, policy = backend.captures, POLICIES["threshold"]()
    run(decoder, policy)
    own = decoder.captured.policies[id(policy)].graphs.captured
    assert {key[0].split()[0] for key in own} == {"begin", "judge"} and backend.captures == made + len(own)


def test_more_policies_take_no_more_memory_and_go_with_their_graphs(backend):
    decoder = new_decoder("graphs")
    policies = [POLICIES["threshold"]() for _ in range(3)]
    sizes = []
    for policy in policies:
        run(decoder, policy)
        sizes.append(sum(buffer.nbytes for buffer in decoder.captured.shared.buffers.values()))
    assert sizes[0] == sizes[1] == sizes[2] > 0
    assert len(decoder.captured.policies) == 3
    del policies, policy
    run(decoder, policy := FixedPolicy(1))
    assert [each.policy() for each in decoder.captured.policies.values()] == [policy]
    run(decoder, policy, sampling=GREEDY)
    assert max(buffer.nbytes for buffer in decoder.captured.shared.buffers.values()) < 2 * VOCAB * 4  # q is gone


def test_longer_drafts_than_planned_make_the_rows_anew(backend):
    decoder = new_decoder("graphs", most=2)
    short, long = FixedPolicy(2), FixedPolicy(6)
    before = decoder.rows
    first = run(decoder, short)
    assert decoder.rows is before
    assert run(decoder, long) == run(new_decoder(most=6), FixedPolicy(6))
    assert decoder.rows is not before
    assert run(decoder, short) == first


@pytest.mark.parametrize("compile", ["none", "graphs"])
def test_memory_is_given_back(compile, backend):
    decoder, policy = new_decoder(compile), FixedPolicy(3)
    first = run(decoder, policy)
    assert decoder.target.bytes > 0 < decoder.draft.bytes
    decoder.free()
    assert decoder.target.bytes == decoder.draft.bytes == 0
    if compile == "graphs":
        for graphs in (decoder.target.graphs, decoder.draft.graphs, decoder.captured.shared):
            assert not (graphs.captured or graphs.buffers or graphs.kept)
    assert run(decoder, policy) == first


@pytest.mark.parametrize("compile", ["none", "graphs"])
def test_a_decoder_that_nobody_refers_to_is_gone_at_once(compile, backend):
    """Else the next one would find half of the memory."""
    decoder = new_decoder(compile)
    run(decoder, FixedPolicy(3))
    caches = [weakref.ref(part) for part in (decoder.target, decoder.draft)]
    gc.collect()
    gc.disable()
    try:
        del decoder
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_a_second_run_takes_no_more_memory_than_the_first():
    """Rows are dropped towards the end of a run, and the cache with them; it is made whole again for the next one."""
    target, draft = architectures()["llama"]
    requests = make_requests(ragged_prompts(8), 24, range(8))
    some = [replace(request, max_new_tokens=4 + 2 * request.index) for request in requests]  # they end one by one
    options = {"processing": Processing(GREEDY, VOCAB), "stopping": Stopping([], [], torch.device("cpu"))}
    peaks = []
    weights = [tensor for model in (target, draft) for tensor in (*model.parameters(), *model.buffers())]
    with Live(weights) as live:
        decoder = make_decoder(target, draft, requests, FixedPolicy(2), batch_size=8, greedy=True)
        for _ in range(2):
            assert sum(1 for _ in decoder.run(some, policy=FixedPolicy(2), **options)) == 8
            assert decoder.target.bytes * 2 < decoder.memory.caches / 2  # the cache has shrunk
            peaks.append(live.peak)
    assert peaks[0] == peaks[1]


def test_two_runs_at_once_are_refused():
    decoder = new_decoder()
    options = {"processing": Processing(GREEDY, VOCAB), "stopping": Stopping([], [], torch.device("cpu"))}
    requests = make_requests(PROMPTS, 4)
    first = decoder.run(requests, policy=FixedPolicy(2), **options)
    next(first)
    second = decoder.run(requests, policy=FixedPolicy(2), **options)
    next(second)
    with pytest.raises(InputError, match="another run of this decoder has begun"):
        list(first)
    assert len(list(second)) == len(requests) - 1
    last = decoder.run(requests[:1], policy=FixedPolicy(2), **options)
    next(last)
    assert len(list(decoder.run(requests, policy=FixedPolicy(2), **options))) == len(requests)
    assert list(last) == []  # it was over
