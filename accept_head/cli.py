"""The front door: one console command, one verb a step of the data flow.

Each verb is a function; jsonargparse makes its options, `--config` and `--print_config` from the signature. A verb's
module is imported only when it is chosen, so `--help` is quick and the ground floor stays free of the two above it.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from accept_head.allocator import keep_freed_blocks
from accept_head.config_file import check_config_files, config_names
from accept_head.errors import InputError
from accept_head.files import machine_fault
from accept_head.ranks import lost_a_rank, wait_for_the_launcher
from accept_head.version import VERSION

LONGEST_MESSAGE = 800  # characters
NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)  # what was given as a file's name cannot be one

VERBS = {
    "collect": ("accept_head.training.collect.verb", "collect", "prompts, draft and target -> coupled traces"),
    "train": ("accept_head.training.learn.run", "train", "traces and draft -> a head"),
    "profile": ("accept_head.inference.verbs.profile", "profile", "draft and target -> what a forward costs here"),
    "tune": (
        "accept_head.inference.verbs.tune",
        "tune",
        "traces, heads and costs -> thresholds, and what each policy costs",
    ),
    "calibrate": (
        "accept_head.inference.verbs.calibrate",
        "calibrate",
        "traces and a head -> its probabilities put right",
    ),
    "report": ("accept_head.inference.verbs.report", "report", "the same -> one HTML page with plots and every round"),
    "generate": ("accept_head.inference.verbs.generate", "generate_file", "prompts -> text and statistics"),
    "bench": (
        "accept_head.inference.verbs.bench",
        "bench",
        "policies side by side in wall clock, or on an arrival trace",
    ),
    "vllm-config": ("accept_head.inference.verbs.vllm_config", "vllm_config", "a tuned head -> vLLM's options"),
    "import-specdecpp": (
        "accept_head.training.specdecpp",
        "import_specdecpp",
        "the SpecDec++ research code's checkpoint, or data -> a head, or traces",
    ),
    "publish": ("accept_head.hub.publish", "publish", "a head -> a repository on the Hub"),
    "demo": ("accept_head.demo", "demo", "the whole flow on the embedded pair, and its measured gain"),
}

# What jsonargparse says of a value of another type: the parameter, a sentence for each type it may have, the value.
UNFIT = re.compile(r'Parser key "(\w+)": (?:Does not validate .* Given value: |Expected a .*?\. Got value: )(.*)')
KIND_WORDS = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
}  # of one, and of several

WORDS = {"publish": ("head", "repo")}  # options of a verb that may stand right after it without their names


def run() -> None:
    """Entry point of the console command: exit code 0 done, 2 the input is wrong (one line on stderr), 1 a bug."""
    if sys.argv[1:2] == ["train"]:
        keep_freed_blocks()
    raise SystemExit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one verb and return the exit code. Errors that are not InputError are raised."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(VERSION)
        return 0
    if "--list-policies" in arguments:
        print(_policies())
        return 0
    verb, options = arguments[0], list(arguments[1:])
    if verb not in VERBS:
        return _wrong_input(f"unknown verb {verb!r}, expected one of: {', '.join(VERBS)}")
    try:
        _call(verb, options)
    except InputError as error:
        return _wrong_input(str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_NAME:
            return _wrong_input(f"{str(error.filename)[:80]}: {error.strerror}")
        if fault := machine_fault(error):
            where = f"{fault.filename}: " if fault.filename else ""
            return _wrong_input(f"{where}{fault.strerror}; the same command goes on once that is mended")
        if lost_a_rank(error):
            return wait_for_the_launcher()
        print("accept-head: this is a bug; please report it with the traceback and the command line.", file=sys.stderr)
        raise
    return 0


def _call(verb: str, options: list[str]) -> None:
    from jsonargparse import ArgumentParser, auto_cli

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    module, name, _ = VERBS[verb]
    function = getattr(importlib.import_module(module), name)
    quiet_libraries()

    class OneLineParser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
            words = plainly(function, " ".join(str(message).split()).removesuffix("."))
            if "<unicode string>" in words:  # what yaml calls a text without saying which file it came from
                words = f"{next(config_names(options), '--config')}: {words}"
            raise InputError(f"{words} (see accept-head {verb} --help)")

        def parse_args(self, *arguments: Any, **more: Any) -> Any:
            return without_nulls(function, super().parse_args(*arguments, **more))

    check_config_files(options)
    options = gather_lists(function, name_words(verb, options))
    auto_cli(function, args=options, parser_class=OneLineParser, prog=f"accept-head {verb}", as_positional=False)


def without_nulls(function: Callable[..., object], parsed: Any) -> Any:
    """What was parsed, unless a `null` stands where the parameter allows none: the parser lets it pass."""
    for name, hint in get_type_hints(function).items():
        if name != "return" and type(None) not in (hint, *get_args(hint)) and name in parsed and parsed[name] is None:
            raise InputError(f"{name} is null, expected a value")
    return parsed


def plainly(function: Callable[..., object], message: str) -> str:
    """The parser's word on a value of another type, as one sentence that names no python type; any other as it is."""
    hints = get_type_hints(function)
    if (found := UNFIT.search(message)) is None or found[1] not in hints:
        return message
    *others, last = (word for kind in kinds(hints[found[1]]) for word in _kind_words(kind))
    expected = f"{', '.join(others)} or {last}" if others else last
    return f"{message[: found.start()]}{found[1]} is {found[2]}, expected {expected}"


def _kind_words(kind: Any) -> list[str]:
    """What a value of this type may be."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) is list:
        return [f"a list of {KIND_WORDS[get_args(kind)[0]][1]}"]
    if get_origin(kind) is dict:
        return [f"a mapping of {' to '.join(KIND_WORDS[each][1] for each in get_args(kind))}"]
    return [KIND_WORDS[kind][0]]


def name_words(verb: str, options: Sequence[str]) -> list[str]:
    """`publish HEAD user/name` as `publish --head=HEAD --repo=user/name`. The parser refuses words too many."""
    words = list(itertools.takewhile(lambda option: not option.startswith("-"), options))
    named = [f"--{name}={word}" for name, word in zip(WORDS.get(verb, ()), words, strict=False)]
    return [*named, *options[len(named) :]]


def gather_lists(function: Callable[..., object], options: Sequence[str]) -> list[str]:
    """`--head a b` or `--head a --head b` as the one JSON list that the parser takes, for parameters that are lists."""
    hints = {f"--{name}": kinds(hint) for name, hint in get_type_hints(function).items()}
    listed = {name for name, types in hints.items() if any(get_origin(kind) is list for kind in types)}
    gathered: dict[str, list[str]] = {}
    rest: list[str] = []
    current: list[str] | None = None
    for option in options:
        name, equals, value = option.partition("=")
        if name in listed:
            current = gathered.setdefault(name, [])
            current += [value] if equals else []
        elif option.startswith("--"):
            current = None
            rest.append(option)
        else:
            (rest if current is None else current).append(option)
    for name, values in gathered.items():
        rest += [name] if not values else [f"{name}={_joined(values, hints[name])}"]
    return rest


def _joined(values: list[str], types: list[Any]) -> str:
    """What was given for one list parameter, as the parser takes it. types: those that it may have."""
    texts = any(get_args(kind)[:1] == (str,) for kind in types if get_origin(kind) is list)
    if len(values) == 1 and (len(types) > 1 or isinstance(_value(values[0]), list)):
        return values[0]
    return json.dumps(values if texts else [_value(value) for value in values])


def kinds(hint: Any) -> list[Any]:
    """The types that a parameter may have, None aside."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [kind for kind in types if kind is not type(None)]


def _value(text: str) -> Any:
    """A number or a list, if it is one."""
    try:
        return json.loads(text) if text[:1] in "-.[0123456789" else text
    except (ValueError, RecursionError):
        return text


def _wrong_input(message: str) -> int:
    if bars := getattr(sys.modules.get("tqdm"), "tqdm", None):
        for bar in list(getattr(bars, "_instances", ())):
            bar.close()  # or the message would stand behind it, on the same line
    if os.environ.get("LOCAL_RANK", "0") != "0":
        print(file=sys.stderr)  # or it would stand behind rank 0's
    print(f"accept-head: error: {_shown(message)}", file=sys.stderr)
    return 2


def _shown(message: str) -> str:
    """One line that a terminal can be shown, whatever the input was that it quotes."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} …"


def _help() -> str:
    verbs = "\n".join(f"  {verb:16} {line}" for verb, (_, _, line) in VERBS.items())
    return (
        f"usage: accept-head VERB [options]\n\nverbs:\n{verbs}\n\n`accept-head VERB --help` lists a verb's options; "
        "`accept-head --list-policies` prints the policies."
    )


def _policies() -> str:
    """Every policy with its SPEC and its options. As they stand, all of them are lossless; what makes one lossy says so
    where it is used."""
    from accept_head.inference.policies.specs import POLICIES, option_types

    lines = []
    for entry in POLICIES.values():
        options = ", ".join(f"{name}={kind.__name__}" for name, kind in option_types(entry).items())
        lines += [f"  {entry.form:34} {entry.line}", *([f"  {'':34} options: {options}"] if options else [])]
    return "\n".join(
        [
            "--policy SPEC, NAME[:ARGUMENT][,option=value,…]; all are lossless, greedy and sampled, but for "
            "adaspec,lossy=true and budget,retrospective=true, which sampling refuses without --verifier match or "
            "--allow_lossy:",
            *lines,
            "every policy that drafts and whose argument is not COSTS also takes costs=FILE (accept-head profile) or "
            "costs=C (t_draft / t_target): a round ends when what the batch expects to gain no longer pays for a step",
        ]
    )


def _thread_error(error: threading.ExceptHookArgs) -> None:
    """A logger's thread may find out first that the disk is full; `main` says so in one line."""
    if machine_fault(error.exc_value) is None:
        threading.__excepthook__(error)


def quiet_libraries() -> None:
    """Progress and results are ours to print; libraries keep their warnings."""
    threading.excepthook = _thread_error
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning's own use of a deprecated torch name, and its remark that our batches are not index lists.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
    warnings.filterwarnings("ignore", message=".*Couldn't infer the batch indices.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Our sampler starts at the checkpoint's step by itself (training/learn/data.py).
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
