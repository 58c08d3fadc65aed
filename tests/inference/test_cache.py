"""Feeding tokens piece by piece, with rows at their own pace and rollbacks, equals one full forward."""

from __future__ import annotations

import pytest
import torch

from accept_head.inference.cache import CachedModel
from tests.inference.toy import architectures

ARCHITECTURES = architectures()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cached_forwards_equal_a_full_forward_after_rollbacks(name):
    model = ARCHITECTURES[name][0]
    generator = torch.Generator().manual_seed(0)
    rows, length = 3, 20
    final = torch.randint(0, 32, (rows, length), generator=generator)
    cached = CachedModel(model, length)
    starts = torch.tensor([2, 5, 9])
    cached.prefill(final, starts)
    with torch.no_grad():
        full = model(final).logits
        for width in (3, 1, 4):
            wrong = torch.randint(0, 32, (rows, width), generator=generator)
            cached.forward(wrong, starts)  # a rejected draft: fed, then forgotten by writing over it
            index = starts[:, None] + torch.arange(width)
            output = cached.forward(final.gather(1, index), starts)
            expected = full.gather(1, index[..., None].expand(-1, -1, full.shape[-1]))
            torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
            starts = starts + width - torch.tensor([0, 1, 0])[: len(starts)] * (width > 1)


def test_a_stale_slot_would_show():
    """If the mask let a query see one slot too many, the comparison above would not hold."""
    model = ARCHITECTURES["llama"][0]
    ids = torch.randint(0, 32, (1, 10), generator=torch.Generator().manual_seed(1))
    cached = CachedModel(model, 10)
    cached.prefill(ids, torch.tensor([5]))
    with torch.no_grad():
        right = cached.forward(ids[:, 5:6], torch.tensor([5])).logits
        wrong = cached.forward(ids[:, 5:6], torch.tensor([6])).logits  # slot 5 is now seen as a token of its own
    assert not torch.allclose(right, wrong, atol=1e-3)
