"""Commands and the GPU benchmark on a simulated GPU run to the end, through the branches for a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from accept_head.cli import main
from accept_head.files import read_json
from accept_head.inference.engine import cache
from accept_head.inference.profile import forwards
from accept_head.inference.profile import rounds as round_grid

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny"
MODELS = ["--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
PROMPTS = ["--prompts", str(TINY / "prompts" / "test.jsonl"), "--max_prompts", "2", "--max_new_tokens", "10"]
HEAD = f"head:{TINY / 'heads' / 'sampled'}:0.5,k_max=4"


@pytest.mark.parametrize("compile", [pytest.param("none", marks=pytest.mark.slow), "graphs"])
def test_generate(compile, tmp_path, waits, monkeypatch):
    used, choose = set(), cache.choose

    def noting(*arguments, **options):
        used.add(getattr(chosen := choose(*arguments, **options), "name", None))
        return chosen

    monkeypatch.setattr(cache, "choose", noting)
    out = tmp_path / "responses.jsonl"
    options = ["--policy", HEAD, "--temperature", "1", "--compile", compile, "--out", str(out)]
    assert main(["generate", *MODELS, *PROMPTS, *options]) == 0
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 2
    assert used == {"varlen"}  # in bfloat16, as the pair is, PyTorch's own kernel serves


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["none", "graphs"])
def test_an_eagle3_drafter(compile, tmp_path, waits):
    out = tmp_path / "responses.jsonl"
    models = ["--target", str(TINY / "target"), "--draft", str(TINY / "eagle3")]
    options = ["--policy", "confidence:0.2,k_max=3", "--temperature", "1", "--compile", compile, "--out", str(out)]
    assert main(["generate", *models, *PROMPTS, *options]) == 0
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 2


@pytest.mark.slow
def test_bench(tmp_path, waits):
    out = tmp_path / "bench.json"
    options = ["--policy", f"{HEAD},costs=auto", "--policy+", HEAD, "--fixed", "2", "--repeats", "1"]
    options += ["--temperature", "1", "--compile", "graphs", "--batch_size", "2", "--out", str(out)]
    assert main(["bench", *MODELS, *PROMPTS, *options]) == 0
    assert read_json(out)["device"] == "pretended"


NO_TRITON = "no Triton on a GPU: torch's operations only"  # kernels are what is not pretended
PARTS = {
    "overhead": ["--temperatures", "1", "--batches", "3"],
    "head_sweep": [],
    "collect_speed": [],
    "greedy_divergence": [],
    "head_cost": [],
    "whole_flow": ["--batches", "2"],
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_every_cell_of_the_benchmark_is_measured(part, tmp_path, waits, monkeypatch):
    """An operation takes ten times as long here; whole_flow and overhead run for minutes each."""
    monkeypatch.setattr(forwards, "REPEATS", 2)
    monkeypatch.setattr(round_grid, "ROUNDS", 4)
    arguments = [f"{part}.py", "--tiny", "--minutes", "55", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, *PARTS[part]])
    assert importlib.import_module(part).main() == 0
    written = read_json(tmp_path / f"{part}.json")
    assert written["device"] == "pretended" and written.get("fallback") in (None, NO_TRITON)
    assert written["cells"] and not [cell for cell in written["cells"] if {"error", "not_run"} & set(cell)]
