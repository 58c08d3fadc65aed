"""Which floor may import which: accept_head below, training and inference above it and apart from each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONT_DOORS = {"cli.py", "demo.py"}  # they call both floors
HEAVY = ["lightning", "vllm", "flash_attn", "datasets", "jsonargparse"]


def imported(source, package):
    """Dotted names that a module of `package` imports, wherever in the file, relative ones resolved."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], node.module or ""]) if node.level else node.module
            names |= {f"{base.rstrip('.')}.{alias.name}" for alias in node.names}
    return names


def forbidden_imports(source, package, forbidden):
    return sorted(
        name for name in imported(source, package) if any(name == f or name.startswith(f + ".") for f in forbidden)
    )


def modules(folder, package):
    """(path, package) of every module under a source folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path, ".".join([package, *path.parent.relative_to(ROOT / folder).parts])


RULES = [
    ("accept_head", "accept_head", ["accept_head.training", "accept_head.inference", "training", "inference"]),
    ("training", "accept_head.training", ["accept_head.inference", "training", "inference"]),
    ("inference", "accept_head.inference", ["accept_head.training", "training", "inference"]),
]


@pytest.mark.parametrize(("folder", "package", "forbidden"), RULES, ids=[rule[0] for rule in RULES])
def test_imports_only_point_down(folder, package, forbidden):
    found = {
        str(path.relative_to(ROOT)): bad
        for path, own_package in modules(folder, package)
        if not (folder == "accept_head" and path.name in FRONT_DOORS)
        and (bad := forbidden_imports(path.read_text(encoding="utf-8"), own_package, forbidden))
    }
    assert found == {}
    assert len(list(modules(folder, package))) > 3, "the rule must have looked at something"


@pytest.mark.parametrize(
    "source",
    [
        "import accept_head.training",
        "import accept_head.training.learn.run as run",
        "from accept_head import training",
        "from accept_head.training import run",
        "from . import training",
        "from .training.run import train",
        "def late():\n    from accept_head.training.learn.run import train",
        "if TYPE_CHECKING:\n    import accept_head.training",
    ],
)
def test_the_rule_sees_every_way_to_import(source):
    assert forbidden_imports(source, "accept_head", ["accept_head.training"])


def test_the_rule_resolves_relative_imports_between_the_two_upper_floors():
    assert forbidden_imports("from ..inference import decode", "accept_head.training", ["accept_head.inference"])
    assert not forbidden_imports("from .data import TraceData", "accept_head.training", ["accept_head.inference"])
    assert not forbidden_imports("from accept_head.head import HeadConfig", "accept_head", ["accept_head.training"])


def python(code, cwd):
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_importing_the_package_loads_no_heavy_library(tmp_path):
    done = python(f"import sys, accept_head; print([name for name in {HEAVY} if name in sys.modules])", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["training", "inference"])
def test_a_source_folder_is_not_importable_under_its_own_name(name):
    done = python(f"import {name}", ROOT)
    assert done.returncode == 1
    assert f"ImportError: import this package as accept_head.{name}" in done.stderr
