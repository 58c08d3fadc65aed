"""The installed package: one typed import package with the three folders in it, and nothing else at the top level."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    # From a copy of what git knows: building leaves folders behind, and untracked files must not be what makes it work.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=repository, capture_output=True, text=True
    )
    for name in names.stdout.splitlines():
        if name.startswith(("accept_head/", "training/", "inference/")) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (repository / name).is_symlink():
                target.symlink_to(os.readlink(repository / name))
            elif (repository / name).exists():
                target.write_bytes((repository / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_one_package_with_every_module_once(wheel, repository):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"accept_head"}
    expected = {"accept_head/py.typed", "accept_head/fit/mix.jsonl.gz", "accept_head/inference/report/page.html"}
    for folder, place in (("accept_head", ""), ("training", "training/"), ("inference", "inference/")):
        for path in (repository / folder).rglob("*.py"):
            relative = path.relative_to(repository / folder)
            if folder != "accept_head" or relative.parts[0] not in ("training", "inference"):
                expected.add(f"accept_head/{place}{relative.as_posix()}")
    assert set(names) == expected


def test_the_installed_wheel_imports_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    code = (
        "import accept_head, accept_head.training.collect.verb, accept_head.inference;"
        "print(accept_head.__file__, end=' ');"
        "print(accept_head.training.__file__, accept_head.inference.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(str(site)) == 3
