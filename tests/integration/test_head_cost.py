"""benchmarks/gpu/head_cost.py on a CPU: every cell is measured, and figures that need a GPU are left out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def head_cost(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("head_cost")


def test_a_tiny_run_measures_what_a_cpu_can(head_cost, tmp_path, monkeypatch):
    options = ["--tiny", "--replays", "4", "--batches", "1", "3", "--temperatures", "0", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["head_cost.py", *options])
    assert head_cost.main() == 0
    result = json.loads((tmp_path / "head_cost.json").read_text(encoding="utf-8"))
    assert len(result["cells"]) == 4 and result["attention"] == "sdpa"
    for cell in result["cells"]:
        assert cell["settings"]["mode"] == "eager" and cell["settings"]["way"] == "torch"
        assert set(cell["added"]) == {"signals", "default", "paper"} and cell["forward_seconds"] > 0
        assert cell["added"]["paper"]["bytes"] > 3 * 32 * 32 * 4
        assert cell["default_share"] == cell["added"]["default"]["share"]
    assert "no CUDA device" in result["fallback"]  # aims.py takes a GPU's cells alone: a CPU's share is no answer
