"""The head: its formula, its parameters, and the allowed content of its folder."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head.scorer import make_scorer
from accept_head.head_config import HeadConfig
from accept_head.signals import SIGNALS

HIDDEN = 8
PREDICTS = ["token", "next", "both"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def random_head(depth=3, predicts="token", hidden_size=HIDDEN):
    """Every parameter random, so that no block is the identity it starts as."""
    head = AcceptanceHead(HeadConfig(hidden_size=hidden_size, depth=depth, predicts=predicts))
    generator = torch.Generator().manual_seed(depth)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return head


def hidden_states(*shape):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(9))


def saved(tmp_path, **options):
    folder = tmp_path / "head"
    random_head(**options).save_pretrained(folder)
    return folder


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- the network

SIGNALS_READ = {"signals": ("draft_entropy",), "signal_mean": (0.4,), "signal_std": (0.2,)}
BASE_READ = {"signals": SIGNALS, "base": True, "signal_mean": (0.0,) * 9, "signal_std": (1.0,) * 9}


@pytest.mark.parametrize("predicts", ["token", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"depth": 0},
        {"depth": 4, "width": 24},
        {**SIGNALS_READ, "embedding_std": 0.7},
        {**BASE_READ, "width": 3, "standardised": True, "embedding_std": 0.7, "reads": "before"},
        {**BASE_READ, "depth": 0, "residual": False, "reads": "before"},
    ],
    ids=str,
)
def test_the_config_knows_the_weights_of_the_network(options, predicts):
    config = HeadConfig(hidden_size=HIDDEN, predicts=predicts, **options)
    shapes = {name: tuple(tensor.shape) for name, tensor in AcceptanceHead(config).state_dict().items()}
    assert config.tensor_shapes() == shapes


@pytest.mark.parametrize("predicts", PREDICTS)
@pytest.mark.parametrize("depth", range(5))
def test_logits_follow_the_formula(depth, predicts):
    head = random_head(depth, predicts)
    weights = {name: value.numpy().astype(np.float64) for name, value in head.state_dict().items()}
    e = hidden_states(2, 3).numpy().astype(np.float64)
    for block in range(depth):
        z = e @ weights[f"blocks.{block}.linear.weight"].T + weights[f"blocks.{block}.linear.bias"]
        e = e + z / (1 + np.exp(-z))
    expected = e @ weights["output.weight"].T + weights["output.bias"]
    assert np.allclose(head(hidden_states(2, 3)).detach(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("predicts", "names"), [("token", ["token"]), ("next", ["next"]), ("both", ["token", "next"])])
def test_there_is_one_logit_per_prediction(predicts, names):
    head = random_head(predicts=predicts)
    logits = head(hidden_states(4))
    assert logits.shape == (4, len(names))
    for index, name in enumerate(names):
        assert head.index_of(name) == index
        assert torch.equal(head.probability(hidden_states(4), name), logits[:, index].sigmoid())


@pytest.mark.parametrize(("predicts", "asked"), [("token", "next"), ("next", "token"), ("both", "both")])
def test_asking_for_a_prediction_that_the_head_does_not_make_is_an_input_error(predicts, asked):
    with pytest.raises(InputError, match=asked):
        random_head(predicts=predicts).probability(hidden_states(1), asked)


def test_a_new_head_is_a_linear_probe():
    """The last layer's weights are the same function of e whatever the depth, because blocks start as the identity."""
    head = AcceptanceHead(HeadConfig(hidden_size=HIDDEN, depth=4))
    assert torch.equal(head(hidden_states(5)), head.output(hidden_states(5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_float32_for_hidden_states_of_any_dtype(dtype):
    logits = random_head()(hidden_states(4).to(dtype))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, random_head()(hidden_states(4).to(dtype).float()))


# --- the folder


@pytest.mark.parametrize("predicts", PREDICTS)
@pytest.mark.parametrize("depth", range(5))
def test_a_round_trip_is_bit_equal(tmp_path, depth, predicts):
    head = random_head(depth, predicts)
    head.save_pretrained(tmp_path / "head")
    again = AcceptanceHead.from_pretrained(tmp_path / "head")
    assert again.config == head.config and not again.training
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in head.state_dict().items())
    again.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "head" / name).read_bytes()


# The fields of a config as `train` wrote them before heads had a base.
OLDER = {
    "depth": 1,
    "embedding_std": 0.125,
    "hidden_size": HIDDEN,
    "predicts": "token",
    "reads": "before",
    "signal_mean": [-3.26, 3.26, 0.37],
    "signal_std": [2.76, 1.71, 0.29],
    "signals": ["draft_logprob", "draft_entropy", "draft_max_prob"],
    "width": None,
}


def test_a_head_from_before_heads_had_a_base_loads_and_says_the_same(tmp_path):
    """By numpy, from the file: the signals go in beside the state, each as it is."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "blocks.0.linear.weight": (HIDDEN, HIDDEN),
        "blocks.0.linear.bias": (HIDDEN,),
        "output.weight": (1, HIDDEN),
        "output.bias": (1,),
        "signal_input.weight": (HIDDEN, 3),
        "embedding_input.weight": (HIDDEN, HIDDEN),
    }
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(OLDER))
    embeddings = torch.randn(11, HIDDEN, generator=generator)
    signals = torch.tensor([[-0.5, 1.0, 0.8], [-4.0, 3.5, 0.2]])
    hidden, ids = hidden_states(2), torch.tensor([3, 10])
    head = AcceptanceHead.from_pretrained(tmp_path).attach(embeddings)

    w = {name: value.double().numpy() for name, value in weights.items()}
    told = (signals.double().numpy() - OLDER["signal_mean"]) / OLDER["signal_std"]
    x = hidden.double().numpy() + told @ w["signal_input.weight"].T
    x = x + embeddings[ids].double().numpy() / OLDER["embedding_std"] @ w["embedding_input.weight"].T
    z = x @ w["blocks.0.linear.weight"].T + w["blocks.0.linear.bias"]
    expected = (x + z / (1 + np.exp(-z))) @ w["output.weight"].T + w["output.bias"]
    np.testing.assert_allclose(head(hidden, signals, ids).detach().numpy(), expected, rtol=1e-4, atol=1e-4)
    score = make_scorer(head, "token")(hidden, signals, ids)
    np.testing.assert_allclose(score.numpy(), 1 / (1 + np.exp(-expected[:, 0])), rtol=1e-4, atol=1e-5)


def test_a_string_path_loads_like_a_path(tmp_path):
    folder = saved(tmp_path)
    one, other = AcceptanceHead.from_pretrained(folder), AcceptanceHead.from_pretrained(str(folder))
    assert torch.equal(one.output.weight, other.output.weight)


def test_a_folder_holds_weights_config_and_card_and_nothing_else(tmp_path):
    folder = saved(tmp_path, depth=2, predicts="both")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    no_more = {
        "reads": "drawn",
        "signals": [],
        "signal_mean": [],
        "signal_std": [],
        "embedding_std": None,
        "width": None,
        "base": False,
        "standardised": False,
        "residual": True,
    }
    expected_config = {"hidden_size": HIDDEN, "depth": 2, "predicts": "both", **no_more}
    assert json.loads((folder / "config.json").read_text()) == expected_config
    expected = {f"blocks.{block}.linear.{part}" for block in range(2) for part in ("weight", "bias")}
    assert set(load_file(folder / "model.safetensors")) == expected | {"output.weight", "output.bias"}


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_wrong_tensor_is_refused_by_name(tmp_path, change):
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "blocks.1.linear.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        name = "blocks.7.linear.weight"
        tensors[name] = torch.zeros(HIDDEN, HIDDEN)
    else:
        tensors[name] = torch.zeros(HIDDEN, HIDDEN + 1)
    save_file(tensors, path)
    with pytest.raises(InputError, match=rf"model\.safetensors: tensor '{name}'"):
        AcceptanceHead.from_pretrained(folder)


@pytest.mark.parametrize("depth", [2, 4])
def test_weights_of_another_depth_are_refused(tmp_path, depth):
    folder = saved(tmp_path, depth=3)
    rewrite_config(folder, depth=depth)
    with pytest.raises(InputError, match=r"tensor 'blocks\."):
        AcceptanceHead.from_pretrained(folder)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_truncated_weights_are_refused(tmp_path, cut):
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"model\.safetensors: not readable"):
        AcceptanceHead.from_pretrained(path.parent)


def test_an_unknown_config_field_is_refused_by_name(tmp_path):
    folder = saved(tmp_path)
    rewrite_config(folder, dropout=0.1)
    with pytest.raises(InputError, match=r"config\.json: unknown field 'dropout'"):
        AcceptanceHead.from_pretrained(folder)


def test_a_config_without_hidden_size_is_refused(tmp_path):
    folder = saved(tmp_path)
    (folder / "config.json").write_text('{"depth": 3}')
    with pytest.raises(InputError, match="'hidden_size' is missing"):
        AcceptanceHead.from_pretrained(folder)


WRONG_VALUES = [
    ("depth", 5),
    ("depth", -1),
    ("depth", 3.0),
    ("depth", "3"),
    ("depth", True),
    ("depth", None),
    ("hidden_size", 0),
    ("hidden_size", -8),
    ("hidden_size", 8.0),
    ("hidden_size", "8"),
    ("hidden_size", True),
    ("hidden_size", None),
    ("hidden_size", [8]),
    ("predicts", "tokens"),
    ("predicts", None),
    ("predicts", ["token"]),
]


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES)
def test_a_config_value_of_the_wrong_type_or_range_is_refused_by_name(tmp_path, field, value):
    with pytest.raises(InputError, match=f"{field} is "):
        HeadConfig(**{"hidden_size": HIDDEN, field: value})
    folder = saved(tmp_path)
    rewrite_config(folder, **{field: value})
    with pytest.raises(InputError, match=f"{field} is "):
        AcceptanceHead.from_pretrained(folder)


BROKEN_JSON = {
    "cut off": b'{"hidden_size": 8, "depth"',
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "not UTF-8": b'\xff\xfe{"hidden_size": 8}',
}


@pytest.mark.parametrize("text", BROKEN_JSON)
def test_a_config_that_is_no_json_object_is_refused_by_file(tmp_path, text):
    folder = saved(tmp_path)
    (folder / "config.json").write_bytes(BROKEN_JSON[text])
    with pytest.raises(InputError, match=r"config\.json"):
        AcceptanceHead.from_pretrained(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    folder = saved(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config\.json"):
        AcceptanceHead.from_pretrained(folder)


@pytest.mark.parametrize("name", ["/runs/not-there", "./runs/demo/not-there", "runs/not-there", "runs/a/b/not-there"])
def test_a_path_that_does_not_exist_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="not-there"):
        AcceptanceHead.from_pretrained(name)


def test_a_file_is_not_a_head(tmp_path):
    with pytest.raises(InputError, match="not a head folder"):
        AcceptanceHead.from_pretrained(saved(tmp_path) / "model.safetensors")


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_planted_pickle_is_never_run(tmp_path):
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "model.bin", "pytorch_model.pt"):
        torch.save({"output.weight": Trap(sprung)}, folder / name)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        AcceptanceHead.from_pretrained(folder)
    assert not sprung.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert sprung.exists(), "the trap itself must work"


def test_a_pickle_named_safetensors_is_never_run(tmp_path):
    folder, sprung = saved(tmp_path), tmp_path / "sprung"
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(InputError, match=r"model\.safetensors"):
        AcceptanceHead.from_pretrained(folder)
    assert not sprung.exists()
