"""The decode loop on a simulated GPU gives the tokens, counts and learning of a CPU, and waits only where expected."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.cost import ForwardCosts, PairCosts
from accept_head.inference import generate, make_policy
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine import cache
from accept_head.inference.engine.graphs import Graphs
from accept_head.inference.policies.adaspec import AdaSpecPolicy
from accept_head.inference.policies.batch_map import BatchMapPolicy
from accept_head.inference.policies.budget import BudgetPolicy
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.goodput import GoodputPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.pair import input_embeddings
from tests.inference.support.toy import VOCAB, one_layer_pair, ragged_prompts, random_head
from tests.rehearsal.pretend_cuda import pretend_cuda

SAMPLED, GREEDY = Sampling(temperature=1.5, top_k=20, top_p=0.95), Sampling(temperature=0)
PROMPTS = [prompt[:16] for prompt in ragged_prompts(6)]
TENANTS = ["ann", "bob", "ann", "eve", "bob", "ann"]
COSTS = PairCosts.constant(ForwardCosts(t_draft=0.2, t_target=1.0))
HERE = one_layer_pair()
with pretend_cuda():
    THERE = tuple(copy.deepcopy(model).to("cuda") for model in HERE)


@pytest.fixture(autouse=True)
def short_extents(monkeypatch):
    """So that short texts pass through several."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)


@pytest.fixture
def captures(monkeypatch):
    """The names of what was captured."""
    names, capture = Counter(), Graphs._capture

    def counted(self, name, *arguments):
        names[name.split()[0]] += 1
        return capture(self, name, *arguments)

    monkeypatch.setattr(Graphs, "_capture", counted)
    return names


def named(spec):
    return lambda draft: make_policy(f"{spec},k_max=5", draft)


def head(kind=HeadPolicy, reads="drawn", predicts="token", k_max=5, **options):
    def make(draft):
        made = random_head(
            32, depth=2, signals=True, reads=reads, predicts=predicts, embeddings=input_embeddings(HERE[1])
        )
        return kind(made.to(draft.device).attach(input_embeddings(draft)), 0.7, k_max=k_max, **options)

    return make


online = RecalibratedHeadPolicy
POLICIES = {
    "none": lambda draft: make_policy("none", draft),
    "fixed": lambda draft: make_policy("fixed:3", draft),
    "leviathan": named("leviathan:0.1"),
    "hf-heuristic": named("hf-heuristic:3"),
    "hf-confidence": named("hf-confidence:0.4"),
    "confidence": named("confidence:0.4"),
    "cumulative-confidence": named("cumulative-confidence:0.2"),
    "max-prob": named("max-prob:0.6,k_min=2"),
    "max-prob-mean": named("max-prob-mean:0.6"),
    "entropy": named("entropy:1.0"),
    "svip": named("svip:0.4"),
    "adaedl": named("adaedl:0.4"),
    "online-logistic": named("online-logistic:0.4"),
    "online-signals": named("online-signals:0.6"),
    "dsde": named("dsde:3"),
    "batch-map": lambda draft: BatchMapPolicy([(1, 1, 4), (2, 8, 2)]),
    "goodput": lambda draft: GoodputPolicy(COSTS, k_max=5),
    "adaspec": lambda draft: AdaSpecPolicy(COSTS, k_max=5),
    "budget": lambda draft: BudgetPolicy(COSTS, k_max=5),
    "costs": named("max-prob:0.05,costs=0.2"),
    "head": head(),
    "head lag 0": head(lag=0),
    "head before": head(reads="before"),
    "head gain": head(reads="before", predicts="both"),
    "head online": head(online, online=True),
    "head online, before": head(online, "before", online=True),
    "head by tenants": head(online, "before", online=True, per_tenant=True),
    "head trains": head(online, "before", online=True, train=True, state=False),
}
SLOW = pytest.mark.slow
QUICK = ("adaedl", "head gain", "head online", "head trains")
CASES = [
    pytest.param(name, compile, sampling, marks=[] if quick else SLOW, id=f"{name}, {compile}, {sampling.temperature}")
    for name in POLICIES
    for compile in ("none", "graphs")
    for sampling in (SAMPLED, GREEDY)
    for quick in [name in QUICK and compile == "graphs" and sampling is SAMPLED]
]


def decode(models, name, sampling=SAMPLED, prompts=PROMPTS, **options):
    """(tokens and counts of each prompt; what was learnt)"""
    policy = POLICIES[name](models[1])
    options = {"max_new_tokens": 14, "end_token_ids": [7, 14, 20], "batch_size": 2, "seed": 3} | options
    options |= {"tenants": TENANTS} if Drafting(policy).by_tenant else {}
    result = generate(*models, prompts, policy=policy, sampling=sampling, allow_lossy=True, **options)
    stats = [replace(each, seconds=0.0, wasted=0) for each in result.stats]
    return list(zip(result.tokens, stats, strict=True))


@pytest.mark.parametrize(("name", "compile", "sampling"), CASES)
def test_every_policy_decodes_as_on_a_cpu(name, compile, sampling, waits, captures):
    """Admissions, rejections, end tokens, ragged rows; with graphs in chunks of three, where the policy goes in any."""
    plain = decode(HERE, name, sampling)
    in_chunks = compile == "graphs" and Drafting(POLICIES[name](HERE[1])).in_chunks
    assert decode(THERE, name, sampling, compile=compile, chunk=3 if in_chunks else 1) == plain
    assert len({stats.rounds for _, stats in plain}) > 1
    assert bool(captures) == (compile == "graphs") and sum(waits.values())


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, {"chunk": "auto"}, pytest.param({"verifier": "match"}, marks=SLOW)],
    ids=str,
)
def test_other_ways_to_decode(options, waits):
    assert decode(THERE, "max-prob", **options) == decode(HERE, "max-prob", **options)


# --- when the host waits ----------------------------------------------------------------------------------------------

ROUND_END = "inference/decode/rows.py"  # where the rows are, once a round
QUESTION = "inference/decode/chunks.py"  # whether any row goes on
BUDGET = "inference/decode/run.py"  # how much may be drafted, where a policy chooses it


def waits_of_rounds(name, waits, *, chunk, compile="none", sampling=SAMPLED):
    """[(file → waits, drafted tokens)] of each round of one long response, but for the first two and the last."""
    policy, seen = POLICIES[name](THERE[1]), []
    requests = make_requests(PROMPTS[4:5], 40, [0])
    decoder = make_decoder(*THERE, requests, policy, batch_size=1, greedy=False, compile=compile, chunk=chunk)

    def watch(round_):
        by_file = Counter()
        for (_, place), count in waits.items():
            by_file[place.split(":")[0]] += count
        seen.append((by_file, round_.drafted.slots))

    stopping = Stopping([], [], THERE[0].device)
    run = decoder.run(requests, policy=policy, processing=Processing(sampling, VOCAB), stopping=stopping, watch=watch)
    assert [len(done.token_ids) for done in run] == [40]
    counts = [(after - before, slots) for (before, _), (after, slots) in pairwise(seen[1:])]
    assert len(counts) > 5
    return counts


@pytest.mark.parametrize("compile", [pytest.param("none", marks=SLOW), "graphs"])
@pytest.mark.parametrize("name", ["fixed", *(pytest.param(name, marks=SLOW) for name in ("none", "batch-map"))])
def test_a_round_of_known_length_waits_once(name, compile, waits):
    for counts, _ in waits_of_rounds(name, waits, chunk="auto", compile=compile):
        assert counts == {ROUND_END: 1} | ({BUDGET: 1} if name == "batch-map" else {})


@pytest.mark.parametrize(
    ("name", "chunk", "compile"),
    [
        pytest.param(name, chunk, compile, marks=[] if quick else SLOW)
        for name in ("head", "head online, before", "max-prob", "head gain")
        for chunk, compile in ((1, "none"), (2, "none"), (5, "graphs"))
        for quick in [(name, chunk) in (("head", 5), ("head online, before", 1))]
    ],
)
def test_a_round_that_may_stop_waits_once_a_chunk_besides(name, chunk, compile, waits):
    questions = []
    for counts, slots in waits_of_rounds(name, waits, chunk=chunk, compile=compile):
        questions.append(counts.pop(QUESTION, 0))
        assert counts == {ROUND_END: 1} and questions[-1] <= -(-max(slots, 1) // chunk)
    assert max(questions) >= 1


@SLOW
def test_costs_add_the_question_of_the_budget(waits):
    for counts, _ in waits_of_rounds("costs", waits, chunk=5, compile="graphs"):
        assert counts.keys() <= {ROUND_END, QUESTION, BUDGET} and max(counts.values()) == 1


def test_a_policy_that_reads_on_the_host_is_seen(waits, monkeypatch):
    """What is counted would show it."""
    judged = HeadPolicy.keep_drafting

    def reading(self, step):
        step.active.sum().item()
        return judged(self, step)

    monkeypatch.setattr(HeadPolicy, "keep_drafting", reading)
    rounds = waits_of_rounds("head", waits, chunk=5)
    assert all(counts["tests/rehearsal/test_decoding.py"] for counts, slots in rounds if slots)


# --- what a GPU refuses -----------------------------------------------------------------------------------------------


def test_a_head_on_another_device_is_refused_in_a_sentence(waits):
    policy = head()(HERE[1])
    with pytest.raises(InputError, match=r"the head is on cpu, but the models are on cuda:0"):
        generate(*THERE, PROMPTS[:1], policy=policy, max_new_tokens=4)
    assert torch.cuda.is_available()
