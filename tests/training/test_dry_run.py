"""`--dry_run true`: names, counts and formulas against known numbers, and against the results of real runs."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import yaml

from accept_head.cli import main
from accept_head.trace.shards import read_traces
from accept_head.training.plan.estimate import DEVICES, CollectCost, TrainCost
from accept_head.training.plan.model_shape import ModelShape

PARAMETERS = {  # as the Hub counts them in the published weights
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-chat-hf": 68_976_648_192,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-27b-it": 27_227_128_320,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-32B": 32_762_123_264,
}
PAIRS = ("llama2", "llama3", "gemma2", "qwen3")


@pytest.fixture(scope="module")
def shapes(repository):
    """{name: shape} of the eight models, from configs/shapes."""
    folder = repository / "configs" / "shapes"
    return {name: ModelShape.of(str(folder / name), "--target") for name in PARAMETERS}


def test_parameters_are_those_of_the_published_weights(shapes):
    assert {name: shape.parameters for name, shape in shapes.items()} == PARAMETERS


def test_the_cache_of_a_token(shapes):
    """Llama-2 70B: 80 layers of 8 key and 8 value heads of 128; 7B has 32 of each."""
    assert shapes["meta-llama/Llama-2-70b-chat-hf"].cache_values == 80 * 2 * 8 * 128
    assert shapes["meta-llama/Llama-2-7b-chat-hf"].cache_values == 32 * 2 * 32 * 128
    assert shapes["google/gemma-2-2b-it"].cache_values == 26 * 2 * 4 * 256


def test_a_shape_is_that_of_the_loaded_model(embedded_pair, embedded_pair_folder):
    for role in ("target", "draft"):
        model, shape = getattr(embedded_pair, role), ModelShape.of(str(embedded_pair_folder / role), "--target")
        assert shape.parameters == model.num_parameters()
        assert (shape.vocab_size, shape.hidden_size) == model.get_output_embeddings().weight.shape
        assert shape.unreached is None


SMALL = ModelShape("t", 1000, layers=1, hidden_size=8, cache_values=10, vocab_size=50, context=99)


def cost(**changes):
    values = {
        "target": SMALL, "draft": ModelShape("d", 100, 1, 4, 5, 50, 99), "number": 2, "prompts": 10,
        "prompt_tokens": 50, "new_tokens": 20, "batch_size": 4, "generating": 4, "backend": "vllm",
    }  # fmt: skip
    return CollectCost(**{**values, **changes})


def test_the_formulas_of_docs_scale_by_hand():
    device = DEVICES[0]
    one = cost()
    assert (one.positions, one.tokens, one.weight_bytes) == (200, 250, 2 * 2100)
    assert one.cache_bytes == 4 * (5 + 20) * 10 * 2
    assert one.logit_bytes == 2 * 4 * 20 * 100 * 2
    assert one.memory == one.weight_bytes + one.cache_bytes + one.logit_bytes
    assert one.disk == 200 * 46 + 50 * 4
    step = 2 * (1000 + 4 * (5 + 10) * 10) / (0.6 * 2.039e12)  # reading is slower than 2 · 4 · 1000 operations here
    prefill = 2 * 1000 * 50 / (0.4 * 312e12)
    assert one.generate_seconds(device) == pytest.approx(prefill + 200 / 4 * step)
    assert one.score_seconds(device) == pytest.approx(2 * 1100 * 250 / (0.4 * 312e12))
    loop = cost(backend="loop")
    assert loop.weight_bytes == 2 * 1100 and loop.cache_bytes == 4 * (5 + 20) * (10 + 5) * 2
    assert loop.logit_bytes == 2 * 4 * 16 * 100 * 2
    assert loop.generate_seconds(device) == pytest.approx(prefill + 200 / 4 * step)
    assert loop.score_seconds(device) == pytest.approx(2 * 100 * 250 / (0.4 * 312e12))
    heavy = cost(target=ModelShape("t", 10**9, 1, 8, 0, 50, 99), generating=1000)
    assert heavy.generate_seconds(device) == pytest.approx(250 * 2 * 10**9 / (0.4 * 312e12))
    train = TrainCost(SMALL, 30, number=2, traces=10, prompt_tokens=50, positions=200, epochs=3, forwards=2,
                      micro_batch_size=4)  # fmt: skip
    draft, head = 2 * 1000 * 2 * 250 / (0.4 * 312e12), 6 * 30 * 200 / (0.4 * 19.5e12)
    assert train.seconds(device) == pytest.approx(3 * (draft + head))
    assert cost(alternatives=4).disk == 200 * (46 + 4 * 11) + 50 * 4
    assert replace(train, alternatives=4).seconds(device) == pytest.approx(3 * (draft + 5 * head))


def test_a_model_over_several_devices_costs_more_hours_with_device_map_than_with_vllm(shapes):
    big = shapes["meta-llama/Llama-2-70b-chat-hf"]
    many = {"target": big, "prompts": 40_000, "prompt_tokens": 40_000 * 64, "new_tokens": 512}
    device = DEVICES[0]
    spread, shared = cost(**many, backend="loop"), cost(**many, backend="vllm", generating=256)
    assert spread.devices(device) == 2 and shared.devices(device) > 3
    assert spread.generate_seconds(device) > 10 * shared.generate_seconds(device)
    assert cost(**many, backend="openai").memory < spread.memory < shared.memory


def test_disk_is_that_of_real_traces_within_a_fifth(embedded_traces):
    folder = embedded_traces("train")
    config, traces = read_traces(folder)
    shape = {"prompts": config.num_prompts, "new_tokens": 1, "alternatives": config.alternatives}
    estimate = cost(**shape, prompt_tokens=sum(map(len, traces["prompt_ids"])))
    positions = sum(map(len, traces["response_ids"]))
    estimated = estimate.disk + (positions - estimate.positions) * (46 + 11 * config.alternatives)
    measured = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    assert 0.8 < measured / estimated < 1.2, (measured, estimated)


def test_positions_are_an_upper_bound_that_real_traces_come_near(embedded_traces):
    config, traces = read_traces(embedded_traces("train"))
    positions = sum(map(len, traces["response_ids"]))
    bound = cost(prompts=config.num_prompts, new_tokens=config.max_new_tokens).positions
    assert 0.5 * bound < positions <= bound


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def dry(capsys):
    """dry(*arguments) → what is printed."""

    def run(*arguments):
        assert main([*map(str, arguments), "--dry_run", "true"]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("pair", PAIRS)
def test_the_paper_scale_recipes_resolve(pair, dry, repository, monkeypatch, tmp_path):
    """Here the Hub cannot be reached; its models' shapes are in configs/shapes, and each line says so."""
    monkeypatch.chdir(repository)
    stand_ins = ("--model_shapes", "configs/shapes")
    given = yaml.safe_load((repository / "configs" / f"{pair}_collect.yaml").read_text())
    printed = dry("collect", "--config", f"configs/{pair}_collect.yaml", *stand_ins)
    for role in ("target", "draft"):
        assert f"{given[role]}: {PARAMETERS[given[role]]:,} parameters" in printed
    assert printed.count("NOT RESOLVED: shapes are those of --model_shapes") == 2
    assert "prompts    runs/alpaca/train.jsonl: NOT RESOLVED" in printed and "40,000" in printed
    assert "20,480,000 in all" in printed and "tokenizer  NOT CHECKED" in printed
    assert len(re.findall(r"[\d.]+ GPU-hours", printed)) == len(DEVICES)
    used = yaml.safe_load((repository / "configs" / f"{pair}_train.yaml").read_text())
    assert (used["traces"], used["draft"]) == (given["out"], given["draft"])
    printed = dry("train", "--config", f"configs/{pair}_train.yaml", *stand_ins)
    assert "NOT THERE YET" in printed and len(re.findall(r"[\d.]+ GPU-hours", printed)) == len(DEVICES)


@pytest.mark.parametrize("verb", ["collect", "train"])
def test_without_stand_ins_what_cannot_be_reached_is_an_error(verb, repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    assert main([verb, "--config", f"configs/llama3_{verb}.yaml", "--dry_run", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "meta-llama/Llama-3." in line and "--model_shapes" in line


def test_a_name_with_a_typo_is_an_error_even_with_stand_ins(repository, capsys):
    shapes = repository / "configs" / "shapes"
    models = ("--target", "meta-llama/Llama-2-70b-chta-hf", "--draft", "meta-llama/Llama-2-7b-chat-hf")
    words = ["collect", *models, "--prompts", "p", "--out", "o", "--model_shapes", str(shapes), "--dry_run", "true"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--target meta-llama/Llama-2-70b-chta-hf" in line and "config.json" in line


def test_a_pair_that_is_here_is_counted_and_nothing_is_written(dry, embedded_pair_folder, tmp_path):
    pair = embedded_pair_folder
    models = ("--target", pair / "target", "--draft", pair / "draft")
    out = tmp_path / "out"
    printed = dry("collect", *models, "--prompts", pair / "prompts" / "dev.jsonl", "--out", out, "--max_prompts", 50)
    assert not out.exists() and "NOT" not in printed
    assert "dev.jsonl: 50, of" in printed and "at most 128 tokens each, 6,400 in all" in printed


def test_train_counts_the_traces_that_are_there(dry, embedded_pair_folder, embedded_traces, tmp_path):
    draft, folders = ("--draft", embedded_pair_folder / "draft"), [embedded_traces(name) for name in ("train", "test")]
    printed = dry("train", "--traces", *folders, *draft, "--out", tmp_path / "head", "--depth", 1, 2)
    assert not list(tmp_path.iterdir())
    rows = [pq.read_table(path) for folder in folders for path in folder.glob("*.parquet")]
    positions = sum(len(table["response_ids"].combine_chunks().flatten()) for table in rows)
    assert f"{sum(map(len, rows)):,} with {positions:,} positions" in printed
    assert "2 heads" in printed


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        # A base of nine functions, which the residual reads too; standardising 128 channels, two blocks, an embedding's
        # way in, and the output.
        ((), 9 + 1 + 9 * 128 + 128 * 128 + 128 + 2 * (128 * 128 + 128) + 128 * 128 + 128 + 1),
        (("--recipe", "signals"), 9 + 1),
        (("--recipe", "specdecpp"), 3 * (128 * 128 + 128) + 128 + 1),
    ],
)
def test_head_parameters_are_those_of_the_recipes_head(
    dry, embedded_pair_folder, embedded_traces, tmp_path, settings, parameters
):
    draft = ("--draft", embedded_pair_folder / "draft")
    printed = dry("train", "--traces", embedded_traces("train"), *draft, "--out", tmp_path / "head", *settings)
    assert f"{parameters:,} parameters" in printed.split("head  ")[1]
