"""A head's folder: its content, its atomic writing, and the drafts that the head fits."""

import json
from dataclasses import replace

import pytest
import torch

from accept_head.errors import InputError
from accept_head.head.network import AcceptanceHead
from accept_head.head.saved import load_head, save_head
from accept_head.head_config import HeadConfig
from accept_head.hub.card import CardFacts, model_card
from accept_head.trace.config import TraceConfig
from tests.examples import QUALITY, TRACES

FILES = ["README.md", "config.json", "metrics.json", "model.safetensors", "trace_config.json", "training_config.json"]


def save(folder, metrics=None):
    head = AcceptanceHead(HeadConfig(hidden_size=8, depth=2))
    save_head(head, folder, metrics=metrics or {"dev": {"token": QUALITY}}, training={"epochs": 3}, traces=TRACES)
    return head


def test_a_saved_folder_holds_everything_about_the_head(tmp_path):
    head = save(tmp_path / "runs" / "head")
    folder = tmp_path / "runs" / "head"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["head"]
    assert json.loads((folder / "metrics.json").read_text())["dev"]["token"]["auroc"] == 0.8555
    assert json.loads((folder / "training_config.json").read_text()) == {"epochs": 3}
    assert TraceConfig.load(folder) == TRACES
    assert torch.equal(load_head(folder, hidden_size=8).output.weight, head.output.weight)


def test_the_card_names_the_pair_the_sampling_and_the_measured_quality(tmp_path):
    save(tmp_path / "head")
    card = (tmp_path / "head" / "README.md").read_text(encoding="utf-8")
    for fact in ("some/draft", "some/target", "temperature 0.7", "top-k 20", "top-p 0.9", "depth 2", "1234", "0.8555"):
        assert fact in card, fact


@pytest.mark.parametrize(
    ("more", "made_of", "read", "from_"),
    [
        ({"depth": 2}, "depth 2, hidden size 8", "the state at the token", "the draft model's last hidden state"),
        (
            {"depth": 0, "reads": "before", "base": True, "residual": False},
            "a base alone",
            "draft_max_prob",
            "the draft model's next-token distribution",
        ),
        (
            {"depth": 1, "reads": "before", "base": True, "width": 4, "standardised": True, "embedding_std": 0.5},
            "a base and a residual of depth 1, hidden size 8",
            "the state before the token, draft_max_prob, the token's embedding",
            "the draft model's next-token distribution and last hidden state",
        ),
    ],
    ids=["paper", "base", "base and residual"],
)
def test_the_card_says_what_the_head_is_made_of_and_reads(more, made_of, read, from_):
    if more.get("base"):
        more = more | {"signals": ("draft_max_prob",), "signal_mean": (0.5, 1.0), "signal_std": (0.3, 2.0)}
    card = model_card(CardFacts(config=HeadConfig(hidden_size=8, **more))).text
    assert f"- head: {made_of}, predicts token\n- it reads: {read}\n" in card
    assert f"Predicts, from {from_}, whether" in card


def test_where_models_and_prompts_came_from_is_recorded_but_decides_no_record(tmp_path):
    origins = {"target_revision": "a" * 40, "draft_revision": "b" * 40, "dtype": "bfloat16", "dataset": "some/prompts"}
    traces = replace(TRACES, **origins)
    assert traces.fingerprint() == TRACES.fingerprint() != replace(TRACES, seed=4).fingerprint()
    traces.save(tmp_path)
    assert TraceConfig.load(tmp_path) == traces
    TRACES.save(tmp_path)
    assert not set(origins) & set(json.loads((tmp_path / "trace_config.json").read_text()))
    assert TraceConfig.load(tmp_path) == TRACES


def test_a_failed_save_leaves_the_old_head_as_it_was(tmp_path):
    head = save(tmp_path / "head")
    with pytest.raises(ValueError):
        save(tmp_path / "head", metrics={"dev": {"token": {**QUALITY, "auroc": float("nan")}}})
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert torch.equal(load_head(tmp_path / "head", hidden_size=8).output.weight, head.output.weight)


def test_a_head_for_another_hidden_size_is_refused(tmp_path):
    save(tmp_path / "head")
    with pytest.raises(InputError, match="hidden_size is 8, but the draft's is 16"):
        load_head(tmp_path / "head", hidden_size=16)
