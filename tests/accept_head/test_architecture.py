"""The order of folders, rooms and files: which may import which. Also the size limit of a file.

training and inference both import accept_head, but not each other. In each of the three folders the rooms have an
order, and a room imports only rooms before it. Every import counts, also one in a function or under TYPE_CHECKING. The
files of a room may import each other, but there is no cycle.
"""

import ast
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"accept_head": "accept_head", "training": "accept_head.training", "inference": "accept_head.inference"}
# A room is a package or a single module. The folder's own __init__ comes after all of its rooms.
ORDER = {
    "accept_head": [
        "version", "errors", "files", "console", "checksum", "randomness",
        "sampling", "signals", "acceptance", "alternatives", "quality", "calibration", "cost", "pair", "prompts",
        "trace", "base", "head_config", "hub", "head",
        "command", "cli", "demo", "__main__",
    ],
    "training": ["halving", "threads", "checkpoints", "launch", "plan", "respond", "collect", "learn", "specdecpp"],
    "inference": [
        "policy", "costs", "kernels", "engine", "policies", "decode", "replay", "tune", "profile", "report", "bench",
        "adapters", "verbs",
    ],
}  # fmt: skip
FRONT_DOORS = {"accept_head.cli", "accept_head.demo"}  # they call both floors above
MOST_LINES, MOST_ENTRIES = 300, 16  # of a file, and of the listing of inference/
HEAVY = ["lightning", "vllm", "flash_attn", "datasets", "jsonargparse"]

# What does not hold yet. An entry that is mended must go, so this can only shrink.
KNOWN: set[str] = set()


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
    if module in FRONT_DOORS:
        return False
    (folder, _), (other, _) = place_of(module), place_of(imported)
    return other not in (folder, "accept_head")


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


def violations(tree, inference=()):
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
    found = violations(tree, names)
    assert sorted(found - KNOWN) == [], "new violations"
    assert sorted(KNOWN - found) == [], "mended: take them out of KNOWN"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_room_of_the_order_is_there(folder):
    rooms = {place_of(module_of(path))[1] for path in read_tree() if path.startswith(f"{folder}/")}
    assert rooms - {""} == set(ORDER[folder]) and len(ORDER[folder]) == len(rooms - {""})


# --- the rules can fail

WAYS_TO_IMPORT = [
    "import accept_head.{parent}.{leaf}",
    "import accept_head.{parent}.{leaf} as other",
    "from accept_head.{parent} import {leaf}",
    "from accept_head.{parent}.{leaf} import anything",
    "from {parent}.{leaf} import anything",
    "def late():\n    from accept_head.{parent}.{leaf} import anything",
    "if TYPE_CHECKING:\n    import accept_head.{parent}.{leaf}",
]


def tree_of(sources):
    """A tree with these files, path → source, and some that they may import."""
    files = ["accept_head/errors.py", "accept_head/cost.py", "accept_head/cli.py"]
    files += ["training/launch.py", "training/learn/run.py", "training/respond/vllm.py"]
    files += ["inference/policy.py", "inference/costs/files.py", "inference/decode/loop.py", "inference/verbs/tune.py"]
    folders = {f"{parent}/__init__.py" for file in files for parent in Path(file).parents if parent != Path(".")}
    return dict.fromkeys([*files, *folders], "") | sources


def test_a_tree_without_imports_breaks_no_rule():
    assert violations(tree_of({}), ["a"] * MOST_ENTRIES) == set()
    allowed = "from accept_head.errors import InputError\nimport torch\nfrom accept_head.inference.costs import files"
    assert violations(tree_of({"inference/decode/loop.py": allowed})) == set()
    front_door = "import accept_head.inference.verbs.tune, accept_head.errors"
    assert violations(tree_of({"accept_head/cli.py": front_door})) == set()


def test_the_rules_look_at_each_file_once():
    tree = read_tree()
    assert len({module_of(path) for path in tree}) == len(tree) > 150
    assert not any(path.startswith(("accept_head/training/", "accept_head/inference/")) for path in tree)


FORBIDDEN = [
    ("accept_head/cost.py", "training.learn", "run", "on another floor"),
    ("accept_head/cost.py", "inference.costs", "files", "on another floor"),
    ("training/launch.py", "inference.costs", "files", "on another floor"),
    ("inference/policy.py", "training.learn", "run", "on another floor"),
    ("training/launch.py", "training.learn", "run", "in a later room"),
    ("training/respond/vllm.py", "training.learn", "run", "in a later room"),
    ("inference/policy.py", "inference.costs", "files", "in a later room"),
    ("inference/costs/files.py", "inference.decode", "loop", "in a later room"),
]


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
@pytest.mark.parametrize(("importer", "parent", "leaf", "why"), FORBIDDEN)
def test_an_import_that_points_upward_is_seen(importer, parent, leaf, why, way):
    module = module_of(importer)
    found = violations(tree_of({importer: way.format(parent=parent, leaf=leaf)}))
    assert found == {f"{module} imports accept_head.{parent}.{leaf}, {why}"}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("accept_head/cost.py", "from . import training"),
        ("accept_head/cost.py", "from .training.learn import run"),
        ("training/launch.py", "from .learn import run"),
        ("training/launch.py", "from ..inference.costs import files"),
        ("training/respond/vllm.py", "from ..learn.run import anything"),
        ("training/respond/__init__.py", "from ..learn.run import anything"),
    ],
)
def test_a_relative_import_that_points_upward_is_seen(importer, source):
    (line,) = violations(tree_of({importer: source}))
    assert line.endswith(("on another floor", "in a later room"))


def test_rooms_of_the_ground_floor_have_an_order():
    assert violations(tree_of({"accept_head/errors.py": "from accept_head.cost import total_time"})) == {
        "accept_head.errors imports accept_head.cost, in a later room"
    }
    assert violations(tree_of({"accept_head/cost.py": "from accept_head.errors import InputError"})) == set()
    assert violations(tree_of({"accept_head/cost.py": "from accept_head import load_pair"})) == {
        "accept_head.cost imports accept_head, in a later room"
    }


def test_a_file_outside_every_room_is_seen():
    assert violations(tree_of({"inference/fused_loop.py": ""})) == {"inference/fused_loop.py is in no room"}


def test_a_long_file_and_a_long_listing_are_seen():
    assert violations(tree_of({"inference/policy.py": "\n" * MOST_LINES})) == set()
    long = tree_of({"inference/policy.py": "\n" * (MOST_LINES + 1)})
    assert violations(long) == {"inference/policy.py is longer than 300 lines"}
    assert violations(tree_of({}), ["a"] * (MOST_ENTRIES + 1)) == {"inference has more than 16 entries"}


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("hidden", ["{}", "def late():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_a_cycle_in_one_room_is_seen(length, hidden):
    names = [f"part{place}" for place in range(length)]
    imports = {a: f"import accept_head.inference.decode.{b}" for a, b in pairwise([*names, names[0]])}
    imports[names[-1]] = hidden.format(imports[names[-1]])
    sources = {f"inference/decode/{name}.py": source for name, source in imports.items()}
    found = violations(tree_of(sources))
    assert found == {f"cycle: {', '.join(f'accept_head.inference.decode.{name}' for name in names)}"}
    assert violations(tree_of(sources | {f"inference/decode/{names[-1]}.py": ""})) == set()


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
