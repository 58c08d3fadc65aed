"""The loop's bookkeeping in kernels equals that in torch to the bit, on a GPU or in Triton's interpreter.

`make test-vllm` runs it in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest

from accept_head.inference.kernels import rows as bookkeeping
from tests.inference.support.changed_kernels import use_kernels
from tests.inference.support.kernels import DEVICE, runs

pytestmark = pytest.mark.usefixtures("anywhere")


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
