"""The console command, with one verb for each step of the data flow.

Each verb is a function. jsonargparse makes its options, `--config` and `--print_config` from the signature. A verb's
module is imported only when it is chosen. So `--help` is quick, and this package does not depend on training and
inference.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from accept_head.command.allocator import keep_freed_blocks
from accept_head.command.config_file import check_config_files, config_names
from accept_head.command.libraries import quiet_libraries
from accept_head.command.options import gather_lists, name_words, plainly, without_nulls
from accept_head.command.ranks import lost_a_rank, wait_for_the_launcher
from accept_head.command.stopping import Stopped, leave, stopping_on_signals
from accept_head.errors import InputError
from accept_head.files import machine_fault
from accept_head.version import VERSION

LONGEST_MESSAGE = 800  # characters
NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)  # the given text cannot be a file name

VERBS = {
    "fit": ("accept_head.fit.verb", "fit", "a pair -> head, threshold, report, and what to use on this machine"),
    "collect": ("accept_head.training.collect.verb", "collect", "prompts, draft and target -> coupled traces"),
    "train": ("accept_head.training.learn.verb", "train", "traces and draft -> a head"),
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
        "accept_head.training.specdecpp.verb",
        "import_specdecpp",
        "the SpecDec++ research code's checkpoint, or data -> a head, or traces",
    ),
    "publish": ("accept_head.hub.publish", "publish", "a head -> a repository on the Hub"),
    "demo": ("accept_head.demo", "demo", "the whole flow on the embedded pair, and its measured gain"),
}


def run() -> None:
    """Entry point of the console command. Exit codes: 0 done, 2 wrong input (one line on stderr), 1 a bug, 143 or 130
    stopped by SIGTERM or Ctrl-C."""
    keep_freed_blocks()
    try:
        with stopping_on_signals(verb=next(iter(sys.argv[1:]), "")):
            code = main(sys.argv[1:])
    except Stopped as stopped:
        leave(stopped.exit_code)
    except Exception:
        print("accept-head: this is a bug; please report it with the traceback and the command line.", file=sys.stderr)
        raise
    raise SystemExit(code)


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
            if "<unicode string>" in words:  # yaml's name for a text, which does not tell the file
                words = f"{next(config_names(options), '--config')}: {words}"
            raise InputError(f"{words} (see accept-head {verb} --help)")

        def parse_args(self, *arguments: Any, **more: Any) -> Any:
            return without_nulls(function, super().parse_args(*arguments, **more))

    check_config_files(options)
    options = gather_lists(function, name_words(verb, options))
    auto_cli(function, args=options, parser_class=OneLineParser, prog=f"accept-head {verb}", as_positional=False)


def _wrong_input(message: str) -> int:
    if bars := getattr(sys.modules.get("tqdm"), "tqdm", None):
        for bar in list(getattr(bars, "_instances", ())):
            bar.close()  # otherwise the message would be on the bar's line
    if os.environ.get("LOCAL_RANK", "0") != "0":
        print(file=sys.stderr)  # otherwise the message would be on the line of rank 0's bar
    print(f"accept-head: error: {_shown(message)}", file=sys.stderr)
    return 2


def _shown(message: str) -> str:
    """The message as one line that is safe to print on a terminal, whatever input it quotes."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} …"


def _help() -> str:
    verbs = "\n".join(f"  {verb:16} {line}" for verb, (_, _, line) in VERBS.items())
    return (
        f"usage: accept-head VERB [options]\n\nverbs:\n{verbs}\n\n`accept-head VERB --help` lists a verb's options; "
        "`accept-head --list-policies` prints the policies."
    )


def _policies() -> str:
    """A list of all policies with SPEC and options. With default options all of them are lossless."""
    from accept_head.inference.policies.registry import POLICIES

    lines = []
    for entry in POLICIES.values():
        options = ", ".join(f"{name}={kind.__name__}" for name, kind in entry.option_types.items())
        lines += [f"  {entry.form:34} {entry.line}", *([f"  {'':34} options: {options}"] if options else [])]
    return "\n".join(
        [
            "--policy SPEC, NAME[:ARGUMENT][,option=value,…]; all are lossless, greedy and sampled, but for "
            "adaspec,lossy=true and budget,retrospective=true, which sampling refuses without --verifier match or "
            "--allow_lossy:",
            *lines,
            "COSTS is auto (learnt in serving; leviathan cannot), a file (accept-head profile) or t_draft / t_target. "
            "Every policy that drafts and whose argument it is not also takes costs=COSTS: a round ends when what the "
            "batch expects to gain no longer pays for a step",
        ]
    )
