"""Feeding tokens piece by piece, with each row at its own pace and with rollbacks, equals one full forward."""

from __future__ import annotations

import pytest
import torch

from accept_head.inference.engine import cache
from accept_head.inference.engine.cache import CachedModel
from tests.inference.support.cached import LENGTH, MODELS, assert_close, at, random_ids


@pytest.mark.parametrize("name", MODELS)
def test_cached_forwards_equal_a_full_forward_after_rollbacks(name):
    model, ids = MODELS[name], random_ids(3, LENGTH)
    cached = CachedModel(model, 3, LENGTH)
    starts = torch.tensor([2, 5, 9])
    cached.fill(ids, [0, 1, 2], [0, 0, 0], starts.tolist())
    with torch.no_grad():
        full = model(ids).logits
        for seed, width in enumerate((3, 1, 4), start=1):
            longest = int(starts.max())
            cached.forward(random_ids(3, width, seed), starts, longest)  # a rejected draft: fed, then written over
            logits = cached.forward(at(ids, starts, width), starts, longest).logits
            assert_close(logits, at(full, starts, width))
            starts = starts + width - torch.tensor([0, 1, 0]) * (width > 1)


@pytest.mark.parametrize("name", MODELS)
def test_filling_in_pieces_and_some_rows_only_equals_a_full_forward(name, monkeypatch):
    """Six tokens a forward: longer prompts take several, and the longest row goes first. Row 1 is not filled at all."""
    monkeypatch.setattr(cache, "FILL_TOKENS", 6)
    model, ids = MODELS[name], random_ids(4, LENGTH)
    cached = CachedModel(model, 4, LENGTH, with_hidden=True)
    ends = torch.tensor([13, 1, 4, 17])
    cached.fill(ids, [0, 2, 3], [0, 0, 0], [7, 4, 9])
    cached.fill(ids, [3, 0], [9, 7], [17, 13])
    with torch.no_grad():
        full = model(ids, output_hidden_states=True)
        output = cached.forward(at(ids, ends, 2), ends, 17)
    kept = torch.tensor([0, 2, 3])
    assert_close(output.logits[kept], at(full.logits, ends, 2)[kept])
    assert_close(output.hidden[kept], at(full.hidden_states[-1], ends, 2)[kept])


def test_selected_rows_keep_their_own_past_and_restored_ones_have_room():
    model, ids = MODELS["llama"], random_ids(3, LENGTH)
    cached = CachedModel(model, 3, LENGTH)
    cached.fill(ids, [0, 1, 2], [0, 0, 0], [4, 9, 6])
    whole = cached.bytes
    cached.select(torch.tensor([2, 0]))
    assert cached.bytes * 3 == whole * 2
    starts, kept = torch.tensor([6, 4]), ids[[2, 0]]
    with torch.no_grad():
        full = model(ids).logits
        assert_close(cached.forward(at(kept, starts, 3), starts, 6).logits, at(full[[2, 0]], starts, 3))
        cached.restore(3)
        cached.fill(ids, [0, 1, 2], [0, 0, 0], [4, 9, 6])
        starts = torch.tensor([4, 9, 6])
        assert_close(cached.forward(at(ids, starts, 3), starts, 9).logits, at(full, starts, 3))
    assert cached.bytes == whole


def test_tokens_beyond_the_longest_row_are_harmless():
    """A round near the end of the context is as wide as any: what does not fit is written where nobody looks."""
    model, ids = MODELS["llama"], random_ids(2, LENGTH)
    cached = CachedModel(model, 2, LENGTH)
    cached.fill(ids, [0, 1], [0, 0], [LENGTH - 2, 5])
    starts = torch.tensor([LENGTH - 2, 5])
    with torch.no_grad():
        full = model(ids).logits
        padded = torch.nn.functional.pad(ids, (0, 4))
        output = cached.forward(at(padded, starts, 5), starts, LENGTH - 2).logits
        assert_close(output[0, :2], full[0, -2:])
        assert_close(output[1], full[1, 5:10])
        later = torch.tensor([LENGTH - 1, 10])
        assert_close(cached.forward(at(ids, later, 1), later, LENGTH - 1).logits, at(full, later, 1))


def test_a_stale_slot_would_show():
    """If the mask let a query see one slot too many, the comparisons above would not hold."""
    model, ids = MODELS["llama"], random_ids(1, 10, seed=1)
    cached = CachedModel(model, 1, 10)
    cached.fill(ids, [0], [0], [5])
    with torch.no_grad():
        right = cached.forward(ids[:, 5:6], torch.tensor([5]), 5).logits
        wrong = cached.forward(ids[:, 5:6], torch.tensor([6]), 6).logits  # slot 5 is now seen as a token of its own
    assert not torch.allclose(right, wrong, atol=1e-2)
