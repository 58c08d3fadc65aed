"""Checkpoints of training runs are written atomically on any disk."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from accept_head.training.checkpoints import AtomicCheckpoints
from accept_head.training.launch import trainer_options

STATE = {"state_dict": {"weight": torch.arange(6.0)}, "global_step": 7}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def through_the_systems_folder(*_, **__):
    raise AssertionError("written elsewhere first, perhaps on another disk")


def test_a_checkpoint_is_what_was_saved_and_was_written_beside_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "mkstemp", through_the_systems_folder)
    path = tmp_path / "run" / "last.ckpt"
    renamed = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda one, other: (renamed.append((one, other)), real(one, other)))
    AtomicCheckpoints().save_checkpoint(STATE, str(path))
    ((temporary, final),) = renamed
    assert Path(temporary).parent == path.parent and final == path
    found = torch.load(path, weights_only=True)
    assert found["global_step"] == 7 and torch.equal(found["state_dict"]["weight"], torch.arange(6.0))
    assert names(path.parent) == ["last.ckpt"]


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpoints().save_checkpoint(STATE, path)
    before = path.read_bytes()

    def full(self, data):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError) as raised:
        AtomicCheckpoints().save_checkpoint({**STATE, "global_step": 8}, path)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before and names(tmp_path) == ["last.ckpt"]


def test_every_trainer_has_them():
    assert any(isinstance(plugin, AtomicCheckpoints) for plugin in trainer_options()["plugins"])
