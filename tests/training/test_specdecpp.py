"""The research code's files, built here by their format: what is read from them, and what is refused.

The format (Kaffaljidhmah2/SpecDec_pp): a head is [ResBlock] * num_layers, one block many times, then Linear(hidden, 2),
under the name `model`; class 1 is accepted. Data are a JSON list of records whose lists are strings.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from accept_head import AcceptanceHead, InputError
from accept_head.inference.policies.head import HeadPolicy
from accept_head.inference.policy import DraftStep
from accept_head.training.specdecpp.checkpoint import CONVERT, read_checkpoint, save_imported
from accept_head.training.specdecpp.records import read_records

HIDDEN = 12


def their_tensors(layers, *, shared=True, seed=0, hidden=HIDDEN):
    """Names and shapes as they are stored; multiples of 1/1024, so that differences are exact in float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(-900, 900, shape, generator=generator) / 1024

    stored = range(1 if shared else layers) if layers else range(0)
    tensors = {f"model.{i}.linear.weight": draw(hidden, hidden) for i in stored}
    tensors |= {f"model.{i}.linear.bias": draw(hidden) for i in stored}
    return {**tensors, f"model.{layers}.weight": draw(2, hidden), f"model.{layers}.bias": draw(2)}


def their_probability(tensors, layers, states, *, accepted=1):
    """softmax of their two outputs, float64. states: (n, hidden)."""
    array = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    x = states.astype(np.float64)
    for i in range(layers):
        block = i if f"model.{i}.linear.weight" in array else 0
        z = x @ array[f"model.{block}.linear.weight"].T + array[f"model.{block}.linear.bias"]
        x = x + z / (1 + np.exp(-z))
    logits = x @ array[f"model.{layers}.weight"].T + array[f"model.{layers}.bias"]
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return (odds / odds.sum(-1, keepdims=True))[:, accepted]


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(tensors, num_layers) → a folder as their training leaves it."""

    def write(tensors, layers, hidden=HIDDEN, **changes):
        folder = tmp_path / "checkpoint"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"hidden_size": hidden, "num_layers": layers, **changes}))
        return folder

    return write


def states(rows=40, seed=1, hidden=HIDDEN):
    return np.random.default_rng(seed).normal(size=(rows, hidden))


@pytest.mark.parametrize("layers", range(5))
@pytest.mark.parametrize("shared", [True, False])
def test_an_imported_head_has_their_probabilities(checkpoint, layers, shared):
    tensors = their_tensors(layers, shared=shared)
    head = read_checkpoint(checkpoint(tensors, layers))
    assert (head.config.depth, head.config.predicts, head.config.reads) == (layers, "token", "drawn")
    mine = head.double().probability(torch.from_numpy(states())).detach().numpy()
    np.testing.assert_allclose(mine, their_probability(tensors, layers, states()), rtol=1e-12)
    # The other class, or a block used once only, would be told apart.
    assert np.abs(mine - their_probability(tensors, layers, states(), accepted=0)).max() > 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


class Theirs(nn.Module):
    """A module of that layout, for what the real libraries write of it."""

    def __init__(self, layers):
        super().__init__()
        self.model = nn.Sequential(*[Block()] * layers, nn.Linear(HIDDEN, 2))


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_what_safetensors_writes_of_a_module_with_a_shared_block_is_read(tmp_path, layers):
    torch.manual_seed(0)
    module = Theirs(layers)
    save_model(module, tmp_path / "model.safetensors")
    assert len(load_file(tmp_path / "model.safetensors")) == (4 if layers else 2), "the block must be stored once"
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_layers": layers}))
    mine = read_checkpoint(tmp_path).probability(torch.from_numpy(states()).float())
    theirs = module.model(torch.from_numpy(states()).float()).softmax(-1)[:, 1]
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def test_the_block_may_be_stored_under_any_of_its_places(checkpoint):
    tensors = their_tensors(3)
    moved = {name.replace("model.0.", "model.2."): tensor for name, tensor in tensors.items()}
    mine = read_checkpoint(checkpoint(moved, 3)).double().probability(torch.from_numpy(states()))
    np.testing.assert_allclose(mine.detach().numpy(), their_probability(tensors, 3, states()), rtol=1e-12)


def test_their_config_without_layers_is_a_linear_probe(checkpoint):
    folder = checkpoint(their_tensors(0), 0)
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN}))
    assert read_checkpoint(folder).config.depth == 0


def test_the_folder_that_is_written_is_a_head(checkpoint, tmp_path):
    folder = checkpoint(their_tensors(2), 2)
    head = read_checkpoint(folder)
    save_imported(head, tmp_path / "head", folder)
    assert {path.name for path in (tmp_path / "head").iterdir()} == {
        "README.md", "config.json", "model.safetensors", "training_config.json"
    }  # fmt: skip
    again = AcceptanceHead.from_pretrained(tmp_path / "head")
    assert again.config == head.config
    x = torch.from_numpy(states()).float()
    assert torch.equal(again.probability(x), head.probability(x))
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="mine"):
        save_imported(head, tmp_path / "mine", folder)


# --- what is refused -------------------------------------------------------------------------------------------------


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


SPOILED = {
    "a missing output": (lambda t: without(t, "model.2.weight"), {}, "model.2.weight"),
    "a missing bias": (lambda t: without(t, "model.0.linear.bias"), {}, "model.0.linear.bias"),
    "no block": (lambda t: {n: x for n, x in t.items() if "linear" not in n}, {}, "model.0.linear"),
    "a foreign tensor": (lambda t: {**t, "lm_head.weight": torch.zeros(2)}, {}, "lm_head.weight"),
    "one output": (lambda t: {**t, "model.2.weight": torch.zeros(1, HIDDEN)}, {}, "model.2.weight"),
    "integers": (lambda t: {**t, "model.2.bias": torch.zeros(2, dtype=torch.int64)}, {}, "model.2.bias"),
    "a weight that is no number": (lambda t: {**t, "model.2.bias": torch.tensor([0.0, torch.nan])}, {}, "model.2.bias"),
    "more layers in the config": (lambda t: t, {"num_layers": 3}, "model.3"),
    "fewer layers in the config": (lambda t: t, {"num_layers": 1}, "model.1"),
    "too many layers": (lambda t: t, {"num_layers": 5}, "num_layers"),
    "half a layer": (lambda t: t, {"num_layers": 0.5}, "num_layers"),
    "another hidden size": (lambda t: t, {"hidden_size": HIDDEN + 1}, str(HIDDEN + 1)),
    "a hidden size that no memory holds": (lambda t: t, {"hidden_size": 10**18}, "hidden_size"),
    "a large hidden size": (lambda t: t, {"hidden_size": 1 << 20}, "shape"),
    "a hidden size that is text": (lambda t: t, {"hidden_size": "12"}, "hidden_size"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_checkpoint_that_is_not_of_the_layout_is_refused_by_name(checkpoint, name):
    spoil, config, said = SPOILED[name]
    folder = checkpoint(spoil(their_tensors(2)), 2, **config)
    with pytest.raises(InputError, match=said):
        read_checkpoint(folder)
    read_checkpoint(checkpoint(their_tensors(2), 2))  # nothing else was wrong


class Escaping:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_not_opened(checkpoint, tmp_path, name):
    folder = checkpoint(their_tensors(1), 1)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Escaping(tmp_path / "escaped")))
    with pytest.raises(InputError, match=name) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "escaped").exists()
    pickle.loads((folder / name).read_bytes())
    assert (tmp_path / "escaped").exists(), "the trap must work"


def test_the_line_that_converts_a_pickle_does_so(checkpoint, tmp_path, monkeypatch):
    torch.manual_seed(1)
    module, folder = Theirs(3), checkpoint(their_tensors(3), 3)
    (folder / "model.safetensors").unlink()
    torch.save(module.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(InputError) as caught:
        read_checkpoint(folder)
    assert CONVERT in str(caught.value)
    monkeypatch.chdir(folder)
    exec(CONVERT.removeprefix('python -c "').removesuffix('"'))
    mine = read_checkpoint(folder).probability(torch.from_numpy(states()).float())
    theirs = module.model(torch.from_numpy(states()).float()).softmax(-1)[:, 1]
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


# --- their loop stops where ours does --------------------------------------------------------------------------------


def their_round(probabilities, threshold, least, most):
    """Tokens that their loop drafts. probabilities[i]: their head's word on the state that token i + 1 is drawn from;
    that of the first token is not asked."""
    together = 1.0
    for steps in range(1, len(probabilities) + 1):
        together *= 1.0 if steps == 1 else probabilities[steps - 1]
        stop = 1 - together > threshold
        if steps >= most or (steps >= least and stop):
            return steps
    return len(probabilities)


@pytest.mark.parametrize(("least", "most"), [(1, 20), (2, 20), (2, 4), (3, 5)])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_their_loop_stops_where_our_policy_stops(checkpoint, least, most, threshold):
    tensors = their_tensors(3)
    head = read_checkpoint(checkpoint(tensors, 3))
    rounds, longest = 60, 9
    table = states(rounds * longest, seed=5).reshape(rounds, longest, HIDDEN)
    theirs = [their_round(their_probability(tensors, 3, row), threshold, least, min(most, longest)) for row in table]
    policy = HeadPolicy(head, threshold, k_min=least, k_max=most)
    active, counts = torch.ones(rounds, dtype=torch.bool), torch.zeros(rounds, dtype=torch.long)
    limits = policy.start_round(active).clamp(max=longest)
    for depth in range(1, longest + 1):
        counts += active
        active = active & (counts < limits)
        step = DraftStep(
            depth=depth, token_ids=counts, active=active, fed_hidden=torch.from_numpy(table[:, depth - 1]).float()
        )
        active = active & policy.keep_drafting(step)
    assert counts.tolist() == theirs
    if threshold == 0.3 and most == 20:
        assert len(set(theirs)) > 2, "rounds of several lengths"


# --- data ------------------------------------------------------------------------------------------------------------


def record(**changes):
    lists = {"prefix": [1, 7], "tokens": [5, 6, 2], "draft": [5, 9, 2], "p_acc": [1.0, 0.25, 0.5]}
    texts = {name: str(values) for name, values in lists.items()}
    return {"prompt": "p", "continuation": "c", **texts, "log_p_7b": "[-0.5, -1.0, -2.0]", **changes}


def read(tmp_path, value, vocab_size=10):
    path = tmp_path / "data.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return read_records(path, vocab_size)


def test_lists_are_read_as_texts_and_as_lists(tmp_path):
    (first,) = read(tmp_path, [record()])
    assert (first.prompt_ids, first.response_ids, first.draft_ids) == ([1, 7], [5, 6, 2], [5, 9, 2])
    assert (first.acceptance, first.logprobs) == ([1.0, 0.25, 0.5], {"log_p_7b": [-0.5, -1.0, -2.0]})
    (second,) = read(tmp_path, [record(tokens=[5, 6, 2], p_acc=[1, 0, 0.5], id=7)])
    assert (second.response_ids, second.acceptance, second.id) == ([5, 6, 2], [1, 0, 0.5], "7")


WRONG_LISTS = [
    "__import__('pathlib').Path('escaped').touch()", "[1] * 3", "(5, 6, 2)", "[5, 6, 2,]", "[5, 6, 0x2]", "[5, 6, '2']",
    "[5, 6, true]", "[5, 6, null]", "[[5], 6, 2]", "[5, 6, NaN]", "[5, 6, 1e999]", "5", "", "{}", "[" * 100_000,
    "[5, 6, 99999999999999999999999]", [5, 6, True], [5, 6, "2"], None, 5, {"0": 5},
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG_LISTS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("field", ["prefix", "tokens", "draft", "p_acc"])
def test_what_is_not_a_list_of_numbers_is_refused_and_never_evaluated(tmp_path, monkeypatch, field, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"record 1: field '{field}'"):
        read(tmp_path, [record(), record(**{field: value})])
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": "[5, 6, 10]"}, "'tokens' has 10 in it, expected ids from 0 to 9"),
        ({"draft": "[5, -1, 2]"}, "'draft' has -1"),
        ({"prefix": "[1.5]"}, "'prefix' has 1.5"),
        ({"prefix": "[]"}, "'prefix' is empty"),
        ({"draft": "[5, 9]"}, "'draft' has 2 values, but 'tokens' has 3"),
        ({"p_acc": "[1.0]"}, "'p_acc' has 1 values"),
        ({"p_acc": "[1.0, 0.5, 1.5]"}, "'p_acc' has 1.5"),
        ({"log_p_70b": "[-1.0]"}, "'log_p_70b' has 1 values"),
        ({"id": [1]}, "'id' is list"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, changes, said):
    with pytest.raises(InputError, match=f"record 0: field {said}"):
        read(tmp_path, [record(**changes)])


@pytest.mark.parametrize("field", ["prefix", "tokens", "draft", "p_acc"])
def test_a_missing_field_is_named(tmp_path, field):
    with pytest.raises(InputError, match=f"'{field}' is missing"):
        read(tmp_path, [{name: value for name, value in record().items() if name != field}])


@pytest.mark.parametrize("value", ["", "[]", "{}", "null", "[1]", "[" * 100_000, "[{}", '"x"', "\udce9"])
def test_a_file_that_is_no_list_of_records_is_refused(tmp_path, value):
    (tmp_path / "data.json").write_bytes(value.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"data\.json"):
        read_records(tmp_path / "data.json", 10)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(str([5, 6, 2])),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(record())), inner),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(value))
    try:
        for found in read_records(path, 10):
            assert len(found.draft_ids) == len(found.acceptance) == len(found.response_ids) > 0
    except InputError as error:
        assert "any.json" in str(error)
