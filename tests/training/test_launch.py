"""The number of processes from the environment of each kind of launcher. Real launchers: tests/integration."""

from __future__ import annotations

import pytest

from accept_head.training.launch import trainer_options

TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION")
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
BY_LIGHTNING = {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("told", "devices", "nodes"),
    [
        ({}, 1, 1),
        (TORCHRUN, 4, 2),
        (BY_LIGHTNING, 2, 1),
        ({**BY_LIGHTNING, "LOCAL_WORLD_SIZE": "1"}, 2, 1),  # left behind by a vLLM engine
        ({"LOCAL_WORLD_SIZE": "1"}, 1, 1),
    ],
)
def test_processes_and_hosts(monkeypatch, told, devices, nodes):
    for name in TOLD:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("accept_head.training.launch._stop_together", lambda processes: None)  # no thread of ours here
    options = trainer_options()
    assert (options["devices"], options["num_nodes"]) == (devices, nodes)
