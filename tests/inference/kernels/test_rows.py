"""The loop's bookkeeping in kernels equals that in torch to the bit, on a GPU or in Triton's interpreter.

`make test-vllm` runs it in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext

import pytest
import torch

from accept_head import Sampling
from accept_head.inference import generate, make_policy
from accept_head.inference.kernels import rows as bookkeeping
from accept_head.inference.kernels import usable as door
from tests.inference.support.changed_kernels import use_kernels
from tests.inference.support.memory_check import checked_memory
from tests.inference.support.toy import toy_pair

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)

runs = pytest.mark.skipif(
    not TRITON or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1; `make test-vllm` has the latter",
)


@pytest.fixture(autouse=True)
def own_memory():
    with checked_memory() if INTERPRETED and TRITON else nullcontext():
        yield


@runs
def test_they_do_what_torch_does():
    bookkeeping.compare(DEVICE, batch=37, slots=9, tries=12)
    bookkeeping.compare(DEVICE, batch=1, slots=2)


WRONG = {
    "a shift that keeps the sign": ("(state >> 11)", "(state.to(tl.int64, bitcast=True) >> 11)"),
    "purposes for slots": ("purpose, slot = place // slots", "slot, purpose = place // slots"),
    "rows begin too early": ("tl.maximum(tl.load(lengths + row) - back, 0)", "tl.load(lengths + row) - back"),
    "an end token does not end": ("going & (is_end == 0) &", "going &"),
    "no budget": (" & (count < tl.load(budget + row))", ""),
    "rows that stopped count on": ("tl.load(drawn + row) + going.to(tl.int64)", "tl.load(drawn + row) + 1"),
    "one place further": ("+ depth - 1, columns - 1)", "+ depth, columns - 1)"),
    "the new token is not looked at": ("token = tl.where(place == next_place, next_id, token)", "token = token"),
    "idle rows emit": ("emitted = (passed + 1) * one", "emitted = passed + 1"),
    "what stands behind is looked at": ("& (slot < emitted) & (slot < width)", "& (slot < width)"),
    "the last end token": ("tl.min(tl.where(is_end, slot, WIDTH), 0)", "tl.max(tl.where(is_end, slot, 0), 0)"),
    "idle rows keep": ("keeps = tl.minimum(passed, emitted) * one", "keeps = tl.minimum(passed, emitted + 1)"),
    "the draft was fed all": ("length + tl.minimum(passed, own - 1)", "length + passed"),
    "nothing in vain": ("own + extra", "own"),
    "longer than it may be": (" & (now < tl.load(max_lengths + row))", ""),
}  # fmt: skip


@runs
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_anything_else_is_seen(wrong, monkeypatch, tmp_path):
    use_kernels(monkeypatch, tmp_path, "rows", WRONG.get(wrong))
    if wrong is None:
        bookkeeping.compare(DEVICE)
    else:
        with pytest.raises(AssertionError):
            bookkeeping.compare(DEVICE)


@runs
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.0, top_k=3)], ids=["T=0", "T=1"])
def test_decoding_is_the_same_with_them(sampling, monkeypatch):
    pair, used = toy_pair(), []
    for model in (pair.target, pair.draft):
        model.to(DEVICE)
    accept = bookkeeping.accept_by_kernel
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(door, "ON_ANY_DEVICE", kernels)
        if not kernels:
            monkeypatch.setattr(door, "_enabled", lambda: False)
        else:
            monkeypatch.undo()
            monkeypatch.setattr(bookkeeping, "accept_by_kernel", lambda *given: used.append(1) or accept(*given))
            monkeypatch.setattr(door, "ON_ANY_DEVICE", True)
        policy = make_policy("max-prob:0.6,k_max=4", pair.draft)
        options = {"max_new_tokens": 9, "sampling": sampling, "end_token_ids": [2], "batch_size": 2, "seed": 5}
        results.append(generate(pair.target, pair.draft, [[1], [2, 3, 4], [0, 1]], policy=policy, **options))
        assert bool(used) is kernels
    assert results[0].tokens == results[1].tokens
    for one, other in zip(results[0].stats, results[1].stats, strict=True):
        assert (one.drafted, one.accepted, one.rounds) == (other.drafted, other.accepted, other.rounds)


@runs
def test_kernels_that_fail_where_they_are_tried_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(door, "ON_ANY_DEVICE", True)

    def fails(*_):
        raise RuntimeError("no kernel image")

    def says_another_length(*given):
        accepted = bookkeeping.accept_by_kernel(*given)
        return accepted._replace(lengths=accepted.lengths + 1)

    for broken in (fails, says_another_length):
        monkeypatch.setattr(door, "_passed", {})
        with monkeypatch.context() as patch:
            patch.setattr(bookkeeping, "BY_KERNEL", (*bookkeeping.BY_KERNEL[:-1], broken))
            assert not door.usable(torch.zeros(1, device=DEVICE), bookkeeping.CHECK)
        assert "no kernels for the loop" in caplog.text
        caplog.clear()
    monkeypatch.setattr(door, "_passed", {})
    assert door.usable(torch.zeros(1, device=DEVICE), bookkeeping.CHECK)


def test_without_triton_nothing_changes(monkeypatch):
    monkeypatch.setattr(door, "_enabled", lambda: False)
    assert not door.usable(torch.zeros(1), bookkeeping.CHECK)
