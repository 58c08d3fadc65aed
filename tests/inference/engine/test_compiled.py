"""`compiled`: one compilation gives the same numbers for every batch. Without a compiler it is the function itself."""

from __future__ import annotations

import logging
import shutil
from functools import partial

import pytest
import torch
import torch._inductor

from accept_head.head import scorer as scorer_module
from accept_head.head.scorer import make_scorer
from accept_head.inference.engine.compiled import Compiled, compiled
from accept_head.inference.policies import reader as reader_module
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policies.reader import Distribution, SignalReader
from accept_head.inference.policy import OF_Q, DraftStep, Signal
from accept_head.signals import draft_signals
from tests.inference.support.toy import random_head

VOCAB, HIDDEN = 301, 16
LOGGER = logging.getLogger("accept-head-test")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture
def compilations(monkeypatch):
    """One entry for each time that machine code was made."""
    made, make = [], torch._inductor.aoti_compile_and_package

    def counted(*inputs, **options):
        made.append(options["package_path"])
        return make(*inputs, **options)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", counted)
    return made


def said(caplog):
    return [record.message for record in caplog.records if record.name == LOGGER.name or "accept_head" in record.name]


def weighted(weight):
    return lambda x, unread=None: (x @ weight).relu()


def drawn(batch, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch, VOCAB, generator=generator)).to(dtype)
    ids = torch.randint(0, VOCAB, (batch,), generator=generator)
    return logits, ids, torch.randn(batch, HIDDEN, generator=generator)


@needs_compiler
@pytest.mark.slow
def test_one_compilation_serves_all_batches_and_all_weights_of_a_shape(compilations):
    calls = []
    for seed in (0, 1):
        weight = torch.randn(HIDDEN, 3, generator=torch.Generator().manual_seed(seed))
        function = weighted(weight)
        at_once = compiled(function, (torch.ones(4, HIDDEN), None), name="it", logger=LOGGER)
        assert isinstance(at_once, Compiled)
        at_once.function = lambda x, unread=None, call=function: calls.append(len(x)) or call(x)
        for batch in range(1, 17):
            x = drawn(batch, batch)[2]
            torch.testing.assert_close(at_once(x, None), (x.double() @ weight.double()).relu().float())
        strided = torch.randn(HIDDEN, 5).t()
        torch.testing.assert_close(at_once(strided, "not looked at"), function(strided))
        assert not calls
        weight.mul_(2)  # changed in place, it is changed there too
        torch.testing.assert_close(at_once(x, None), function(x))
    assert len(compilations) == 1


@needs_compiler
@pytest.mark.slow
def test_what_it_was_not_compiled_for_goes_to_the_function_and_is_said_once(caplog):
    function = weighted(torch.randn(HIDDEN, 3))
    at_once = compiled(function, (torch.ones(4, HIDDEN), None), name="it", logger=LOGGER)
    assert at_once(torch.ones(0, HIDDEN), None).shape == (0, 3) and not said(caplog)
    for dtype in (torch.float64, torch.float64):
        with pytest.raises(RuntimeError):  # torch's own word on float64 @ float32
            at_once(torch.ones(2, HIDDEN, dtype=dtype), None)
    assert at_once(torch.ones(2, 5, HIDDEN), None).shape == (2, 5, 3)
    assert ["was not compiled for" in line for line in said(caplog)] == [True]


def test_without_a_compiler_the_function_itself_serves(monkeypatch, caplog):
    def no_compiler(*inputs, **options):
        raise RuntimeError("g++: not found")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", no_compiler)
    function = weighted(torch.randn(HIDDEN, 7))
    with caplog.at_level(logging.INFO):
        assert compiled(function, (torch.ones(4, HIDDEN), None), name="it", logger=LOGGER) is function
    assert said(caplog) == ["accept-head: it is not compiled (RuntimeError: g++: not found), hence slower"]


# --- signals and head -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "predicts"), [(torch.float32, "token"), (torch.bfloat16, "token"), (torch.float32, "both")]
)
def test_what_is_read_at_once_is_what_is_read_one_by_one(dtype, predicts):
    logits, _, hidden = drawn(4, dtype=dtype)
    table = torch.randn(2 * logits.shape[1], HIDDEN, generator=torch.Generator().manual_seed(4))
    head = random_head(HIDDEN, signals=True, reads="before", embeddings=table, width=2 * HIDDEN, predicts=predicts)
    plain, at_once, score = SignalReader(OF_Q), SignalReader(OF_Q), make_scorer(head, predicts, fusible=True)
    # Of q, `both` is no other case than `token`, and takes seconds to compile.
    at_once.compile(logits, hidden, sampled=predicts == "token", logger=LOGGER, score=score)
    for batch in (0, 1, 3, 16):
        logits, places, hidden = drawn(batch, batch, dtype)
        ids = 2 * places + 1  # the drafter's tokens are every second one of the target's
        temperature = torch.linspace(0, 2, batch)
        q = (logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]).softmax(-1)
        plainly = logits.float().softmax(-1)
        for read, expected in (
            (partial(at_once.of_logits, logits, temperature), q),
            (partial(at_once.of_logits, logits, None), plainly),
            (partial(at_once.of_q, q), q),
        ):
            found = read(places, ids, hidden)
            signals = draft_signals(expected, places)
            torch.testing.assert_close(torch.stack(found[:3], dim=-1), signals, rtol=1e-4, atol=1e-4)
            step = DraftStep(1, ids, ids == ids, hidden, None, *found)
            probability = head(hidden, signals, ids).detach().sigmoid()
            probability = probability if predicts == "both" else probability[:, 0]
            torch.testing.assert_close(HeadPolicy(head, 0.5).score(step), probability, rtol=1e-4, atol=1e-4)
        one_by_one = torch.stack(plain.of_logits(logits, temperature, places)[:3], dim=-1)
        torch.testing.assert_close(one_by_one, draft_signals(q, places))


@pytest.mark.parametrize("predicts", ["token", "both"])
@pytest.mark.parametrize("small", [0, 1 << 16], ids=["products", "sums"])
def test_products_as_sums_are_the_same_products(predicts, small, monkeypatch):
    monkeypatch.setattr(scorer_module, "SMALL_MATRIX", small)
    _, ids, hidden = drawn(5)
    table = torch.randn(100, HIDDEN, generator=torch.Generator().manual_seed(4))
    head = random_head(HIDDEN, signals=True, reads="before", embeddings=table, width=2 * HIDDEN, predicts=predicts)
    given = hidden, torch.rand(5, 3), ids % 100
    torch.testing.assert_close(make_scorer(head, predicts, fusible=True)(*given), make_scorer(head, predicts)(*given))


def test_a_score_can_come_without_the_signals(monkeypatch):
    monkeypatch.setattr(reader_module, "compiled", lambda function, *_, **__: partial(function))
    logits, ids, hidden = drawn(3)
    score = make_scorer(random_head(HIDDEN, signals=True, reads="before"))
    both, alone = SignalReader(OF_Q), SignalReader(OF_Q)
    both.compile(logits, hidden, sampled=True, logger=LOGGER, score=score)
    alone.compile(logits, hidden, sampled=True, logger=LOGGER, score=score, signals=False)
    for read in ("of_q", "of_logits"):
        given = (logits.softmax(-1), ids, ids, hidden) if read == "of_q" else (logits, None, ids, ids, hidden)
        found = getattr(alone, read)(*given)
        assert found == Distribution(scored=found.scored)
        torch.testing.assert_close(found.scored, getattr(both, read)(*given).scored)


def test_a_head_takes_the_score_that_its_host_has_worked_out():
    _, ids, hidden = drawn(4)
    policy = HeadPolicy(random_head(HIDDEN, signals=True, reads="before"), 0.5)
    given = torch.rand(4)
    assert policy.score(DraftStep(1, ids, ids == ids, hidden, scored=given)) is given


def test_only_what_is_needed_is_read_where_nothing_is_compiled():
    logits, ids, _ = drawn(3)
    found = SignalReader(frozenset({Signal.MAX_PROB, Signal.SECONDS})).of_logits(logits, None, ids)
    assert found.logprob is None and found.entropy is None
    torch.testing.assert_close(found.max_prob, logits.softmax(-1).amax(-1))
    assert SignalReader(frozenset({Signal.FED_HIDDEN})).of_q(logits, ids) == Distribution()
