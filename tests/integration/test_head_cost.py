"""benchmarks/gpu/head_cost.py on a CPU: every cell is measured, and nothing is said of what takes a GPU."""

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
    assert result["share_of_draft_forward"] is None and "GPU" in result["of"]  # a CPU's share is no answer


def test_the_share_is_the_worst_of_what_is_used_on_a_gpu(head_cost):
    def cell(name, share, mode="graph", way="kernels"):
        return {"cell": name, "settings": {"mode": mode, "way": way}, "added": {"default": {"share": share}}}

    cells = [cell("one", 0.004), cell("eight", 0.009), cell("eager", 0.3, "eager"), cell("plain", 0.04, way="torch")]
    summary = head_cost.summary(cells)
    assert summary["share_of_draft_forward"] == 0.009 and "eight" in summary["of"]
