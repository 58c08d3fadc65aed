"""A target that accelerate spreads over several devices gives the same records."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from accept_head import InputError, load_pair
from accept_head.pair import load_model

TEXTS = ["Once upon a time", "<|user|>What are three ways to build a pillow fort?<|assistant|>", "The"]


@pytest.fixture(scope="module")
def spread(embedded_pair_folder, tmp_path_factory):
    """The embedded pair, of whose target less than a half is in memory and the rest on disk."""
    size = (embedded_pair_folder / "target" / "model.safetensors").stat().st_size
    pair = load_pair(
        embedded_pair_folder / "target",
        embedded_pair_folder / "draft",
        device="cpu",
        dtype="float32",
        device_map="auto",
        max_memory={"cpu": f"{size // 1000}KB"},
        offload_folder=str(tmp_path_factory.mktemp("offload")),
    )
    return pair


def test_a_part_is_on_disk_and_a_part_in_memory(spread):
    assert set(spread.target.hf_device_map.values()) == {"cpu", "disk"}
    kinds = {parameter.device.type for parameter in spread.target.parameters()}
    assert kinds == {"cpu", "meta"}


def test_collect_with_it_writes_the_same_records(embedded_pair_folder, run_warm, tmp_path):
    pair = embedded_pair_folder
    models = ("--target", pair / "target", "--draft", pair / "draft", "--prompts", pair / "prompts" / "train.jsonl")
    sizes = ("--max_prompts", 6, "--max_new_tokens", 8, "--batch_size", 3)
    size = (pair / "target" / "model.safetensors").stat().st_size
    memory = ("--device_map", "auto", "--max_memory", json.dumps({"cpu": f"{size // 1000}KB"}))
    for out, more in (("plain", ()), ("spread", (*memory, "--offload_folder", tmp_path / "offload"))):
        done = run_warm("collect", *models, *sizes, "--out", tmp_path / out, *more)
        assert done.returncode == 0, done.stderr
    rows = [pq.read_table(tmp_path / out / "shard-00000.parquet").to_pylist() for out in ("plain", "spread")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "option", [{"max_memory": {"cpu": "1GB"}}, {"offload_folder": "x"}], ids=lambda o: next(iter(o))
)
def test_bounds_without_a_map_are_refused(embedded_pair_folder, option):
    with pytest.raises(InputError, match=f"--{next(iter(option))} is given without --device_map"):
        load_model(embedded_pair_folder / "target", "--target", **option)


def test_a_map_that_is_none_is_refused(embedded_pair_folder):
    with pytest.raises(InputError, match=r"--target .*target: cannot be loaded"):
        load_model(embedded_pair_folder / "target", "--target", device_map="everywhere")
