"""Figures in the documentation equal those in benchmarks/results, and every result is quoted somewhere."""

from __future__ import annotations

import json
import re

import pytest

from tests.doc_blocks import REPOSITORY, links

RESULTS = REPOSITORY / "benchmarks" / "results"
RUNGS = {  # a row of README's table, or of the first one in docs/benchmarks.md -> its rung in real_pair.json
    "head, 1,000 prompts": "default",
    "default head": "default",
    "head without the draft's state": "base, 30 prompts",
    "`--recipe signals`, 30 prompts": "base, 30 prompts",
    "stop when what was drafted is unlikely": "cumulative-confidence",
    "cumulative q(Y)": "cumulative-confidence",
    "max q": "max-prob",
    "vLLM's": "online-logistic",
    "`online-signals`": "online-signals",
    "an oracle": "oracle",
    "oracle": "oracle",
}


def gains(temperature):
    """rung -> its gains in %, by rising c, on all test prompts of the published pair."""
    rows = json.loads((RESULTS / "real_pair.json").read_text())["ladder"]
    rows = [row for row in rows if row["temperature"] == temperature and row["tested_on"] == "both"]
    found = {}
    for row in sorted(rows, key=lambda row: row["c"]):
        found.setdefault(row["rung"], []).append(f"{100 * row['gain_over_best_fixed']:.1f}")
    return found


def table(page, begin):
    """(first cell, numbers) of each row of the table whose header begins like that."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").split(begin)[1].splitlines()[2:]
    for line in lines[: lines.index("")]:
        first, *rest = line.strip("| ").replace("**", "").split(" | ")
        yield first, [re.sub(r"[ %]", "", cell) for cell in rest]


@pytest.mark.parametrize(
    ("page", "begin", "temperatures"),
    [("README.md", "| | c = 0.02", (1,)), ("docs/benchmarks.md", "| gain over the best fixed K, %", (1, 0))],
)
def test_gains_on_the_published_pair_are_those_of_the_json(page, begin, temperatures):
    rows = list(table(page, begin))
    assert len(rows) >= 5
    for first, numbers in rows:
        (rung,) = {rung for name, rung in RUNGS.items() if first.startswith(name)}
        assert numbers == [gain for temperature in temperatures for gain in gains(temperature)[rung]], first


def test_the_demos_table_is_that_of_the_json():
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for row in json.loads((RESULTS / "demo.json").read_text())["summary"]["policies"]:
        rates = rf"{row['discard_rate']:.3f}.*{row['verification_rate']:.3f}"
        assert re.search(rf"\| {re.escape(row['name'])} \|.*{rates}", text), row["name"]


def test_every_result_is_quoted_and_listed():
    names = {path.name for path in RESULTS.iterdir() if path.is_file()}
    pages = ["docs/benchmarks.md", "docs/log.md", "docs/lossless.md"]
    quoted = {link.rpartition("/")[2] for page in pages for link in links((REPOSITORY / page).read_text("utf-8"))}
    listed = {link.rpartition("/")[2] for link in links((REPOSITORY / "benchmarks" / "README.md").read_text("utf-8"))}
    assert names - quoted == set()
    assert names - listed == set()


def test_every_script_is_listed():
    scripts = {path.name for path in (REPOSITORY / "benchmarks").glob("*.py")}
    text = (REPOSITORY / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert {name for name in scripts if f"`{name}`" not in text} == set()


def test_readme_fits():
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 120] == []
    assert len((REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_the_repository_speaks_of_itself_alone():
    """No page or script names the circumstances of its making."""
    words = re.compile(r"\bissue \d|\$OUT|\blease\b|\blent\b|\bthis session\b|shared/design|equations\.md|field\.md")
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("benchmarks/**/*.md")]
    scripts = [*REPOSITORY.glob("benchmarks/**/*.py")]
    for folder in ("accept_head", "training", "inference"):
        scripts += (REPOSITORY / folder).rglob("*.py")
    found = [(str(path), text) for path in (*pages, *scripts) for text in words.findall(path.read_text("utf-8"))]
    assert found == []
