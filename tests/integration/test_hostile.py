"""Hostile input on the command line: some cases of benchmarks/hostile.py."""

from __future__ import annotations

import json
import pickle
from html.parser import HTMLParser

import hostile
import pytest

from accept_head.checksum import seal_parquet
from accept_head.errors import InputError
from accept_head.files import parse_json, write_json
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import read_traces

GOOD = {"works", "refused"}


@pytest.fixture(scope="module")
def box(tmp_path_factory, random_pair_folder, random_traces_folder):
    """Good inputs of the random pair; its traces are those that other tests have made."""

    class Made(hostile.Sandbox):
        def _traces(self):
            hostile.shutil.copytree(random_traces_folder, self.good / "traces")

    box = Made(tmp_path_factory.mktemp("hostile"), random_pair_folder)
    box.prepare()
    return box


def bad(outcomes):
    return {
        place: (each.verdict, each.detail[-300:]) for place, each in enumerate(outcomes) if each.verdict not in GOOD
    }


def test_a_slice_of_every_kind_works_or_is_refused_in_one_line(box):
    """180 inputs in one worker."""
    outcomes = run_mixed(box, each=10)
    assert bad(outcomes) == {}
    assert {each.verdict for each in outcomes} == GOOD, "some are good enough, some are not"


def run_mixed(box, each):
    """The first inputs of all kinds, one after the other, as one kind."""
    kinds = list(hostile.KINDS.items())

    def mixed(box, random):
        mixed.count += 1
        _, (_, write) = kinds[mixed.count % len(kinds)]
        return write(box, random)

    mixed.count = 0
    hostile.KINDS["mixed"] = (1, mixed)
    try:
        outcomes, memory = hostile.run_kind(box, "mixed", each * len(kinds), seed=1)
    finally:
        del hostile.KINDS["mixed"]
    assert memory < hostile.MEMORY
    return outcomes


@pytest.mark.slow
def test_more_of_every_kind(box):
    for kind, (count, _) in list(hostile.KINDS.items()):
        outcomes, memory = hostile.run_kind(box, kind, max(10, count // 20), seed=2)
        assert bad(outcomes) == {}, kind
        assert memory < hostile.MEMORY


# --- what the slice alone would not show -----------------------------------------------------------------------------


def test_a_planted_pickle_would_escape_if_it_were_opened(box, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from spoil import escaping_pickle

    pickle.loads(escaping_pickle())["model.0.weight"].close()
    assert (tmp_path / "escaped").is_file()


def test_writing_replaces_a_link_and_leaves_what_it_points_at(tmp_path):
    (tmp_path / "outside.json").write_text("mine")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "decoding.json").symlink_to(tmp_path / "outside.json")
    write_json(tmp_path / "head" / "decoding.json", {"threshold": 0.5})
    assert (tmp_path / "outside.json").read_text() == "mine"
    assert json.loads((tmp_path / "head" / "decoding.json").read_text()) == {"threshold": 0.5}


def test_aliases_cannot_grow_a_config(run_warm, tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{n}: &{n} [{', '.join(['*' + chr(ord(n) - 1)] * 9)}]" for n in "bcdefghij"]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    done = run_warm("generate", "--config", tmp_path / "bomb.yaml")
    assert done.returncode == 2 and "alias" in done.stderr and len(done.stderr.splitlines()) == 1


def test_null_is_not_a_value_where_none_is_allowed(run_warm, tmp_path):
    (tmp_path / "null.yaml").write_text("seed: null\n")
    options = ("--target", "t", "--draft", "d", "--prompts", "p.jsonl", "--out", tmp_path / "o.jsonl")
    done = run_warm("generate", *options, "--config", tmp_path / "null.yaml")
    assert done.returncode == 2 and "seed is null" in done.stderr
    (tmp_path / "null.yaml").write_text("max_prompts: null\n")  # which may be
    done = run_warm("generate", *options, "--config", tmp_path / "null.yaml")
    assert done.returncode == 2 and "null" not in done.stderr.replace("null.yaml", "") and "--target" in done.stderr


def test_a_message_is_one_line_that_a_terminal_can_be_shown(run_warm, tmp_path):
    hidden = tmp_path / "head"
    hidden.mkdir()
    (hidden / "config.json").write_text(json.dumps({"hidden_size": 4, "a\n\x1b[2J\u202e" + "x" * 5000: 1}))
    (hidden / "model.safetensors").write_bytes(b"")
    done = run_warm("publish", "--head", hidden, "--repo", "user/name")
    assert done.returncode == 2 and len(done.stderr) < 1000 and done.stderr.strip().isprintable()


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", "-1e999", "9" * 5000, str(1 << 63), "[" * 100_000])
def test_json_is_strict_about_numbers(text):
    with pytest.raises((ValueError, RecursionError)):
        parse_json(text)


def test_json_keeps_the_numbers_that_are_numbers():
    values = [0, -1, (1 << 63) - 1, -(1 << 63), 0.5, 1e308, 5e-324, -0.0]
    assert parse_json(json.dumps(values)) == values


WRONG_VALUES = {
    "an id beyond the vocabulary": ("draft_ids", 261),
    "a negative id": ("response_ids", -1),
    "a prompt id beyond the vocabulary": ("prompt_ids", 1 << 30),
    "a label above 1": ("acceptance", 1.5),
    "a label that is no number": ("acceptance", float("nan")),
    "an unknown overlap where it must be known": ("overlap", float("nan")),
    "an infinite divergence": ("divergence", float("inf")),
    "a positive log-probability": ("draft_logprob", 2.0),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_whole_shard_with_a_value_that_cannot_be_is_refused(random_traces_folder, tmp_path, name, sealed):
    import pyarrow as pa
    import pyarrow.parquet as pq

    column, value = WRONG_VALUES[name]
    for path in random_traces_folder.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "shard-00002.parquet"
    table = pq.read_table(path)
    rows = table[column].to_pylist()
    rows[1][0] = value
    changed = table.set_column(table.column_names.index(column), column, pa.array(rows, type=table[column].type))
    pq.write_table(changed, path)
    if sealed:
        seal_parquet(path)
    with pytest.raises(InputError, match=rf"shard-00002\.parquet: column '{column}'"):
        read_traces(tmp_path)
    pq.write_table(table, path)
    read_traces(tmp_path)


def test_a_trace_config_cannot_ask_for_a_million_shards(random_traces_folder, tmp_path):
    values = json.loads((random_traces_folder / "trace_config.json").read_text())
    (tmp_path / "trace_config.json").write_text(json.dumps({**values, "num_prompts": 10**12, "shard_size": 1}))
    with pytest.raises(InputError, match="num_prompts"):
        TraceConfig.load(tmp_path)


class Tags(HTMLParser):
    def __init__(self, source):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.slow
def test_a_report_shows_tags_in_ids_domains_and_titles_as_text(
    random_pair_folder, random_traces_folder, run_warm, tmp_path
):
    """From hostile traces to the page, by the command. (The page by itself: tests/inference/report/test_page.py.)"""
    import pyarrow as pa
    import pyarrow.parquet as pq

    nasty = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    traces = tmp_path / "traces"
    traces.mkdir()
    for path in random_traces_folder.glob("*.*"):
        (traces / path.name).write_bytes(path.read_bytes())
    for path in traces.glob("*.parquet"):
        table = pq.read_table(path)
        for name in ("id", "domain"):
            column = pa.array([f"{nasty}{i}" for i in range(len(table))], type=table[name].type)
            table = table.set_column(table.column_names.index(name), name, column)
        pq.write_table(table, path)
        seal_parquet(path)
    costs = ("--t_draft", 1, "--t_target", 5, "--out", tmp_path / "report.html")
    done = run_warm("report", "--traces", traces, "--draft", random_pair_folder / "draft", *costs)
    assert done.returncode == 0, done.stderr
    page = Tags((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags].count("script") == 2, "the page's own: its data and its viewer"
    assert not any(attribute.startswith("on") for _, attributes in page.tags for attribute in attributes)
    assert all(attributes.get("src", "data:").startswith("data:") for tag, attributes in page.tags if tag == "img")
    assert any(nasty in text for text in page.text), "and it is there to be read"
