"""Atomic writing and strict reading."""

import hashlib
import json
import os

import pytest

from accept_head.errors import InputError
from accept_head.files import atomic_path, read_json, sha256, writable_folder, write_json


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("first half")
        assert temporary.parent == tmp_path and not (tmp_path / "file").exists()
        temporary.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole" and names(tmp_path) == ["file"]


def test_an_exception_leaves_the_old_file_and_no_partial(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError, match="midway"), atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError("midway")
    assert (tmp_path / "file").read_text() == "old" and names(tmp_path) == ["file"]


def test_an_interrupt_leaves_no_partial_either(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_folder_replaces_an_older_one_whole(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "stale").write_text("old")
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "fresh").write_text("new")
    assert names(tmp_path) == ["folder"] and names(folder) == ["fresh"]


def test_an_exception_leaves_the_old_folder_and_no_partial(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept").write_text("old")
    with pytest.raises(RuntimeError, match="midway"), atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "fresh").write_text("new")
        raise RuntimeError("midway")
    assert names(tmp_path) == ["folder"] and names(folder) == ["kept"]


def test_a_rename_that_fails_leaves_no_partial(tmp_path):
    (tmp_path / "name").mkdir()
    with pytest.raises(OSError), atomic_path(tmp_path / "name") as temporary:
        temporary.write_text("a file cannot replace a folder")
    assert names(tmp_path) == ["name"]


def test_two_writers_of_one_file_do_not_share_a_partial(tmp_path):
    with atomic_path(tmp_path / "file") as first, atomic_path(tmp_path / "file") as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "file").read_text() == "first" and names(tmp_path) == ["file"]


def test_json_round_trip(tmp_path):
    value = {"name": "α ∼ q", "numbers": [1, 2.5, None, True], "nested": {"empty": {}}}
    write_json(tmp_path / "file.json", value)
    assert read_json(tmp_path / "file.json") == value
    assert "α ∼ q" in (tmp_path / "file.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_json_are_refused_and_the_old_file_stays(tmp_path, number):
    path = tmp_path / "file.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError):
        write_json(path, {"loss": number})
    assert json.loads(path.read_text()) == {"loss": 1.0} and names(tmp_path) == ["file.json"]


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": 1,}', b"\xff\xfe", b"[1]", b"3", b'"text"', b"null"])
def test_text_that_is_no_json_object_is_an_input_error_that_names_the_file(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=r"file\.json: "):
        read_json(path)


def test_a_missing_file_and_a_folder_are_input_errors(tmp_path):
    with pytest.raises(InputError, match=r"missing\.json: no such file"):
        read_json(tmp_path / "missing.json")
    with pytest.raises(InputError, match=f"{tmp_path}: not readable"):
        read_json(tmp_path)


def test_a_writable_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    assert writable_folder(folder) == folder
    assert folder.is_dir() and names(folder) == []
    assert writable_folder(folder) == folder, "one that exists is fine"


@pytest.mark.parametrize("below", ["", "folder", "folder/deeper"])
def test_a_folder_at_or_under_a_regular_file_is_an_input_error_that_names_the_option(tmp_path, below):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"^--output .*file"):
        writable_folder(tmp_path / "file" / below, option="--output")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_an_input_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="--out"):
        writable_folder(tmp_path)


def test_sha256_is_that_of_the_utf8_bytes():
    assert sha256("β") == sha256("β".encode()) == hashlib.sha256(b"\xce\xb2").hexdigest()
    assert sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
