"""Trace folders: reading gives what was written, and any damage is refused with its place."""

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from accept_head.errors import InputError
from accept_head.trace.columns import ALTERNATIVE_COLUMNS, POSITION_COLUMNS
from accept_head.trace.config import CONFIG_NAME, TraceConfig, check_coupled, check_made_by
from accept_head.trace.shards import finished_config, missing_shards, read_shard, read_traces, shard_path, write_shard
from tests.examples import TRACES, write_traces


def record(index):
    """A record whose values are exactly representable in float32, so that a round trip is equality."""
    length = 2 + 3 * index % 7
    generator = torch.Generator().manual_seed(index)
    columns = {}
    for name, kind in POSITION_COLUMNS.items():
        if kind == "float32":
            numbers = torch.rand(length, generator=generator)  # all are probabilities or above 0, or logarithms
            columns[name] = (-numbers if name.endswith("logprob") else numbers).tolist()
        else:
            values = torch.randint(2 if kind == "bool" else TRACES.vocab_size, (length,), generator=generator)
            columns[name] = (values.bool() if kind == "bool" else values).tolist()
    return {
        "index": index,
        "id": f"prompt-{index}",
        "domain": "math" if index % 2 else "",
        "finished": index != 1,
        "prompt_ids": list(range(index + 1)),
        **columns,
    }


def shard_records(shard):
    return [record(shard * TRACES.shard_size + row) for row in range(TRACES.shard_rows(shard))]


@pytest.fixture
def folder(tmp_path):
    return write_traces(tmp_path, TRACES, [record(index) for index in range(TRACES.num_prompts)])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def replace_column(path, name, values):
    table = pq.read_table(path)
    index = table.schema.get_field_index(name)
    pq.write_table(table.set_column(index, name, pa.array(values, type=table.schema.field(index).type)), path)


def rewrite_config(folder, change):
    values = json.loads((folder / CONFIG_NAME).read_text())
    change(values)
    (folder / CONFIG_NAME).write_text(json.dumps(values))


# --- round trip


def test_what_is_written_is_what_is_read_in_the_order_of_the_prompts(folder):
    config, traces = read_traces(folder)
    assert config == TRACES
    assert [traces[index] for index in range(len(traces))] == [record(index) for index in range(5)]
    assert names(folder) == [f"shard-0000{shard}.parquet" for shard in range(3)] + [CONFIG_NAME]


def test_the_last_shard_holds_what_is_left():
    assert TRACES.num_shards == 3
    assert [TRACES.shard_rows(shard) for shard in range(3)] == [2, 2, 1]


def test_an_empty_response_and_an_empty_prompt_survive_the_round_trip(tmp_path):
    config = TraceConfig(**{**vars(TRACES), "num_prompts": 2})
    config.save(tmp_path)
    empty = {**record(0), "prompt_ids": [], **{name: [] for name in POSITION_COLUMNS}}
    write_shard(tmp_path, 0, [empty, record(1)])
    assert read_traces(tmp_path)[1][0] == empty


def test_a_config_written_before_there_was_scored_text_still_loads_and_keeps_its_fingerprint(folder):
    """The file and the content have no field `responses`, as ever; the fingerprint is that of all but the names."""
    values = json.loads((folder / CONFIG_NAME).read_text())
    assert "responses" not in values and "responses" not in TRACES.content()
    assert read_traces(folder)[0].responses is None
    kept = {name: value for name, value in values.items() if name not in ("target", "draft")}
    assert TRACES.fingerprint() == hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    assert TRACES.fingerprint() == "83140b7c5c12b28883f57a35231e380d196429431ebf5482c92571e695e721ff", (
        "stored rollouts would be made anew"
    )


def test_scored_text_is_written_read_and_told_apart(folder):
    scored = replace(TRACES, responses="e5")
    scored.save(folder)
    assert read_traces(folder)[0] == scored
    assert scored.fingerprint() != TRACES.fingerprint() != replace(scored, responses="f6").fingerprint()
    check_coupled(TRACES, Path("traces"))
    with pytest.raises(InputError, match=r"^some/traces: .*--responses.*replayed"):
        check_coupled(scored, Path("some/traces"))


def test_one_shard_is_read_by_itself(folder):
    assert list(read_shard(folder, TRACES, 1)) == shard_records(1)
    shard_path(folder, 2).unlink()
    assert list(read_shard(folder, TRACES, 0)) == shard_records(0)
    with pytest.raises(InputError, match="1 of 3 shards are missing"):
        finished_config(folder)
    (folder / "model.safetensors").touch()  # its trace_config.json says what the head was trained on
    with pytest.raises(InputError, match="this is a head, expected a folder of traces"):
        read_traces(folder)


def test_traces_of_another_draft_are_refused():
    check_made_by(TRACES, Path("traces"), draft_fingerprint="b2")
    with pytest.raises(InputError, match=r"traces: .*some/draft"):
        check_made_by(TRACES, Path("traces"), draft_fingerprint="z9")


# --- damage to shards


def test_a_missing_shard_is_refused_by_name(folder):
    assert missing_shards(folder, TRACES) == []
    shard_path(folder, 1).unlink()
    assert missing_shards(folder, TRACES) == [1]
    with pytest.raises(InputError, match=r"1 of 3 shards are missing \(first: shard-00001\.parquet\)"):
        read_traces(folder)


def test_a_partial_file_left_by_a_killed_run_is_not_a_shard(folder):
    shard_path(folder, 2).rename(folder / ".shard-00002.parquet.0123abcd.partial")
    assert missing_shards(folder, TRACES) == [2]


@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.99])
def test_a_truncated_shard_is_refused_by_name(folder, keep):
    path = shard_path(folder, 1)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match=r"shard-00001\.parquet: damaged"):
        read_traces(folder)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_shard_with_another_number_of_records_is_refused(folder, rows):
    write_shard(folder, 1, [record(2), record(3), record(4)][:rows])
    with pytest.raises(InputError, match=rf"shard-00001\.parquet: {rows} records, expected 2"):
        read_traces(folder)


def test_a_shard_of_other_prompts_is_refused(folder):
    """The same number of records, but a copy of another shard."""
    shard_path(folder, 1).write_bytes(shard_path(folder, 0).read_bytes())
    with pytest.raises(InputError, match=r"shard-00001\.parquet"):
        read_traces(folder)


def test_no_flipped_bit_anywhere_changes_what_is_read_unnoticed(folder):
    path = shard_path(folder, 1)
    data, (_, traces) = path.read_bytes(), read_traces(folder)
    expected = traces.to_dict()
    generator = random.Random(0)
    refused = 0
    for position in generator.sample(range(len(data)), 100):
        flipped = bytearray(data)
        flipped[position] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            found = read_traces(folder)[1].to_dict()
        except InputError:
            refused += 1
        else:
            assert found == expected, f"bit flip at byte {position} changed what is read"
    assert refused > 20


@pytest.mark.parametrize("name", [name for name in POSITION_COLUMNS if name != "response_ids"])
def test_a_column_of_another_length_is_refused_by_name(folder, name):
    path = shard_path(folder, 1)
    values = pq.read_table(path)[name].to_pylist()
    values[1] = values[1][:-1]
    replace_column(path, name, values)
    with pytest.raises(InputError, match=rf"shard-00001\.parquet: column '{name}'"):
        read_traces(folder)


def with_null(table, whole):
    values = table["overlap"].to_pylist()
    values[0] = None if whole else [None, *values[0][1:]]
    place = table.schema.get_field_index("overlap")
    return table.set_column(place, "overlap", pa.array(values, type=table.schema.field(place).type))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda table: with_null(table, whole=True), "overlap"),
        (lambda table: with_null(table, whole=False), "overlap"),
        (lambda table: table.drop_columns(["acceptance"]), "acceptance"),
        (lambda table: table.set_column(4, "accepted", pa.array(["yes"] * len(table))), "accepted"),
    ],
    ids=["a null", "a null in a list", "no column", "another type"],
)
def test_a_column_that_is_no_list_of_its_type_is_refused_by_name(folder, change, named):
    path = shard_path(folder, 2)
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(InputError, match=rf"shard-00002\.parquet: .*{named}"):
        read_traces(folder)


# --- the config


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="not-there: no such trace folder"):
        read_traces(tmp_path / "not-there")


def test_a_folder_without_config_is_not_a_trace_folder(tmp_path):
    with pytest.raises(InputError, match=CONFIG_NAME):
        read_traces(tmp_path)


@pytest.mark.parametrize("text", [b"", b'{"version": 1', b"[]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_refused_by_file(folder, text):
    (folder / CONFIG_NAME).write_bytes(text)
    with pytest.raises(InputError, match=CONFIG_NAME):
        read_traces(folder)


GONE = "(left out)"
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
WRONG_FIELDS = [
    *(("version", version, f"version is {version!r}, expected 2; collect") for version in (0, 1, 3, "2", None)),
    ("colour", "red", "field 'colour' is unknown"),
    *((name, GONE, f"field '{name}' is missing") for name in ("target", "sampling", "seed", "shard_size")),
    *(("num_prompts", count, "field 'num_prompts'") for count in ("5", 5.0, 0)),
    *(("shard_size", count, "field 'shard_size'") for count in (0, None)),
    ("responses", 7, "field 'responses' is 7, expected text"),
    *(
        ("alternatives", n, "field 'alternatives' is .*, expected 1 to 1024")
        for n in (0, -1, 1025, 2.0, "4", True, [4])
    ),
    *(("sampling", value, "field 'sampling'") for value in (3, None, {**SAMPLING, "typical_p": 0.1}, {"top_k": 5})),
    ("sampling", {**SAMPLING, "temperature": "hot"}, "field 'sampling'"),
    ("sampling", {**SAMPLING, "temperature": -1.0}, "temperature is -1.0"),
]


@pytest.mark.parametrize(("field", "value", "said"), WRONG_FIELDS, ids=str)
def test_a_wrong_field_of_the_config_is_refused_by_name(folder, field, value, said):
    rewrite_config(folder, lambda values: values.pop(field) if value is GONE else values.update({field: value}))
    with pytest.raises(InputError, match=f"{CONFIG_NAME}: {said}"):
        read_traces(folder)


# --- atomicity


def write_half_and_fail(self, path, **_options):
    Path(path).write_bytes(b"PAR1 half of a shard")
    raise OSError("disk full")


def test_a_failing_writer_leaves_the_old_shard_as_it_was(folder, monkeypatch):
    before, listing = shard_path(folder, 0).read_bytes(), names(folder)
    monkeypatch.setattr(datasets.Dataset, "to_parquet", write_half_and_fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(folder, 0, shard_records(0))
    assert shard_path(folder, 0).read_bytes() == before and names(folder) == listing


def test_a_record_without_a_column_is_not_written(tmp_path):
    bad = {name: value for name, value in record(0).items() if name != "overlap"}
    with pytest.raises(ValueError, match="overlap"):
        write_shard(tmp_path, 0, [bad])
    assert names(tmp_path) == []


# --- alternatives


ALTERNATIVES = 3


def with_alternatives(folder, change=lambda columns: None):
    """The folder's traces, with alternatives at every position. change: of one record's columns, in place."""
    config = TraceConfig(**{**vars(TRACES), "alternatives": ALTERNATIVES})
    config.save(folder)
    written = []
    for shard in range(config.num_shards):
        records = shard_records(shard)
        for each in records:
            length, generator = ALTERNATIVES * len(each["response_ids"]), torch.Generator().manual_seed(each["index"])
            numbers = torch.rand(length, generator=generator)
            ids = torch.randint(TRACES.vocab_size, (length,), generator=generator)
            values = ids.tolist(), (-numbers).tolist(), numbers.tolist()
            each |= dict(zip(ALTERNATIVE_COLUMNS, values, strict=True))
        change(records[0])
        write_shard(folder, shard, records)
        written += records
    return config, written


def test_alternatives_survive_the_round_trip(tmp_path):
    config, written = with_alternatives(tmp_path)
    read, traces = read_traces(tmp_path)
    assert read == config and list(traces) == written
    assert config.fingerprint() != TRACES.fingerprint()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("alternative_ids", [1, 2], "is not 3 times as long as 'response_ids'"),
        ("alternative_acceptance", [], "is not 3 times as long as 'response_ids'"),
        ("alternative_ids", TRACES.vocab_size, "has ids beyond the vocabulary"),
        ("alternative_ids", -1, "has ids beyond the vocabulary"),
        ("alternative_acceptance", 1.5, "has 1.5 in it"),
        ("alternative_acceptance", float("nan"), "has NaN in it"),
        ("alternative_logprob", 0.5, "has 0.5 in it"),
        ("alternative_logprob", float("-inf"), "has -inf in it"),
    ],
)
def test_alternatives_that_cannot_be_are_refused_by_column(tmp_path, name, value, expected):
    def change(columns):
        columns[name] = value if isinstance(value, list) else [value, *columns[name][1:]]

    with_alternatives(tmp_path, change)
    with pytest.raises(InputError, match=f"shard-00000.parquet: column '{name}' {expected}"):
        read_traces(tmp_path)


def test_a_folder_whose_config_has_alternatives_must_have_them(folder):
    rewrite_config(folder, lambda values: values.update(alternatives=2))
    with pytest.raises(InputError, match=r"shard-00000\.parquet: damaged or not a trace shard"):
        read_traces(folder)
