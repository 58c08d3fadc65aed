"""The decode loop on a simulated GPU gives the tokens, counts and learning of a CPU, and waits only where expected."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import pairwise

import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.inference import generate
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine import cache
from accept_head.inference.engine.graphs import Graphs
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policies.head import HeadPolicy
from tests.inference.support.decoders import LLAMA, online
from tests.inference.support.decoders import POLICIES as EVERY
from tests.inference.support.decoders import decode as run
from tests.inference.support.toy import VOCAB, ragged_prompts
from tests.rehearsal.pretend_cuda import pretend_cuda

SAMPLED, GREEDY = Sampling(temperature=1.5, top_k=20, top_p=0.95), Sampling(temperature=0)
PROMPTS = [prompt[:16] for prompt in ragged_prompts(6)]
POLICIES = EVERY | {"head by tenants": online(reads="before", per_tenant=True)}
TENANTS = ["ann", "bob", "ann", "eve", "bob", "ann"]
HERE = LLAMA
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


SLOW = pytest.mark.slow
QUICK = ("adaedl", "head gain", "head online", "head trains")
# Their rules are other expressions of the same tensors.
ALIKE = ("none", "hf-heuristic", "confidence", "cumulative-confidence", "entropy", "svip", "leviathan", "base alone")
ALIKE += ("budget retrospective", "head lag 0", "head before", "head with a base", "head calibrated")
CASES = [
    pytest.param(name, compile, sampling, marks=[] if quick else SLOW, id=f"{name}, {compile}, {sampling.temperature}")
    for name in POLICIES
    if name not in ALIKE
    for compile, sampling in (("none", GREEDY), ("graphs", SAMPLED))
    if name in QUICK or compile == "graphs"
    for quick in [name in QUICK and compile == "graphs"]
]


def decode(models, name, sampling=SAMPLED, prompts=PROMPTS, **options):
    policy = POLICIES[name](models[1])
    options |= {"tenants": TENANTS} if Drafting(policy).by_tenant else {}
    return run(models, policy, prompts, sampling=sampling, **options)


@pytest.mark.parametrize(("name", "compile", "sampling"), CASES)
def test_a_policy_decodes_as_on_a_cpu(name, compile, sampling, waits, captures):
    """Admissions, rejections, end tokens, ragged rows."""
    plain = decode(HERE, name, sampling)
    assert decode(THERE, name, sampling, compile=compile) == plain
    assert len({stats.rounds for _, stats in plain}) > 1
    assert bool(captures) == (compile == "graphs") and sum(waits.values())


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, pytest.param({"verifier": "match"}, marks=SLOW)],
    ids=str,
)
def test_other_ways_to_decode(options, waits):
    assert decode(THERE, "max-prob", **options) == decode(HERE, "max-prob", **options)


# --- when the host waits ----------------------------------------------------------------------------------------------

ROUND_END = "inference/decode/rows.py"  # where the rows are, once a round
LEARNING = "inference/policies/batch_stop.py"  # where costs decide
COUNTS = "inference/policy.py"  # a round's numbers, for whoever learns on the host
QUESTION = "inference/decode/loop.py"  # whether any row goes on
BUDGET = "inference/decode/run.py"  # how much may be drafted, where a policy chooses it


def waits_of_rounds(name, waits, *, compile="none", sampling=SAMPLED):
    """[(file → waits, drafted tokens)] of each round of one long response, but for the first two and the last."""
    policy, seen = POLICIES[name](THERE[1]), []
    requests = make_requests(PROMPTS[4:5], 40, [0])
    decoder = make_decoder(*THERE, requests, policy, batch_size=1, greedy=False, compile=compile)

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
    for counts, _ in waits_of_rounds(name, waits, compile=compile):
        assert counts == {ROUND_END: 1} | ({BUDGET: 1} if name == "batch-map" else {})


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        pytest.param(name, compile, marks=[] if quick else SLOW)
        for name in ("head", "head online, before", "max-prob", "head gain")
        for compile in ("none", "graphs")
        for quick in [(name, compile) in (("head", "graphs"), ("head online, before", "none"))]
    ],
)
def test_a_round_that_may_stop_waits_once_a_token_besides(name, compile, waits):
    questions = []
    for counts, slots in waits_of_rounds(name, waits, compile=compile):
        questions.append(counts.pop(QUESTION, 0))
        assert counts == {ROUND_END: 1} and questions[-1] <= max(slots, 1)
    assert max(questions) >= 1


@SLOW
def test_costs_add_the_question_of_the_budget_and_what_the_host_learns(waits):
    """It reads the round's numbers, then its own; and when it has learnt from some, it tells the device all in one
    piece."""
    learning = []
    for counts, slots in waits_of_rounds("costs", waits, compile="graphs"):
        questions = counts.pop(QUESTION, 0)
        learning.append(counts.pop(LEARNING))
        assert counts == {ROUND_END: 1, BUDGET: 1, COUNTS: 1} and questions <= max(slots, 1)
    assert set(learning) == {1, 2}, learning


def test_a_policy_that_reads_on_the_host_is_seen(waits, monkeypatch):
    """What is counted would show it."""
    judged = HeadPolicy.keep_drafting

    def reading(self, step):
        step.active.sum().item()
        return judged(self, step)

    monkeypatch.setattr(HeadPolicy, "keep_drafting", reading)
    rounds = waits_of_rounds("head", waits)
    assert all(counts["tests/rehearsal/test_decoding.py"] for counts, slots in rounds if slots)


# --- what a GPU refuses -----------------------------------------------------------------------------------------------


def test_a_head_on_another_device_is_refused_in_a_sentence(waits):
    policy = POLICIES["head"](HERE[1])
    with pytest.raises(InputError, match=r"the head is on cpu, but the models are on cuda:0"):
        generate(*THERE, PROMPTS[:1], policy=policy, max_new_tokens=4)
    assert torch.cuda.is_available()
