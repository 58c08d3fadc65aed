"""The order of folders, rooms and files: which may import which. Also the size limit of a file.

inference imports accept_head, and training imports both. In each of the three folders the rooms have an order, and a
room imports only rooms before it. Every import counts, also one in a function or under TYPE_CHECKING. The files of a
room may import each other, but there is no cycle.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"accept_head": "accept_head", "training": "accept_head.training", "inference": "accept_head.inference"}
# A room is a package or a single module. The folder's own __init__ comes after all of its rooms.
ORDER = {
    "accept_head": [
        "version", "errors", "files", "console", "checksum", "randomness", "sampling", "signals", "acceptance",
        "alternatives", "quality", "calibration", "cost", "checkpoint", "eagle3", "pair", "prompts",
        "trace", "base", "head_config", "hub", "head",
        "command", "fit", "demo", "cli", "__main__",
    ],
    "training": ["halving", "threads", "checkpoints", "launch", "plan", "respond", "collect", "learn", "specdecpp"],
    "inference": [
        "policy", "costs", "kernels", "engine", "policies", "decode", "replay", "tune", "profile", "report", "bench",
        "adapters", "verbs",
    ],
}  # fmt: skip
FLOORS = ["accept_head", "inference", "training"]
FRONT_DOORS = ("cli", "fit", "demo")  # rooms of accept_head that call the floors above
MOST_LINES, MOST_ENTRIES = 300, 16  # of a file, and of the listing of inference/
HEAVY = ["lightning", "vllm", "flash_attn", "datasets", "jsonargparse"]


def read_tree():
    """Path from the repository's root → source, of every product file."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_of(path):
    folder, *parts = Path(path).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in parts if part != "__init__")])


def place_of(module):
    """(folder, room) of a module; the room of the folder's own __init__ is ""."""
    for folder in ("training", "inference", "accept_head"):
        package = FOLDERS[folder]
        if module == package or module.startswith(f"{package}."):
            return folder, module.removeprefix(package).removeprefix(".").split(".")[0]
    raise AssertionError(module)


def imported_names(source, package):
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


def import_graph(tree):
    """Module → the product's modules that it imports."""
    modules = {module_of(path): path for path in tree}
    graph = {}
    for module, path in modules.items():
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        found = set()
        for name in imported_names(tree[path], package):
            if name.split(".")[0] in ("training", "inference"):
                name = f"accept_head.{name}"  # a way round the package's name counts as well
            while name and name not in modules:  # a class in a module, or a module that is not ours
                name = name.rpartition(".")[0]
            found |= {name} - {"", module}
        graph[module] = found
    return graph


def wrong_floor(module, imported):
    (folder, room), (other, _) = place_of(module), place_of(imported)
    if folder == "accept_head" and room in FRONT_DOORS:
        return False
    return FLOORS.index(other) > FLOORS.index(folder)


def wrong_room(module, imported):
    (folder, room), (other, other_room) = place_of(module), place_of(imported)
    if folder != other or room == other_room:
        return False
    order = [*ORDER[folder], ""]
    return order.index(other_room) > order.index(room)


def cycles(graph):
    """The groups of modules that reach each other."""
    reached = {}
    for module in graph:
        found, todo = set(), [module]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        reached[module] = found
    return {frozenset(other for other in reached[m] if m in reached[other]) for m in graph if m in reached[m]}


def violations(tree, inference):
    """One line for each rule that is broken somewhere. inference: the names in that folder."""
    graph = import_graph(tree)
    found = set()
    for module, path in ((module_of(path), path) for path in tree):
        folder, room = place_of(module)
        if room and room not in ORDER[folder]:
            found.add(f"{path} is in no room")
            return found
        if len(tree[path].splitlines()) > MOST_LINES:
            found.add(f"{path} is longer than {MOST_LINES} lines")
        for imported in graph[module]:
            if wrong_floor(module, imported):
                found.add(f"{module} imports {imported}, on another floor")
            if wrong_room(module, imported):
                found.add(f"{module} imports {imported}, in a later room")
    found |= {f"cycle: {', '.join(sorted(group))}" for group in cycles(graph)}
    if len(inference) > MOST_ENTRIES:
        found.add(f"inference has more than {MOST_ENTRIES} entries")
    return found


def test_the_product_keeps_every_rule():
    tree = read_tree()
    names = [path.name for path in (ROOT / "inference").iterdir() if not path.name.startswith(("__pycache__", "."))]
    assert len({module_of(path) for path in tree}) == len(tree) > 150, "each file is read once"
    assert sorted(violations(tree, names)) == []


BROKEN = {
    "another floor": ("accept_head/cost.py", "import accept_head.inference.policy"),
    "a floor above": ("inference/policy.py", "from accept_head.training.plan import estimate"),
    "another floor, late": ("inference/policy.py", "def late():\n    from ..training.plan import estimate"),
    "a later room": ("inference/policy.py", "if TYPE_CHECKING:\n    from accept_head.inference.decode import loop"),
    "a room of the ground floor": ("accept_head/errors.py", "from accept_head.cost import total_time"),
    "a cycle": ("inference/decode/round.py", "import accept_head.inference.decode.loop"),
    "no room": ("inference/somewhere.py", ""),
    "300 lines": ("inference/policy.py", "\n" * (MOST_LINES + 1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_is_broken_is_seen(name):
    path, source = BROKEN[name]
    assert violations({**read_tree(), path: source}, [])


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_room_of_the_order_is_there(folder):
    rooms = {place_of(module_of(path))[1] for path in read_tree() if path.startswith(f"{folder}/")}
    assert rooms - {""} == set(ORDER[folder]) and len(ORDER[folder]) == len(rooms - {""})


# --- what importing does


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
