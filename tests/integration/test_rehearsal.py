"""The GPU's code paths on a machine without a GPU: runs tests/rehearsal in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

FOLDER = Path(__file__).parents[1] / "rehearsal"
FILES = sorted(file.name for file in FOLDER.glob("test_*.py"))
# Parts of the GPU benchmark take minutes each; benchmarks/gpu/README.md says how to rehearse them all.
CHOSEN = "not every_cell or head_sweep"


def test_there_are_such_tests() -> None:
    assert {"test_commands.py", "test_decoding.py", "test_training.py"} <= set(FILES)


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch lets no device be written in Python",
)
@pytest.mark.slow
@pytest.mark.timeout(3600)  # an operation takes ten times as long
@pytest.mark.parametrize("file", FILES)
def test_on_a_pretended_gpu(file: str) -> None:
    words = ["-q", "-p", "no:cacheprovider", "--show-capture=no", "-k", CHOSEN]
    command = [sys.executable, "-m", "pytest", str(FOLDER / file), *words]
    environment = {**os.environ, "ACCEPT_HEAD_REHEARSAL": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
