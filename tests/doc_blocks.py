"""The code blocks of the documentation: a Markdown parser finds them, and they are sorted by kind and checked.

`problems` runs nothing. It parses each command with its own parser, and resolves each name in Python blocks.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from markdown_it import MarkdownIt
from markdown_it.token import Token

from accept_head.cli import VERBS, main
from accept_head.errors import InputError

REPOSITORY = Path(__file__).parents[1]
SHELL, PYTHON, OPTIONS, TEXT = "shell", "python", "options", "text"
BUILTINS = ("export", "source")
OF_ALL_VERBS = ("config", "print_config", "help")
OURS = r"(accept_head|training|inference|tests|benchmarks|configs|checkpoints|docs)/[\w./*-]+"


@dataclass(frozen=True)
class Block:
    page: str  # its path in the repository
    line: int
    text: str
    info: str = ""  # what stands behind the fence

    @property
    def first_line(self) -> str:
        return self.text.strip("\n").splitlines()[0]

    @property
    def kind(self) -> str:
        word = self.first_line.split()[0]
        if self.info:
            return self.info
        if word in PROGRAMS or word in BUILTINS:
            return SHELL
        if word.startswith("--"):
            return OPTIONS
        try:
            compile(self.text, self.page, "exec")
        except SyntaxError:
            return TEXT
        return PYTHON

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.first_line[:60]})"


def blocks(page: str, text: str) -> list[Block]:
    """All indented and fenced blocks of a page."""
    return [
        Block(page, token.map[0] + 1, token.content, token.info.strip())
        for token in MarkdownIt("commonmark").parse(text)
        if token.type in ("fence", "code_block") and token.map
    ]


def _inline(text: str) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield from token.children or ()


def links(text: str) -> list[str]:
    """All addresses that a page links to or shows, outside of code."""
    found = [token.attrs.get("href") or token.attrs.get("src") for token in _inline(text)]
    return [str(address) for address in found if address]


def spans(text: str) -> list[str]:
    """All code within sentences and tables."""
    return [token.content for token in _inline(text) if token.type == "code_inline"]


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    tokens = MarkdownIt("commonmark").parse(text)
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command: a line, or several that a backslash or an open quote joins. Raises ValueError for a
    quote that is never closed."""
    waiting = ""
    for line in text.splitlines():
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:
            waiting += "\n"
            continue
        waiting = ""
        if words:
            yield words
    if waiting:
        raise ValueError(f"never ends: {waiting.strip()[:60]}")


# --- what is wrong with a block --------------------------------------------------------------------------------------


def problems(block: Block) -> list[str]:
    """What would not work as it stands there, without running it. Relative paths are looked up in the working
    directory, which should be the repository's."""
    check: dict[str, Callable[[str], list[str]]] = {SHELL: _shell, PYTHON: _python, OPTIONS: _options}
    return [f"{block}: {problem}" for problem in check.get(block.kind, lambda text: [])(block.text)]


def _shell(text: str) -> list[str]:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if checked.returncode:
        return [checked.stderr.strip()]
    try:
        found = list(commands(text))
    except ValueError as error:
        return [str(error)]
    return [problem for words in found for problem in _command(words)]


def _command(words: list[str]) -> list[str]:
    if words[0] in BUILTINS:
        return []
    if words[0] not in PROGRAMS:
        return [f"{words[0]}: a command that no check knows"]
    return PROGRAMS[words[0]](words[1:])


def _options(text: str) -> list[str]:
    """Lines that begin with an option that any verb might take; what follows two spaces explains it."""
    lines = [line for line in text.splitlines() if line.startswith("--")]
    return [problem for line in lines for problem in _specs(shlex.split(line.split("  ")[0]))]


def span_problems(span: str) -> list[str]:
    """What a span of code names wrongly: a file of the repository, a verb, the names of its options, a script or a
    target of make. Values may be left out there."""
    words = span.split()
    if re.fullmatch(OURS, span):
        return [] if "NAME" in span or [*REPOSITORY.glob(span)] else [f"{span}: no such file"]
    if words[0] in ("make", "python") and len(words) > 1:
        return PROGRAMS[words[0]](words[1:]) if not words[1].startswith("-") else []
    if words[0] == "accept-head":
        words = words[1:]
        if words and re.fullmatch(r"[a-z-]+", words[0]) and words[0] not in VERBS and not words[0].startswith("--"):
            return [f"unknown verb {words[0]!r}"]
    if len(words) < 2 or words[0] not in VERBS:
        return []
    names = [word[2:].partition("=")[0] for word in words if re.match(r"--\w", word)]
    return [f"{words[0]} has no --{name}" for name in names if name not in {*_parameters(words[0]), *OF_ALL_VERBS}]


@functools.cache
def _verb(verb: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """The verb's own parser reads the options; the verb itself is not run."""
    if verb not in VERBS:
        return (f"unknown verb {verb!r}",)
    module, name, _ = VERBS[verb]
    home = importlib.import_module(module)
    real = getattr(home, name)

    @functools.wraps(real)
    def not_run(**_: Any) -> None:
        pass

    said = io.StringIO()
    with mock.patch.object(home, name, not_run), redirect_stderr(said):
        code = main([verb, *options])
    return tuple(_specs(options)) if code == 0 else (said.getvalue().strip(),)


def _parameters(verb: str) -> dict[str, inspect.Parameter]:
    module, name, _ = VERBS[verb]
    return dict(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _accept_head(words: list[str]) -> list[str]:
    if not words:
        return ["no verb"]
    verb, options = words[0], words[1:]
    if "..." in options and verb in VERBS:  # stands for the options that the verb cannot do without
        given = [option for option in options if option != "..."]
        parameters = _parameters(verb).values()
        missing = [p.name for p in parameters if p.default is p.empty and f"--{p.name}" not in given]
        options = [*given, *(f"--{name}=..." for name in missing)]
    return list(_verb(verb, tuple(options)))


def _specs(options: list[str] | tuple[str, ...]) -> list[str]:
    """Policies behind --policy: the name and the options; files need not be there."""
    from accept_head.inference.policies.registry import COSTS, POLICIES, parse_option

    found = []
    begin = options.index("--policy") + 1 if "--policy" in options else len(options)
    for spec in options[begin:]:
        if spec.startswith("--"):
            break
        text, *pairs = spec.split(",")
        entry = POLICIES.get(text.partition(":")[0])
        if entry is None:
            found.append(f"policy {spec!r}: unknown")
            continue
        known = entry.option_types
        for key, _, value in (pair.partition("=") for pair in pairs):
            if key not in known and not (key == COSTS and entry.takes_costs):
                found.append(f"policy {spec!r}: unknown option {key!r}")
            elif key != COSTS:
                try:
                    parse_option(spec, key, value, known[key])
                except InputError as error:
                    found.append(str(error))
    return found


def _accelerate(words: list[str]) -> list[str]:
    from accelerate.commands.launch import launch_command_parser

    if words[:1] != ["launch"]:
        return [f"accelerate {words[:1]}: not checked"]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            launch = launch_command_parser().parse_args(words[1:])
    except SystemExit:
        return [said.getvalue().strip()]
    if launch.config_file and not Path(launch.config_file).is_file():
        return [f"{launch.config_file}: no such file"]
    if not launch.module or launch.training_script != "accept_head":
        return [f"launches {launch.training_script}, expected -m accept_head"]
    return _accept_head(launch.training_script_args)


def _make(words: list[str]) -> list[str]:
    text = (REPOSITORY / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) [:?]?= *(.*)$", text, re.MULTILINE))
    for _ in range(3):  # variables in variables
        text = re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
    targets = set(re.findall(r"^([\w./-]+):(?!=)", text, re.MULTILINE))
    return [f"make {word}: no such target" for word in words if "=" not in word and word not in targets]


def _pip(words: list[str]) -> list[str]:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [name for word in words for group in re.findall(r"\[([\w,]+)\]", word) for name in group.split(",")]
    return [f"no extra {name!r}" for name in asked if name not in extras]


def _vllm(words: list[str]) -> list[str]:
    """vLLM is not here: its JSON must be JSON, and our part of it one that we take."""
    from accept_head.inference.adapters.vllm.settings import Settings

    found: list[str] = [] if words[:1] == ["serve"] else [f"vllm {words[:1]}: not checked"]
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if option not in ("--speculative-config", "--additional-config"):
            continue
        try:
            read = json.loads(value)
            if option == "--additional-config":
                settings = Settings.of(SimpleNamespace(additional_config=read))
                found += ["no accept_head in it"] if settings is None else _specs(["--policy", settings.policy])
        except (ValueError, InputError) as error:
            found.append(f"{option}: {error}")
    return found


def _curl(words: list[str]) -> list[str]:
    try:
        for option, value in zip(words, [*words[1:], ""], strict=True):
            if option == "-d":
                json.loads(value)
    except ValueError as error:
        return [f"-d: {error}"]
    return []


def _script(words: list[str]) -> list[str]:
    return [] if (REPOSITORY / words[0]).is_file() else [f"{words[0]}: no such file"]


def _hf(words: list[str]) -> list[str]:
    return [] if words == ["auth", "login"] else [f"hf {' '.join(words)}: not checked"]


PROGRAMS: dict[str, Callable[[list[str]], list[str]]] = {
    "accept-head": _accept_head,
    "accelerate": _accelerate,
    "make": _make,
    "pip": _pip,
    "vllm": _vllm,
    "curl": _curl,
    "python": _script,
    "hf": _hf,
}


# --- Python ----------------------------------------------------------------------------------------------------------


def _python(text: str) -> list[str]:
    """Syntax; modules, what is imported from them, their attributes, and the keywords that are handed to them."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError as error:
        return [f"{error.msg} in line {error.lineno}"]
    found: list[str] = []
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Import):
                names |= {a.asname or a.name.split(".")[0]: importlib.import_module(a.name) for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
        except (ImportError, AttributeError) as error:
            found.append(str(error))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            if not hasattr(names[node.value.id], node.attr):
                found.append(f"{node.value.id} has no {node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(names.get(node.func.id)):
            found += _keywords(names[node.func.id], node)
    return found


def _keywords(function: Any, call: ast.Call) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    given = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    return [f"{ast.unparse(call.func)} takes no {name}" for name in given if name not in parameters]
