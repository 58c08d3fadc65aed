"""Forwards and rounds without padding give what padded ones give, and feed no token that nobody asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accept_head import Sampling
from accept_head.inference import generate
from accept_head.inference.engine import cache, packing, proof
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.engine.packing import Packing
from accept_head.inference.policies.head import HeadPolicy
from tests.inference.support.cached import LENGTH, MODELS, assert_close, at, random_ids
from tests.inference.support.toy import GROUPED, architectures, ragged_prompts, random_head, tiny

STARTS = torch.tensor([2, 5, 9])
SOME = torch.tensor([[True, True, False, False], [True, True, True, True], [False, False, False, False]])
PACKED = [name for name, model in MODELS.items() if packing.packs(model)]
SAMPLED, GREEDY = Sampling(temperature=1.0, top_k=0), Sampling(temperature=0)


@pytest.fixture(autouse=True)
def packed_if_anything_is_saved(monkeypatch):
    monkeypatch.setattr(packing, "PACKED", replace(packing.PACKED, block=1))


def test_which_models_are_packed():
    """Models whose attention is their own code are padded."""
    assert set(MODELS) - set(PACKED) == {name for name, m in MODELS.items() if m.config._attn_implementation != "sdpa"}
    assert len(PACKED) >= 5


@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_forwards_equal_a_full_forward_after_rollbacks(name):
    model, ids = MODELS[name], random_ids(3, LENGTH)
    cached = CachedModel(model, 3, LENGTH, with_hidden=True)
    cached.fill(ids, [0, 1, 2], [0, 0, 0], STARTS.tolist())
    full = model(ids, output_hidden_states=True)
    cached.forward(random_ids(3, 4, 1), STARTS, 9, wanted=SOME)  # a rejected draft: fed, then written over
    packed = cached.forward(at(ids, STARTS, 4), STARTS, 9, wanted=SOME)
    assert_close(packed.logits[SOME], at(full.logits, STARTS, 4)[SOME])
    assert_close(packed.hidden[SOME], at(full.hidden_states[-1], STARTS, 4)[SOME])
    # Keys and values lie in their own rows: the next forward, padded, reads them.
    starts = STARTS + SOME.sum(1)
    assert_close(cached.forward(at(ids, starts, 2), starts, 9).logits, at(full.logits, starts, 2))


@torch.no_grad()
def test_tokens_in_the_wrong_row_would_show(monkeypatch):
    """Queries that are put beside another row's keys give other logits."""
    model, ids = MODELS["llama"], random_ids(3, LENGTH)
    cached = CachedModel(model, 3, LENGTH)
    cached.fill(ids, [0, 1, 2], [0, 0, 0], STARTS.tolist())
    right = cached.forward(at(ids, STARTS, 4), STARTS, 9, wanted=SOME).logits
    monkeypatch.setattr(Packing, "pad", lambda self, t: turned(self, t))
    wrong = cached.forward(at(ids, STARTS, 4), STARTS, 9, wanted=SOME).logits.roll(-1, 0)
    assert (right - wrong)[SOME].abs().max() > 0.1


def turned(packing, packed):
    rows = packed[0].index_select(0, packing.place).unflatten(0, (packing.rows, packing.width))
    return rows.roll(1, 0)


def test_a_forward_is_packed_when_that_saves_a_block_of_tokens(monkeypatch):
    monkeypatch.undo()
    wanted = torch.zeros(8, 4, dtype=torch.bool)
    for tokens, packed in ((0, False), (1, True), (16, True), (17, False), (32, False)):
        wanted.view(-1)[torch.randperm(32)[:tokens]] = True
        assert packing.pays(wanted) is packed, tokens
        wanted[:] = False
    wanted[5:] = True
    wanted[6] = False
    assert Packing.of(wanted).taken.tolist() == [*range(20, 24), *range(28, 32)]
    assert not packing.pays(wanted[4:])  # 16 places: one block in any case


class Fed(Counter):
    """Tokens that a model is fed in forwards of several rows' rounds, prompts apart."""

    def __init__(self, monkeypatch, **models):
        super().__init__()
        run = cache.CachedModel.forward

        def forward(cached, *arguments, **options):
            name = next(name for name, model in models.items() if model is cached.model)
            embedding = cached.model.get_input_embeddings()
            hook = embedding.register_forward_pre_hook(lambda module, inputs: self.update({name: inputs[0].numel()}))
            try:
                return run(cached, *arguments, **options)
            finally:
                hook.remove()

        monkeypatch.setattr(cache.CachedModel, "forward", forward)


def decode(models, sampling, policy, **options):
    options = {"batch_size": 4, "max_new_tokens": 24, "end_token_ids": [], **options}
    result = generate(*models, ragged_prompts(9), policy=policy, sampling=sampling, **options)
    return result.tokens, [replace(stats, seconds=0.0) for stats in result.stats]


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", architectures())
def test_packed_rounds_emit_the_tokens_of_padded_ones(name, sampling, monkeypatch):
    models = architectures()[name]
    for model in models:
        proof.check_served(model)
    policy = "confidence:0.1,k_max=6"
    fed = Fed(monkeypatch, target=models[0], draft=models[1])
    packed, packed_fed = decode(models, sampling, policy), dict(fed)
    fed.clear()
    monkeypatch.setattr(cache, "packs", lambda model: False)
    assert packed == decode(models, sampling, policy)
    needed = sum(row.submitted + row.rounds for row in packed[1])
    if packing.packs(models[0]):
        assert packed_fed["target"] == needed < fed["target"]
        assert packed_fed["draft"] < fed["draft"]
    else:
        assert packed_fed == dict(fed)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_head_that_reads_the_drawn_token_decodes_packed_as_padded(sampling, monkeypatch):
    """Its draft is fed a token ahead, and rows stop after it was fed."""
    models = architectures()["llama"]
    policy = HeadPolicy(random_head(models[1].config.hidden_size, reads="drawn", signals=True), 0.6, k_max=6, lag=0)
    packed = decode(models, sampling, policy)
    monkeypatch.setattr(cache, "packs", lambda model: False)
    assert packed == decode(models, sampling, policy)


def test_a_model_that_is_wrong_when_packed_is_padded(monkeypatch, caplog):
    """The test before the first use finds out, and says so."""
    model = tiny(LlamaForCausalLM, LlamaConfig, layers=2, **GROUPED)
    monkeypatch.setattr(Packing, "pad", lambda self, t: turned(self, t))
    proof.check_served(model)
    assert "gives other logits without padding: it is padded" in caplog.text
    assert not CachedModel(model, 2, 8).packs
