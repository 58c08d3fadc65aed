"""The kernels of signals and head against float64 arithmetic, on a GPU or in Triton's interpreter.

`make test-vllm` runs it in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig
from accept_head.base import places_of
from accept_head.head.scorer import make_scorer
from accept_head.inference.decode.steps import step_of
from accept_head.inference.kernels import head as head_operation
from accept_head.inference.kernels.head import KernelScorer, bytes_to_pack, scorer_of
from accept_head.inference.kernels.signals import PlainSoftmax, logits_signals_by_kernel, q_signals_by_kernel
from accept_head.inference.policies.online.recalibrated import unit_state
from accept_head.inference.policy import OF_Q, Signal
from accept_head.pair import Forward
from accept_head.signals import LEAST_LOG, SIGNALS
from tests.inference.support.kernels import DEVICE, runs

pytestmark = pytest.mark.usefixtures("anywhere")


def float64_signals(logits, ids, temperature):
    """(rows, 3), and log-sum-exp, by the definitions."""
    scaled = logits.cpu().double().numpy() / np.asarray(temperature, dtype=np.float64)[:, None]
    top = scaled.max(-1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(scaled - top).sum(-1))
    q = np.exp(scaled - lse[:, None])
    log_q = np.log(q, where=q > 0, out=np.zeros_like(q))
    drawn = (scaled - lse[:, None])[np.arange(len(q)), ids.cpu().numpy()]
    return np.stack([drawn, -(q * log_q).sum(-1), q.max(-1)], -1), lse


def random_logits(rows, vocab, dtype=torch.float32, *, kept=None, seed=0):
    """Logits of which only the `kept` largest are left, if so asked, and drawable ids."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    if kept:
        least = logits.topk(kept).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return logits.to(dtype).to(DEVICE), ids.to(DEVICE)


CASES = {
    "one row": (1, 5000, torch.float32, None),
    "one token": (3, 1, torch.float32, None),
    "bfloat16": (2, 4097, torch.bfloat16, None),
    "float16": (5, 9001, torch.float16, None),
    "parts that are all masked": (2, 9000, torch.float32, 7),
    "many rows": (33, 129, torch.bfloat16, 50),
    "a vocabulary of Llama 3": (1, 128_256, torch.bfloat16, None),
}


@runs
@pytest.mark.parametrize("name", CASES)
def test_signals_of_logits_are_those_of_float64(name):
    rows, vocab, dtype, kept = CASES[name]
    logits, ids = random_logits(rows, vocab, dtype, kept=kept)
    for temperature in (None, torch.rand(rows) * 2 + 0.2):
        given = None if temperature is None else temperature.to(DEVICE)
        found = logits_signals_by_kernel(logits, ids, given)
        expected, lse = float64_signals(logits, ids, np.ones(rows) if temperature is None else temperature)
        np.testing.assert_allclose(found.signals.cpu(), expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found.lse.cpu(), lse, rtol=1e-5, atol=1e-5)
        assert found.largest.equal(logits.argmax(-1))
        greedy = logits_signals_by_kernel(logits, None, given).signals
        expected, _ = float64_signals(logits, logits.argmax(-1), np.ones(rows) if temperature is None else temperature)
        np.testing.assert_allclose(greedy.cpu(), expected, rtol=2e-5, atol=2e-5)


@runs
def test_logits_that_lie_apart_and_large_ones():
    """A slice of wider rows, as of a padded vocabulary; shifted by so much that an exponential would overflow."""
    wide, ids = random_logits(4, 3000)
    logits = (wide + 500)[:, :2500]
    assert not logits.is_contiguous()
    ids = ids.clamp(max=2499)
    expected, _ = float64_signals(logits, ids, np.ones(4))
    np.testing.assert_allclose(logits_signals_by_kernel(logits, ids).signals.cpu(), expected, rtol=1e-3, atol=1e-3)


@runs
def test_ties_go_to_the_first_and_a_certain_token_has_no_entropy():
    logits = torch.full((3, 5000), -torch.inf, device=DEVICE)
    logits[0, [4999, 1500, 2600]] = 2.0  # in several parts
    logits[1, [700, 3]] = -1.0  # in one
    logits[2, 1024] = 5.0
    found = logits_signals_by_kernel(logits, torch.tensor([2600, 700, 1024], device=DEVICE))
    assert found.largest.tolist() == [1500, 3, 1024]
    expected = [[-np.log(3), np.log(3), 1 / 3], [-np.log(2), np.log(2), 1 / 2], [0, 0, 1]]
    np.testing.assert_allclose(found.signals.cpu(), expected, atol=1e-6)
    never = logits_signals_by_kernel(logits, torch.tensor([0, 0, 0], device=DEVICE)).signals
    assert never[:, 0].tolist() == pytest.approx([LEAST_LOG] * 3)  # not −inf


@runs
@pytest.mark.parametrize("name", CASES)
def test_signals_of_q_are_those_of_float64(name):
    rows, vocab, _, kept = CASES[name]
    logits, ids = random_logits(rows, vocab, kept=kept)
    q = logits.softmax(-1)
    expected, _ = float64_signals(logits, ids, np.ones(rows))
    np.testing.assert_allclose(q_signals_by_kernel(q, ids).cpu(), expected, rtol=2e-5, atol=2e-5)
    undrawn = q_signals_by_kernel(q, None)[:, 1:]
    np.testing.assert_allclose(undrawn.cpu(), expected[:, 1:], rtol=2e-5, atol=2e-5)
    one_hot = torch.nn.functional.one_hot(ids, vocab).float()
    np.testing.assert_allclose(q_signals_by_kernel(one_hot, ids).cpu(), [[0.0, 0.0, 1.0]] * rows, atol=1e-6)


@runs
def test_a_draft_step_has_what_is_needed_and_no_more():
    logits, ids = random_logits(3, 2000)
    expected, _ = float64_signals(logits, ids, np.ones(3))
    fed = Forward(logits[:, None], logits[:, None])
    for q in (PlainSoftmax(logits), logits.softmax(-1)):
        step = step_of(OF_Q, 1, ids, ids > 0, q, fed)
        assert step.signals is not None
        for column, value in enumerate((step.logprob, step.entropy, step.max_prob)):
            np.testing.assert_allclose(value.cpu(), expected[:, column], rtol=2e-5, atol=2e-5)
        before = step_of(frozenset({Signal.ENTROPY}), 1, None, ids > 0, q, fed)
        assert before.logprob is None and before.max_prob is None and before.signals is None
        np.testing.assert_allclose(before.entropy.cpu(), expected[:, 1], rtol=2e-5, atol=2e-5)
        assert step_of(frozenset(), 1, ids, ids > 0, q, fed).entropy is None


# The head

VOCAB, HIDDEN = 50, 80
BASE, STANDARDISED = {"base": True}, {"width": 20, "standardised": True}
HEADS = {
    "paper": {"depth": 3},
    "signals": {"depth": 2, "reads": "before", "signals": SIGNALS},
    "one signal": {"depth": 1, "signals": SIGNALS[1:2]},
    "embedding": {"depth": 2, "reads": "before", "signals": SIGNALS, "embedding": True},
    "narrow": {"depth": 2, "reads": "before", "signals": SIGNALS, "embedding": True, "width": 20},
    "both": {"depth": 1, "reads": "before", "signals": SIGNALS, "embedding": True, "width": 20, "predicts": "both"},
    "next": {"depth": 1, "predicts": "next"},
    "probe": {"depth": 0},
    "base": {"depth": 0, "reads": "before", "signals": SIGNALS, **BASE, "residual": False},
    "base of one signal": {"depth": 0, "reads": "before", "signals": SIGNALS[2:], **BASE, "residual": False},
    "base and residual": {"depth": 2, "reads": "before", "signals": SIGNALS, "embedding": True, **STANDARDISED, **BASE},
    "base and residual, both": {"depth": 1, "signals": SIGNALS, "predicts": "both", **STANDARDISED, **BASE},
    "base and probe": {"depth": 0, "signals": SIGNALS[1:], **STANDARDISED, **BASE},
    "standardised": {"depth": 1, "signals": SIGNALS, **STANDARDISED},
}


def head_of(name):
    """With weights that matter in every part of it."""
    settings = dict(HEADS[name])
    signals = settings.get("signals", ())
    count = len(places_of(signals) if settings.get("base") else signals)
    means, deviations = (-1.0, 1.0, 0.5, 0.4, 0.2, 1.5, 0.9, -2.0, -0.7), (1.0, 0.5, 0.2, 0.3, 2.0, 1.5, 0.5, 3.0, 1.0)
    settings |= {"signal_mean": means[:count], "signal_std": deviations[:count]}
    embeddings = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) / 4
    if settings.pop("embedding", False):
        settings["embedding_std"] = 0.25
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, **settings)).attach(embeddings.to(DEVICE))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.12)
        if head.config.base:
            head.base.weight.normal_(std=0.5)
    return head.to(DEVICE).eval()


def inputs(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    largest = torch.rand(rows, generator=generator).clamp(0.01, 0.999)
    logprob = largest.log() - 5 * torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) < 0.7)
    signals = torch.stack([logprob, -3 * largest.log(), largest], dim=-1)
    made = torch.randn(rows, HIDDEN, generator=generator), signals
    return *(each.to(DEVICE) for each in made), torch.randint(0, VOCAB, (rows,), generator=generator).to(DEVICE)


def float64_probability(head, hidden, signals, ids, prediction):
    exact = head.__class__(head.config).attach(head.embeddings.double() if head.embeddings is not None else None)
    exact = exact.to(DEVICE).double()
    exact.load_state_dict(head.state_dict())
    predictions = ("token", "next") if prediction == "both" else (prediction,)
    made = [exact.probability(hidden.double(), each, signals.double(), ids) for each in predictions]
    return torch.stack(made, -1) if prediction == "both" else made[0]


@runs
@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_that_of_float64(name, monkeypatch):
    """As a table of embeddings, and where that is too large."""
    head = head_of(name)
    for table_bytes in (head_operation.TABLE_BYTES, 0):
        monkeypatch.setattr(head_operation, "TABLE_BYTES", table_bytes)
        for prediction in (*head.config.predictions, *(["both"] if head.config.predicts == "both" else [])):
            score = scorer_of(head, prediction)
            assert isinstance(score, KernelScorer)
            for rows in (1, 3, 11):
                given = inputs(rows)
                found, expected = score(*given), float64_probability(head, *given, prediction)
                assert score.passed[torch.float32, rows > 1]
                assert found.shape == expected.shape
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
                assert rows < 11 or expected.std() > 0.02


@runs
@pytest.mark.parametrize(
    "name", ["paper", "embedding", "narrow", "both", "probe", "base and residual", "base and probe"]
)
def test_what_stands_beside_is_that_of_the_state_in_float64(name, monkeypatch):
    """As a head whose last layer is corrected online reads it: the state, scaled to length 1."""
    head = head_of(name)
    prediction = "both" if head.config.predicts == "both" else "token"
    score, states = scorer_of(head, prediction, beside=unit_state(head)), []
    assert isinstance(score, KernelScorer)
    head.output.register_forward_pre_hook(lambda _, read: states.append(read[0].double()))
    for shape in ((1,), (3,), (2, 4)):
        hidden, signals, ids = inputs(math.prod(shape))
        given = hidden.view(*shape, -1), signals.view(*shape, -1), ids.view(shape)
        plain = make_scorer(head, prediction, beside=unit_state(head))(*given)
        torch.testing.assert_close(score(*given), plain, rtol=1e-4, atol=1e-5)
        assert score.passed == dict.fromkeys(score.passed, True)
        found = score(*given).reshape(math.prod(shape), -1).double()
        predictions = 2 if prediction == "both" else 1
        expected = float64_probability(head, hidden, signals, ids, prediction).view(-1, predictions)
        torch.testing.assert_close(found[:, :predictions], expected, rtol=1e-5, atol=1e-6)
        head(hidden, signals, ids)
        unit = states[-1] / states[-1].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(found[:, predictions:], unit, rtol=1e-4, atol=1e-5)


@runs
def test_every_part_of_the_head_counts():
    head = head_of("narrow")
    score, (hidden, signals, ids) = scorer_of(head), inputs(4)
    before = score(hidden, signals, ids)
    for changed in ((hidden + 0.1, signals, ids), (hidden, signals + 0.1, ids), (hidden, signals, (ids + 1) % VOCAB)):
        assert not torch.isclose(score(*changed), before, atol=1e-5).any()


def in_bfloat16(head):
    """The head as its weights are read beside a model in half precision. Embeddings are multiplied before that."""
    head = copy.deepcopy(head)
    layers = [head.output, *(block.linear for block in head.residual_blocks())]
    for layer in [*layers, *([head.state_input] if head.config.width is not None else [])]:
        layer.weight.data = layer.weight.data.bfloat16().float()
    return head


@runs
@pytest.mark.parametrize("name", [name for name, settings in HEADS.items() if settings.get("residual", True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_in_half_precision_are_scored_with_weights_in_bfloat16(name, dtype, monkeypatch):
    """And nothing else is rounded, for one row or, by tensor cores, for more."""
    head = head_of(name)
    prediction = "both" if head.config.predicts == "both" else head.config.predictions[0]
    monkeypatch.setattr(head_operation, "DOT_BLOCK", 64)  # several of them
    for table_bytes in (head_operation.TABLE_BYTES, 0):
        monkeypatch.setattr(head_operation, "TABLE_BYTES", table_bytes)
        for rows in (1, 6, 17):
            hidden, signals, ids = inputs(rows)
            score = scorer_of(head, prediction)
            found = score(hidden.to(dtype), signals, ids)
            assert score.passed == {(torch.bfloat16, rows > 1): True}
            assert found.dtype is torch.float32 and list(score.packed) == [torch.bfloat16]
            exact = float64_probability(head, hidden.to(dtype), signals, ids, prediction)
            assert 0 < (found.double() - exact).abs().max() < 0.01
            if not head.config.reads_embedding:
                exact = float64_probability(in_bfloat16(head), hidden.to(dtype), signals, ids, prediction)
                torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@runs
def test_a_base_is_that_of_float64_where_log_odds_are_hard():
    """Tokens that are all but certain, certain, and all but impossible."""
    logprob = torch.tensor([-3e-6, -0.029, -0.031, 0.0, -87.0], device=DEVICE)
    signals = torch.stack([logprob, -3 * logprob, logprob.exp().clamp(min=0.3)], dim=-1)
    head, (hidden, _, ids) = head_of("base"), inputs(5)
    exact = float64_probability(head, hidden, signals, ids, "token")
    found = scorer_of(head)(hidden, signals, ids).double()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


@runs
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_packed_is_what_the_memory_plan_has(name, dtype, monkeypatch):
    head = head_of(name)
    for most in (head_operation.TABLE_BYTES, 0):
        monkeypatch.setattr(head_operation, "TABLE_BYTES", most)
        score = KernelScorer(head, head.config.predictions[0], make_scorer(head, head.config.predictions[0]))
        planned = bytes_to_pack(score, dtype)
        score(*(each.to(dtype) if each.is_floating_point() else each for each in inputs(2)))
        packed = score.packed[dtype]
        own = {parameter.data_ptr() for parameter in (*head.parameters(), *head.buffers())}
        own |= {head.embeddings.data_ptr()} if head.embeddings is not None else set()
        parts = [packed.state, packed.scale, packed.shift, packed.table, packed.embedding, packed.base, *packed.weights]
        made = [part for part in (*parts, packed.output) if part is not None and part.data_ptr() not in own]
        # In the dtype of the head itself, weights need no copy.
        assert sum(part.nbytes for part in made) <= planned
        assert dtype is torch.float32 or sum(part.nbytes for part in made) == planned
        assert bytes_to_pack(score, dtype) == 0


@runs
def test_many_rows_and_what_the_kernels_cannot_take_go_to_torch():
    head = head_of("narrow")
    score, many = scorer_of(head), inputs(head_operation.MOST_ROWS + 1)
    torch.testing.assert_close(score(*many), make_scorer(head)(*many))
    assert not score.packed
    assert not isinstance(scorer_of(head.double()), KernelScorer)
