"""An EAGLE-3 drafter's files: what is read in which layout, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaAttention

from accept_head import load_pair
from accept_head.cli import main
from accept_head.eagle3.saved import load_eagle3, save_eagle3
from accept_head.errors import InputError
from accept_head.fit.plan import measured_speed
from accept_head.inference.engine.cache import CachedModel, Group
from tests.examples import make_eagle3


@pytest.fixture(scope="module")
def target(random_llama):
    return random_llama(1, layers=4)


@pytest.fixture
def saved(target, tmp_path):
    drafter = make_eagle3(target)
    save_eagle3(drafter, tmp_path / "drafter")
    return drafter, tmp_path / "drafter"


def outputs(drafter):
    ids, states = torch.tensor([[5, 6, 7]]), torch.arange(96.0).sin().view(1, 3, 32)
    return drafter(ids, states, torch.arange(3)[None])


def test_what_is_saved_is_loaded_and_shares_the_targets_embeddings(saved, target):
    drafter, folder = saved
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    loaded = load_eagle3(folder, target)
    assert all(torch.equal(*pair) for pair in zip(outputs(drafter), outputs(loaded), strict=True))
    assert loaded.layers_read == (1, 2, 3) and torch.equal(loaded.t2d, drafter.t2d)


def test_its_logits_are_of_its_own_tokens_and_are_spread_over_the_targets(saved):
    drafter, _ = saved
    logits = outputs(drafter).logits
    assert logits.shape == (1, 3, 120)
    spread = drafter.spread(logits, -1.0)
    assert spread.shape == (1, 3, 261)
    ids = drafter.t2d.nonzero()[:, 0]  # ascending
    assert torch.equal(ids, drafter.drafted_ids)
    for place, id in enumerate(ids.tolist()):
        assert torch.equal(spread[..., id], logits[..., place])
    assert len(ids) == 120 and (spread[..., ~drafter.t2d] == -1).all()


def test_its_attention_is_transformers_own(saved):
    drafter, _ = saved
    module = drafter.model.midlayer.self_attn
    inputs = torch.arange(2 * 5 * 64.0).sin().view(2, 5, 64)
    rotation = drafter.model.rotary_emb(inputs, torch.arange(5)[None])
    expected, _ = LlamaAttention.forward(module, inputs, position_embeddings=rotation)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(module.attend(inputs, rotation, *module.fill(inputs, rotation, None), seen), expected)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_what_it_predicts_from_one_slot_is_what_it_predicts_from_all(saved, norm_before_residual):
    drafter, _ = saved
    drafter.model.midlayer.norm_before_residual = norm_before_residual
    ids, states = torch.tensor([[5, 6, 7, 8], [9, 4, 3, 2]]), torch.arange(256.0).sin().view(2, 4, 32)
    last, positions = torch.tensor([1, 3]), torch.arange(4).expand(2, 4)
    plain = drafter(ids, states, positions)
    seen = (positions <= last[:, None])[:, None, None]
    alone = drafter(ids, states, positions, seen, last=last)
    for found, expected in zip(alone, plain, strict=True):
        torch.testing.assert_close(found[:, 0], expected[[0, 1], last])
    other = drafter(ids, states, positions, seen, last=last - 1)
    assert (other.logits - alone.logits).abs().max() > 0.1


def test_tokens_that_only_fill_the_cache_take_keys_and_values_alone(saved, monkeypatch):
    drafter, _ = saved
    cached = CachedModel(drafter, 2, 8)
    for module in (drafter.lm_head, drafter.model.midlayer.mlp, drafter.model.midlayer.self_attn.q_proj):
        monkeypatch.setattr(module, "forward", lambda *_: pytest.fail("more than keys and values"))
    group = Group(torch.tensor([[1, 0, 3]]), 3, 0)
    cached.fill_drafter(torch.tensor([[5, 6, 7], [9, 4, 3]]), group, torch.arange(96.0).sin().view(1, 3, 32))
    keys, values = cached.layers[0].keys, cached.layers[0].values
    for tensor in (keys, values):
        assert tensor[1, :, :3].abs().amin() > 0 and not tensor[0].any() and not tensor[1, :, 3:].any()


def test_the_layout_of_speculators_is_read(saved, target):
    drafter, folder = saved
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    values = json.loads((folder / "config.json").read_text())
    layer = {name: value for name, value in values.items() if name not in ("draft_vocab_size", "eagle_config")}
    theirs = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 120,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "speculators_config": {"verifier": {"name_or_path": "some/target"}},
    }
    (folder / "config.json").write_text(json.dumps(theirs))
    loaded = load_eagle3(folder, target)
    assert all(torch.equal(*pair) for pair in zip(outputs(drafter), outputs(loaded), strict=True))


def test_layers_that_are_not_named_are_vllms_default(saved, random_llama):
    _, folder = saved
    values = json.loads((folder / "config.json").read_text())
    del values["eagle_config"], values["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(values))
    assert load_eagle3(folder, random_llama(1, layers=8)).layers_read == (2, 4, 5)


def test_layers_may_be_named_in_eagle_config_alone(saved, target):
    _, folder = saved
    values = json.loads((folder / "config.json").read_text())
    assert values.pop("eagle_aux_hidden_state_layer_ids") == [1, 2, 3]
    (folder / "config.json").write_text(json.dumps(values))
    assert load_eagle3(folder, target).layers_read == (1, 2, 3)


FIELDS = [
    ({"norm_before_fc": True}, "norm_before_fc"),
    ({"norm_output": True}, "norm_output"),
    ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ({"model_type": "qwen3"}, "model_type"),
    ({"vocab_size": 300}, "vocab_size"),
    ({"target_hidden_size": 64}, "target_hidden_size"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "eagle_aux_hidden_state_layer_ids"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 2]}, "ascending"),
]


@pytest.mark.parametrize(("change", "named"), FIELDS)
def test_a_config_that_does_not_suit_is_refused_by_field(saved, target, change, named):
    _, folder = saved
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(InputError, match=named):
        load_eagle3(folder, target)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "'fc.weight' is missing"),
        (lambda tensors: tensors.pop("d2t"), "'d2t' is missing"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "'more' is unknown"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64)}), "shape"),
        (lambda tensors: tensors.update(d2t=torch.full((120,), 200)), "d2t"),
    ],
)
def test_a_tensor_that_does_not_suit_is_refused_by_name(saved, target, change, named):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=named):
        load_eagle3(folder, target)


# --- as --draft ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(saved, random_pair_folder):
    """(target folder, drafter folder): the random pair's target, which has two layers."""
    _, folder = saved
    loaded = load_pair(random_pair_folder / "target", random_pair_folder / "draft", device="cpu").target
    save_eagle3(make_eagle3(loaded, layers=(0, 1)), folder)
    return random_pair_folder / "target", folder


def test_a_pair_can_have_such_a_drafter(pair):
    loaded = load_pair(*pair, device="cpu")
    assert loaded.vocab_size == 261 and loaded.draft.layers_read == (0, 1)


def test_generate_decodes_with_it(pair, random_pair_folder, tmp_path):
    texts = []
    for policy in ("none", "fixed:3"):
        out = tmp_path / f"{policy[0]}.jsonl"
        words = ("--target", pair[0], "--draft", pair[1], "--prompts", random_pair_folder / "prompts" / "train.jsonl")
        assert main([*map(str, ("generate", *words, "--out", out, "--policy", policy, "--max_new_tokens", 8))]) == 0
        texts.append([json.loads(line)["token_ids"] for line in out.read_text().splitlines()])
    assert texts[0] == texts[1]


def test_a_drafter_is_no_target(pair, tmp_path, capsys):
    words = ("--target", pair[1], "--draft", pair[1], "--policy", "fixed:3", "--out", tmp_path / "out.yaml")
    assert main([*map(str, ("vllm-config", *words))]) == 2
    assert "is an EAGLE-3 drafter, expected a model" in capsys.readouterr().err


def test_a_fit_times_its_forwards(pair):
    """Without a target's states at hand."""
    speed = measured_speed(load_pair(*pair, device="cpu"), tokens=32)
    assert min(vars(speed).values()) > 0
