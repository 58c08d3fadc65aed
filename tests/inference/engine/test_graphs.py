"""A captured and replayed step equals a plain call. On a CPU a stand-in for CUDA graphs (`replayed`) is used."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import InputError, Sampling
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.engine import cache
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.capture import Capture, capture_of
from accept_head.inference.engine.graphs import Graphs
from accept_head.inference.policies.bandit import BanditPolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.hf_heuristic import HfHeuristicPolicy
from tests.examples import make_eagle3
from tests.inference.support.cached import MODELS
from tests.inference.support.decoders import LLAMA, POLICIES
from tests.inference.support.decoders import decode as decoded
from tests.inference.support.replayed import ReplayedGraphs, standing_in
from tests.inference.support.toy import VOCAB, one_layer_pair, ragged_prompts, two

SAMPLED, GREEDY = Sampling(temperature=1.5, top_k=20, top_p=0.95), Sampling(temperature=0)
PROMPTS = [prompt[:16] for prompt in ragged_prompts(6)]


# Graphs hold forwards, and steps that ask no policy.
FORWARDS_ALONE = {"hf-confidence", "max-prob-mean", "head trains"}
CAPTURED = [name for name in POLICIES if name not in FORWARDS_ALONE]


SLOW = pytest.mark.slow
QUICK = ("none", "fixed", "confidence", "head lag 0", "head", "head gain", "costs", "adaedl", "goodput", "budget")
QUICK += ("adaspec", "head calibrated", "head online")
ALL = [(name, SAMPLED) for name in QUICK]
ALL += [pytest.param(name, SAMPLED, marks=SLOW) for name in CAPTURED if (name, SAMPLED) not in ALL]
ALL += [pytest.param(name, GREEDY, marks=SLOW) for name in CAPTURED]


@pytest.fixture(autouse=True)
def short_extents(monkeypatch):
    """So that short texts pass through several."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)


@pytest.fixture
def backend():
    with standing_in() as backend:
        yield backend


def decode(name, prompts=PROMPTS, **options):
    """name: of POLICIES, or a policy."""
    policy = POLICIES[name](LLAMA[1]) if isinstance(name, str) else name
    return decoded(LLAMA, policy, prompts, **{"sampling": SAMPLED, **options})


# --- the decode loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sampling"), ALL)
def test_replayed_steps_are_the_plain_ones(name, sampling, backend, caplog):
    """Six prompts of many lengths on two rows: admissions, rejections, end tokens."""
    policy = POLICIES[name](LLAMA[1])
    assert capture_of(policy) is not None
    plain = decode(name, sampling=sampling)
    assert backend.captures == 0
    assert decode(policy, sampling=sampling, compile="graphs") == plain
    assert 0 < backend.captures < backend.replays
    assert len({stats.rounds for _, stats in plain}) > 2
    assert not caplog.records  # nothing was left out


@pytest.mark.parametrize(
    "name", [name if name == "hf-confidence" else pytest.param(name, marks=SLOW) for name in sorted(FORWARDS_ALONE)]
)
def test_policies_that_are_not_captured_see_the_same(name, backend, caplog):
    assert capture_of(POLICIES[name](LLAMA[1])) is None
    assert decode(name) == decode(name, compile="graphs")
    assert backend.replays > backend.captures > 0 and not caplog.records


@pytest.mark.parametrize(
    "options",
    [
        {"verifier": "match"},
        *(pytest.param(each, marks=SLOW) for each in ({"repetition_penalty": 1.3}, {"batch_size": 1})),
    ],
    ids=str,
)
def test_other_ways_to_decode(options, backend):
    assert decode("max-prob", PROMPTS[:4], **options) == decode("max-prob", PROMPTS[:4], **options, compile="graphs")


@pytest.mark.parametrize(
    "name", [name if name in ("llama", "gpt2", "gemma3 window") else pytest.param(name, marks=SLOW) for name in MODELS]
)
def test_no_model_reads_its_inputs_on_the_host(name, backend):
    model = MODELS[name]
    cached, plain = (CachedModel(model, 2, 20, with_hidden=True, compile=mode) for mode in ("graphs", "none"))
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for start, width in ((0, 3), (3, 3), (6, 1), (5, 4), (7, 4)):  # and a rejected token
            starts, fed = torch.tensor([start, start // 2]), ids[:, start : start + width]
            for one, another in zip(*(each.forward(fed, starts, start) for each in (cached, plain)), strict=True):
                torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-3)
    assert 0 < backend.captures < 4


def test_runs_of_one_decoder_share_the_forwards_and_nothing_else(backend):
    requests = make_requests(PROMPTS[:4], 10, range(4))
    options = {"batch_size": 2, "greedy": False}
    decoder, plain = (
        make_decoder(*LLAMA, requests, FixedPolicy(5), **options, compile=mode) for mode in ("graphs", "none")
    )

    def run(decoder, name, seed):
        processing, stopping = Processing(SAMPLED, VOCAB), Stopping([7, 14, 20], [], torch.device("cpu"))
        policy = POLICIES[name](LLAMA[1])
        done = decoder.run(requests, policy=policy, processing=processing, stopping=stopping, seed=seed)
        return sorted((finished.request.index, finished.token_ids) for finished in done)

    captured = []
    for name in ("fixed", "head", "fixed"):
        assert run(decoder, name, 0) == run(plain, name, 0)
        captured.append(len(decoder.target.graphs.captured) + len(decoder.draft.graphs.captured))
    assert captured[0] < captured[1] == captured[2]


def test_rows_that_wait_and_rows_that_end_early(backend):
    """A batch that is never full, then one request at a time."""
    requests = make_requests(PROMPTS[:4], 12, range(4))

    def arriving():
        for request in requests:
            yield None
            yield request

    answers = []
    for mode in ("none", "graphs"):
        decoder = make_decoder(*LLAMA, requests, FixedPolicy(3), batch_size=2, greedy=True, compile=mode)
        run = decoder.run(
            arriving(),
            policy=FixedPolicy(3),
            processing=Processing(GREEDY, VOCAB),
            stopping=Stopping([], [], torch.device("cpu")),
        )
        answers.append({done.request.index: done.token_ids for done in run})
    assert answers[0] == answers[1]


FORGETS = ("goodput", "online-logistic", "budget", "adaspec", "head online")


@pytest.mark.parametrize("name", [*FORGETS, "bandit", "hf-heuristic"])
def test_a_policy_that_forgets_is_as_if_new(name):
    made = {
        "bandit": lambda: BanditPolicy(3),
        "hf-heuristic": lambda: HfHeuristicPolicy(3, persist=True),
    }
    options = {"max_new_tokens": 30}
    policy = made[name]() if name in made else POLICIES[name](LLAMA[1])
    if name == "bandit":  # it goes by the clock: what it was told is all that it has
        policy.start(2, torch.device("cpu"))
        policy.counts, policy.top = policy.counts + 1, policy.top + 1
        policy.forget()
        assert not policy.counts.any() and not policy.top.any()
        return
    first, second = decode(policy, **options), decode(policy, **options)
    assert first != second  # it matters
    policy.forget()
    assert decode(policy, **options) == first


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_cache_that_moved_is_captured_anew(backend):
    model, ids = LLAMA[0], torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))
    cached = CachedModel(model, 3, 20, compile="graphs")
    starts = torch.tensor([4, 9, 6])
    with torch.no_grad():
        full = model(ids).logits

        def check(rows, places):
            index = places[:, None] + torch.arange(2)
            fed = ids[rows].gather(1, index)
            for _ in range(2):
                logits = cached.forward(fed, places, int(places.max())).logits
                expected = full[rows].gather(1, index[..., None].expand(-1, -1, VOCAB))
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)

        cached.fill(ids, [0, 1, 2], [0, 0, 0], starts.tolist())
        check(torch.arange(3), starts)
        kept = torch.tensor([2, 0])
        cached.select(kept)
        check(kept, starts[kept])
        cached.restore(3)
        cached.fill(ids, [0, 1, 2], [0, 0, 0], starts.tolist())
        check(torch.arange(3), starts)
    assert backend.captures == 3


def test_extents_are_few_and_never_too_small(monkeypatch, backend):
    monkeypatch.setattr(cache, "LEAST_EXTENT", 128)
    cached = CachedModel(LLAMA[0], 1, 4000, compile="graphs")
    extents = [cached._extent(slots) for slots in range(1, 4001)]
    assert all(extent >= slots for slots, extent in enumerate(extents, 1))
    assert all(extent <= 1.5 * max(slots, 86) for slots, extent in enumerate(extents, 1))
    assert sorted(set(extents)) == [128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4000]


def with_eagle3():
    target, _ = two(LlamaForCausalLM, LlamaConfig)
    return target, make_eagle3(target, draft_vocabulary=24, layers=(0, 1, 2))


class Rarely(FixedPolicy):
    """Drafts after 2, 3, 4, … rounds without, so that ever more tokens wait for the drafter."""

    capture = None
    rounds = 0

    def start_round(self, live):
        self.rounds += 1
        return super().start_round(live) * (self.rounds in (3, 7, 12, 18, 25, 33))


@pytest.mark.parametrize(
    ("pair", "policy"),
    [(LLAMA, FixedPolicy(5)), (with_eagle3(), FixedPolicy(5)), (with_eagle3(), Rarely(1))],
    ids=["draft model", "EAGLE-3", "EAGLE-3, tokens wait"],
)
def test_memory_is_planned_for_what_forwards_leave_in_place(pair, policy, backend):
    requests = make_requests(PROMPTS, 20)
    decoder = make_decoder(*pair, requests, policy, batch_size=3, greedy=False, compile="graphs")
    run = decoder.run(
        requests,
        policy=policy,
        processing=Processing(SAMPLED, VOCAB),
        stopping=Stopping([], [], torch.device("cpu")),
    )
    assert sum(1 for _ in run) == len(requests)
    buffers = [*decoder.target.graphs.buffers.items(), *decoder.draft.graphs.buffers.items()]
    logits = sum(buffer.nbytes for (_, place, *_), buffer in buffers if place == 0)
    assert decoder.memory.kept / 3 < logits <= decoder.memory.kept
    assert "kept by graphs" in str(decoder.memory)


def test_graphs_need_a_gpu():
    with pytest.raises(InputError, match="compile is 'graphs', which needs a CUDA device, but the models are on cpu"):
        decode("fixed", compile="graphs")


def test_a_model_on_several_devices_is_refused(backend):
    model, _ = one_layer_pair()
    model.lm_head.to("meta")
    with pytest.raises(InputError, match=r"needs a model on one device, but it is on \['cpu', 'meta'\]"):
        CachedModel(model, 1, 20, compile="graphs")


# --- captured functions -----------------------------------------------------------------------------------------------


class Sum:
    capture = Capture(carried=("total", "terms"))

    def __init__(self):
        self.total, self.terms = torch.zeros(2), []

    def add(self, x, factor):
        self.total = self.total + factor * x
        self.terms.append(x * x)
        return self.total.sum()


def test_state_goes_in_and_out():
    graphs, state, plain = Graphs(ReplayedGraphs()), Sum(), Sum()
    for _ in range(3):
        for one in (state, plain):
            one.total, one.terms = torch.zeros(2), []
        for step, value in enumerate((1.0, 2.0, 5.0)):
            x = torch.full((2,), value)
            got = graphs(f"add {step}", state.add, x, 2, state=state)
            assert got == plain.add(x, 2)
            torch.testing.assert_close(state.total, plain.total)
            torch.testing.assert_close(state.terms, plain.terms)
    # The first of a round is given a new tensor, and each of the others what the one before left.
    assert graphs.backend.captures == 3


def test_another_number_or_shape_is_another_graph():
    graphs = Graphs(ReplayedGraphs())
    for factor in (2, 3, 2):
        for rows in (1, 4):
            x = torch.rand(rows)
            torch.testing.assert_close(graphs("times", lambda x, factor: x * factor, x, factor), x * factor)
    assert graphs.backend.captures == 4 and graphs.backend.replays == 6


def test_what_is_changed_in_place_is_changed_once():
    graphs, count = Graphs(ReplayedGraphs()), torch.zeros(2)
    graphs.keep(count)
    for expected in (1, 2, 3):
        graphs("count", lambda: count.add_(1).sum(), mutates=[count])
        assert count.tolist() == [expected] * 2
    forgotten = torch.zeros(2)
    graphs("forgotten", lambda: forgotten.add_(1).sum())
    assert forgotten.tolist() != [1, 1]


def test_a_kept_tensor_is_used_where_it_lies_and_any_other_is_copied():
    graphs, kept = Graphs(ReplayedGraphs()), torch.zeros(2)
    graphs.keep(kept)
    for value in (1.0, 2.0):
        kept.fill_(value)
        assert graphs("sum", torch.sum, kept) == 2 * value
        assert graphs("sum", torch.sum, torch.full((2,), value)) == 2 * value
    assert graphs.backend.captures == 2
    for value in (1.0, 2.0):
        kept.fill_(value)
        for given in (kept, torch.full((2,), value)):
            assert graphs("any", torch.sum, given, copy=True) == 2 * value
    assert graphs.backend.captures == 3


def test_what_a_function_leaves_behind_is_lost():
    """It lies in memory that other graphs use: only results, and what the state carries, are handed out."""
    graphs, left = Graphs(ReplayedGraphs()), []
    x = torch.ones(2)
    assert graphs("leave", lambda x: left.append(x + 1) or x.sum(), x) == 2
    assert left[0].tolist() == [2, 2] and left[-1].tolist() != [2, 2]  # the first is the trial's


WAITING = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x + len(x.tolist()),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "from the host": lambda x: x * torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_for_the_device_is_refused_or_run_plainly(name, caplog):
    graphs, x, function = Graphs(ReplayedGraphs()), torch.tensor([1.0, 2.0]), WAITING[name]
    with pytest.raises(InputError, match=f"compile is 'graphs', but {name} cannot be captured"):
        graphs(name, function, x)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        torch.testing.assert_close(graphs(name, function, x, optional=True), function(x))
    assert sum("is not captured" in record.message for record in caplog.records) == 1


def test_there_are_only_so_many_graphs():
    graphs = Graphs(ReplayedGraphs(), most=2)
    for factor in (1, 2, 3, 4, 1):
        assert graphs("times", lambda x, factor: x * factor, torch.ones(()), factor) == factor
    assert graphs.backend.captures == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", CAPTURED)
def test_cuda_graphs_are_the_plain_steps(name):
    models = [model.to("cuda") for model in one_layer_pair()]
    answers = [
        decoded(models, POLICIES[name](models[1]), PROMPTS, sampling=GREEDY, compile=mode)
        for mode in ("none", "graphs")
    ]
    assert [tokens for tokens, _ in answers[0]] == [tokens for tokens, _ in answers[1]]


@SLOW
@pytest.mark.parametrize("spec", ["fixed:4", "head:{}", "head:{},lag=0", "max-prob:0.5"])
def test_the_embedded_pair_and_its_own_head(spec, embedded_pair, embedded_pair_folder, monkeypatch, backend):
    """Real models: real acceptance, and lengths that the head chooses."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 32)
    head = embedded_pair_folder / "heads" / "sampled"
    policy = spec.format(head)
    lines = (embedded_pair_folder / "prompts" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    prompts = [embedded_pair.tokenizer(json.loads(line)["prompt"])["input_ids"][:40] for line in lines]
    models = embedded_pair.target, embedded_pair.draft
    options = {"sampling": Sampling(temperature=1.0, top_k=50), "max_new_tokens": 16, "end_token_ids": [203]}
    plain = decoded(models, policy, prompts, **options)
    assert decoded(models, policy, prompts, **options, compile="graphs") == plain
    assert sum(stats.accepted for _, stats in plain) > 4 and backend.replays
