"""The demo on a few prompts: it runs to the end and writes all its files."""

from __future__ import annotations

import json

import pytest

from accept_head.cli import main
from accept_head.cost import ForwardCosts, throughput

ROW = {
    "name",
    "params",
    "discard_rate",
    "verification_rate",
    "throughput",
    "speedup",
    "gain_over_best_fixed",
    "oracle_gap_closed",
    "block_efficiency",
    "ci95",
}


@pytest.fixture(scope="module")
def demo_folder(run_cli, embedded_pair_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    sizes = {"train_prompts": 40, "dev_prompts": 6, "test_prompts": 6, "max_new_tokens": 16, "processes": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    result = run_cli("demo", "--pair", str(embedded_pair_folder), "--out", str(out), *options)
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_the_demo_leaves_a_summary_in_the_public_form(demo_folder):
    out, _ = demo_folder
    summary = json.loads((out / "summary.json").read_text())
    names = [row["name"] for row in summary["policies"]]
    grid = ["none", *(f"fixed:{k}" for k in (1, 2, 3, 4, 6, 8)), *(f"head:{h}" for h in (0.1, 0.3, 0.5, 0.7, 0.9))]
    chosen = summary["chosen_on_dev"]
    assert [name.startswith("head:") for name in chosen] == [True, False], "the head, and the best rule without one"
    assert names == [*grid, *(name for name in chosen if name not in grid), "oracle"]
    costs = ForwardCosts(**summary["costs"])
    for row in summary["policies"]:
        assert set(row) == ROW
        if row["name"] != "none":
            rates = {name: row[name] for name in ("discard_rate", "verification_rate")}
            # Eq. 5.1 does not know that a response can end with a drafted token.
            assert row["throughput"] == pytest.approx(throughput(costs, **rates), rel=0.03)
    rows = {row["name"]: row for row in summary["policies"]}
    assert rows["none"]["speedup"] == pytest.approx(1) and rows["none"]["verification_rate"] == 1
    assert rows["oracle"]["discard_rate"] == 0 and rows["oracle"]["oracle_gap_closed"] == pytest.approx(1)
    assert max(row["gain_over_best_fixed"] for name, row in rows.items() if name.startswith("fixed")) == 0


def test_the_demo_tunes_its_head_and_leaves_a_report(demo_folder):
    out, _ = demo_folder
    decoding, tuned = (json.loads((out / name).read_text()) for name in ("head/decoding.json", "tuned.json"))
    (row,) = (row for row in tuned["policies"] if row["name"].startswith("head:"))
    assert {name: decoding[name] for name in ("threshold", "k_min", "k_max")} == row["params"]
    page = (out / "report.html").read_text()
    assert "accept-head demo" in page and "http-equiv" in page and "<script src" not in page


def test_the_demo_leaves_a_head_and_says_what_it_measured(demo_folder):
    out, printed = demo_folder
    assert (out / "head" / "model.safetensors").is_file()
    words = " ".join(printed.split())  # lines are broken at the console's width
    assert "held-out prompts" in words and "best fixed draft length" in words


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", -1), ("train_prompts", 0), ("dev_prompts", 0), ("max_new_tokens", 0), ("processes", 0)],
)
def test_what_is_refused_leaves_an_earlier_demo_as_it_is(option, value, embedded_pair_folder, tmp_path, capsys):
    (tmp_path / "head").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    assert main(["demo", "--pair", str(embedded_pair_folder), "--out", str(tmp_path), f"--{option}", str(value)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("accept-head: error: ")]
    assert f"{option} is {value}" in line
    assert (tmp_path / "head").is_dir() and (tmp_path / "summary.json").is_file()
