"""Heads that share keys are attended to together, with transformers' results and without copies of the keys."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from accept_head.inference.engine.attention.grouped import FEW, grouped_attention
from accept_head.inference.engine.cache import CachedModel
from tests.inference.support.cached import LENGTH, assert_close, random_ids
from tests.inference.support.toy import GROUPED, tiny


class Layer(torch.nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("new", [1, 3, FEW, FEW + 1])
@pytest.mark.parametrize("shared", [1, 2, 6])
def test_it_is_transformers_attention(new, shared):
    torch.manual_seed(0)
    query = torch.randn(3, 6, new, 8)
    key, value = torch.randn(2, 3, shared, 40, 8)
    mask = torch.rand(3, 1, new, 40) < 0.5
    mask[..., 0] = True
    found, _ = grouped_attention(Layer(6 // shared), query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(Layer(6 // shared), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_cached_model_copies_no_keys_and_makes_one_mask(monkeypatch):
    """Of each forward: the second has another."""
    model = tiny(LlamaForCausalLM, LlamaConfig, layers=2, **GROUPED)
    heads, masks = [], []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        heads.append(key.shape[1])
        masks.append(options["attn_mask"])
        return plain(query, key, value, **options)

    ids = random_ids(2, LENGTH)
    cached = CachedModel(model, 2, LENGTH)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    starts = torch.zeros(2, dtype=torch.long)
    logits = [cached.forward(ids[:, start:end], starts + start, start).logits for start, end in ((0, 5), (5, LENGTH))]
    assert heads == 4 * [model.config.num_key_value_heads] != 4 * [model.config.num_attention_heads]
    assert masks[0] is masks[1] and masks[2] is masks[3] and masks[0] is not masks[2]
    assert_close(torch.cat(logits, dim=1), model(ids).logits)
    assert model.config._attn_implementation == "sdpa"  # outside of it the model keeps its own
