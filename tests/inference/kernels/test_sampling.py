"""Top-k, softmax and draws by kernels, against float64 and against torch, on a GPU or in Triton's interpreter.

`make test-vllm` runs it in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accept_head import Sampling, sampling
from accept_head.inference.kernels import sampling as operations
from tests.inference.support.changed_kernels import use_kernels
from tests.inference.support.kernels import DEVICE, INTERPRETED, runs
from tests.inference.support.memory_check import OutOfBounds

pytestmark = pytest.mark.usefixtures("anywhere")

LAST = 1 - 2.0**-53


def logits_of(kind, vocab, rows=2):
    """`normal`; `coarse`: many are equal; `steep`: hundreds of neighbours above all others; `masked`: few are left."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if kind == "coarse":
        logits = logits.round()
    if kind == "steep":
        logits[:, vocab // 3 : vocab // 3 + 1500] += 40
    if kind == "masked":
        logits = logits.masked_fill(torch.rand(rows, vocab, generator=generator) < 1 - 30 / vocab, -torch.inf)
        logits[:, vocab // 2] = 1.0
    return logits.to(DEVICE)


def expected_of(logits, temperature, top_k):
    """float64 softmax of what is not below the k-th largest."""
    x = logits.cpu().double().numpy()
    kth = np.sort(x, -1)[:, -min(top_k or x.shape[1], x.shape[1]), None]
    share = np.where(x >= kth, np.exp((x - x.max(-1, keepdims=True)) / np.float32(temperature)), 0.0)
    return share / share.sum(-1, keepdims=True)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 40, 3000, 20_011])
@pytest.mark.parametrize("kind", ["normal", "coarse", "steep", "masked"])
def test_probabilities_are_those_of_float64(kind, vocab, dtype):
    logits = logits_of(kind, vocab).to(dtype)
    for temperature, top_k in ((1.0, 50), (0.6, 1), (1.7, 64), (0.8, 0)):
        found = (
            operations.probabilities_by_kernels(logits, Sampling(temperature=temperature, top_k=top_k)).cpu().numpy()
        )
        expected = expected_of(logits, temperature, top_k)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)
        if top_k:
            assert ((found > 0) == (expected > 1e-40)).all() and (found > 0).sum(-1).min() >= min(
                top_k, vocab if kind != "masked" else 1
            )


WEIGHTS = {
    "softmax": lambda vocab: logits_of("normal", vocab, 64).softmax(-1),
    "sparse": lambda vocab: logits_of("masked", vocab, 64).softmax(-1),
    "not normalised": lambda vocab: logits_of("normal", vocab, 64).relu(),
    "one": lambda vocab: torch.nn.functional.one_hot(torch.arange(64) % vocab, vocab).float().to(DEVICE),
}


@runs
@pytest.mark.parametrize("vocab", [1, 2500, 9001])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_draws_are_those_of_torch(kind, vocab):
    weights = WEIGHTS[kind](vocab)
    if vocab == 1:
        weights = weights + 0.5
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(64, generator=generator, dtype=torch.float64).to(DEVICE)
    numbers[:4] = torch.tensor([0.0, LAST, 2.0**-53, 0.5])
    for count in (1, 3, 64):  # with parts of both sizes
        found = operations.draw_by_kernel(weights[:count], numbers[:count])
        assert torch.equal(found, sampling.draw(weights[:count], numbers[:count]))
        assert (weights[:count].gather(1, found[:, None]) > 0).all()


@runs
def test_shapes_and_what_the_kernels_do_not_serve():
    scores = logits_of("normal", 300, 6).view(2, 3, 300)
    plain = Sampling(temperature=0.9, top_k=20)
    q = operations.probabilities(scores, plain)
    assert q.shape == scores.shape
    torch.testing.assert_close(q, plain.probabilities(scores), rtol=1e-4, atol=1e-7)
    numbers = torch.rand(4, 2, 3, dtype=torch.float64, device=DEVICE)[1]
    assert torch.equal(operations.draw(q, numbers), sampling.draw(q, numbers))
    assert torch.equal(operations.draw(q[:, 1], numbers[:, 1]), sampling.draw(q[:, 1], numbers[:, 1]))
    for other in (Sampling(temperature=0), Sampling(top_p=0.8), Sampling(min_p=0.1), Sampling(top_k=65)):
        assert torch.equal(operations.probabilities(scores, other), other.probabilities(scores))
    assert operations.probabilities(scores[:, :0], plain).shape == (2, 0, 300)


FOUND = 'begin = tl.atomic_add(counts + row * 2, count, sem="relaxed")'
SHARE = "share = tl.exp((x - tl.load(top + row)) * cold)"
CHOSEN = "tl.where((up_to > threshold) & (sum_of > 0), at, SPLITS)"
WRONG = {
    "one too many": ("tl.arange(0, SIZE) == k - 1", "tl.arange(0, SIZE) == k"),
    "ties of the bound are forgotten": ("(found < k) & (least > LEAST)", "(found < 0)"),
    "ties of the bound are always added": ("if (found < k) & (least > LEAST):", "if least > LEAST:"),
    "candidates of one program alone": (FOUND, FOUND.replace("begin = ", "") + "\n        begin = 0"),
    "negative numbers in the wrong order": ("x = x ^ ((x >> 31) & 0x7FFFFFFF)", "x = x"),
    "the temperature is forgotten": (SHARE, SHARE.replace(" * cold", "")),
    "all are kept": ("share = tl.where(x >= tl.load(kth + row), share, 0.0)", "share = share"),
    "a draw one part too far": (CHOSEN, CHOSEN.replace("at,", "at + 1,")),
    "a draw by its part alone": ("before + tl.cumsum(weight, 0) > threshold", "tl.cumsum(weight, 0) > threshold"),
    "counts are left": ("tl.store(counts + row * 2, 0)", "tl.store(counts + row * 2, 1)"),
}  # fmt: skip


@runs
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_anything_else_is_seen(wrong, monkeypatch, tmp_path):
    use_kernels(monkeypatch, tmp_path, "sampling", WRONG.get(wrong))
    if wrong is None:
        operations.compare(DEVICE)
    else:  # or it goes so far astray that it touches what is not its own
        with pytest.raises(Exception, match=r"(?i)not close|not equal|mismatch|beside the tensors"):
            operations.compare(DEVICE)


@runs
@pytest.mark.skipif(not INTERPRETED, reason="a GPU has compute-sanitizer for that")
def test_memory_of_others_is_not_touched(monkeypatch, tmp_path):
    """All tests here would show it."""
    masked = "tl.load(begin + token, mask=token < vocab, other=0.0).to(tl.float64)\n    tl.store"
    change = masked, masked.replace(", mask=token < vocab, other=0.0", "")
    use_kernels(monkeypatch, tmp_path, "sampling", change)
    weights = torch.rand(1, 700)
    with pytest.raises(Exception, match="beside the tensors") as raised:
        operations.draw_by_kernel(weights, torch.rand(1, dtype=torch.float64))
    assert isinstance(raised.value, OutOfBounds) or isinstance(raised.value.__cause__, OutOfBounds)
