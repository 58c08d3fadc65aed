"""Atomic writing and strict reading."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from accept_head.errors import InputError
from accept_head.files import atomic_path, machine_fault, read_json, sha256, writable_folder, write_json


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("first half")
        assert temporary.parent == tmp_path and not (tmp_path / "file").exists()
        temporary.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("old", ["none", "file", "folder"])
def test_an_exception_leaves_the_old_one_and_no_partial(tmp_path, old, raised):
    path = tmp_path / "name"
    if old == "folder":
        path.mkdir()
    kept = path / "kept" if old == "folder" else path
    if old != "none":
        kept.write_text("old")
    with pytest.raises(raised), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise raised
    assert names(tmp_path) == ([] if old == "none" else ["name"])
    assert old == "none" or kept.read_text() == "old"


def test_a_folder_replaces_an_older_one_whole(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "stale").write_text("old")
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "fresh").write_text("new")
    assert names(tmp_path) == ["folder"] and names(folder) == ["fresh"]


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


# --- what a kill leaves

KILLED = """
import os, signal, sys
from pathlib import Path
from accept_head.files import atomic_path
with atomic_path(Path(sys.argv[1])) as temporary:
    {make}
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_while_writing(path, make):
    done = subprocess.run([sys.executable, "-c", KILLED.format(make=make), str(path)])
    assert done.returncode < 0
    (left,) = path.parent.glob("*.partial") if not path.exists() else set(path.parent.glob(".*.partial"))
    return left


@pytest.mark.parametrize("make", ["temporary.write_text('half')", "temporary.mkdir(); (temporary / 'half').touch()"])
def test_what_a_killed_process_left_is_gone_once_the_file_is_written(tmp_path, make):
    left = killed_while_writing(tmp_path / "file", make)
    assert names(tmp_path) == [left.name]
    write_json(tmp_path / "other", {})
    assert left.exists(), "it was not of this file"
    write_json(tmp_path / "file", {})
    assert names(tmp_path) == ["file", "other"]


def test_what_other_processes_or_hosts_are_writing_is_left_alone(tmp_path):
    path = tmp_path / "file"
    left = killed_while_writing(path, "temporary.touch()")
    host, _, rest = left.name.removeprefix(".file.").partition("-")
    own = left.rename(tmp_path / f".file.{host}-{os.getppid()}-{rest.rpartition('-')[2]}")
    other = tmp_path / f".file.{'0' * len(host)}-{rest}"
    other.touch()
    write_json(path, {})
    assert set(names(tmp_path)) == {"file", own.name, other.name}


def test_a_process_of_the_same_number_as_the_killed_one_removes_what_that_left(tmp_path):
    """In a container every start may have the same process id."""
    path = tmp_path / "file"
    left = killed_while_writing(path, "temporary.touch()")
    host, _, rest = left.name.removeprefix(".file.").partition("-")
    left.rename(tmp_path / f".file.{host}-{os.getpid()}-{rest.rpartition('-')[2]}")
    write_json(path, {})
    assert names(tmp_path) == ["file"]


def test_a_folder_is_replaced_without_a_moment_at_which_half_of_it_is_there(tmp_path, monkeypatch):
    """Killed at any rename, the name leads to all of the old folder, all of the new one, or nothing."""
    folder = tmp_path / "folder"
    seen = []

    def look(*_):
        seen.append(names(folder) if folder.exists() else [])

    for name in ("rename", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real: (look(), real(*a), look()))
    monkeypatch.setattr("accept_head.files.shutil.rmtree", lambda path, **_: seen.append(path))
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).touch()
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        for name in ("c", "d"):
            (temporary / name).touch()
    assert [state for state in seen if isinstance(state, list)] == [["a", "b"], [], [], ["c", "d"]]
    assert all(path != folder for path in seen), "the old folder was emptied where it stood"


# --- a disk that is full


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_the_files_name_and_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError) as raised, atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("half")
        full_disk()
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "old" and names(tmp_path) == ["file"]


def test_a_full_disk_is_seen_behind_what_libraries_raise():
    """safetensors says it in words; others raise something of their own while they handle it."""
    said = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert machine_fault(said).errno == errno.ENOSPC
    try:
        try:
            full_disk()
        except OSError:
            raise RuntimeError("while closing") from None
    except RuntimeError as error:
        assert machine_fault(error) is None, "somebody meant to hide it"
    try:
        try:
            full_disk()
        finally:
            raise RuntimeError("while closing")
    except RuntimeError as error:
        assert machine_fault(error).errno == errno.ENOSPC


def test_other_errors_are_not_the_machines_fault():
    for error in (ValueError("x"), FileNotFoundError(errno.ENOENT, "x", "f"), PermissionError(errno.EPERM, "x"), None):
        assert machine_fault(error) is None
    assert machine_fault(PermissionError(errno.EACCES, "denied", "file")).filename == "file"


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
