"""The API reference (docs/api.py, `make docs`) is complete, and pdoc reports no problems."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

from accept_head.cli import VERBS

PUBLIC = ("accept_head", "accept_head.inference")


def anchors(folder, module):
    """Ids on a module's page: names of what is in it."""
    page = folder / f"{module.replace('.', '/')}.html"
    return set(re.findall(r' id="([\w.]+)"', page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_it_is_built_and_has_every_public_name(repository, tmp_path, cli_environment):
    command = [sys.executable, repository / "docs" / "api.py", tmp_path]
    done = subprocess.run(command, env=cli_environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "index.html").is_file()
    for package in PUBLIC:
        names = set(importlib.import_module(package).__all__) - {"__version__"}
        assert names <= anchors(tmp_path, package)
    for verb, (module, name, _) in VERBS.items():
        assert name in anchors(tmp_path, module), verb
    for folder, package in (("accept_head", "accept_head"), ("training", "accept_head/training")):
        for source in (repository / folder).glob("[!_]*.py"):
            assert (tmp_path / package / f"{source.stem}.html").is_file(), source


@pytest.fixture(scope="module")
def api(repository):
    spec = importlib.util.spec_from_file_location("api_reference", repository / "docs" / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("no_such_name", '__all__ = ["missing"]', AttributeError),
        ("no_such_type", 'def f(x: "NoSuchType") -> None:\n    """Says `x`."""', UserWarning),
        ("as_it_should_be", 'def f(x: int) -> None:\n    """Says `x`."""', None),
    ],
)
def test_what_pdoc_would_only_warn_of_is_an_error(api, name, source, error, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f'"""A package."""\n{source}\n')
    monkeypatch.syspath_prepend(tmp_path)
    if error is None:
        api.build(tmp_path / "out", name)
        assert "f" in anchors(tmp_path / "out", name)
    else:
        with pytest.raises(error):
            api.build(tmp_path / "out", name)
