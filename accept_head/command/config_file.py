"""Checks of a `--config` file before jsonargparse reads it: it must be plain YAML of bounded size.

A YAML alias repeats the content of its anchor. With aliases of aliases, a few lines can expand to billions of values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from accept_head.errors import InputError, one_line

MOST_BYTES = 1 << 20
MOST_NESTED = 32
LONG_NUMBER = re.compile(r"\s*[-+]?(0[xob])?[0-9_]{30,}\s*", re.ASCII)
MOST_PLAIN = 1000  # characters of an unquoted value: yaml would compute a number from a long row of digits


def check_config_files(options: Sequence[str]) -> None:
    """Raises InputError naming a --config file that is too large, nested too deeply, not text, or has aliases.

    The parser reports all other errors.
    """
    for name in config_names(options):
        path = Path(name)
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > MOST_BYTES:
                raise InputError(f"--config {path}: has {path.stat().st_size} bytes, expected at most {MOST_BYTES}")
            text = path.read_text(encoding="utf-8")
            _check_tokens(path, text)
            _check_values(path, yaml.safe_load(text))
        except InputError:
            raise
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise InputError(
                f"--config {str(name)[-300:]}: not readable as YAML in UTF-8 ({one_line(error)})"
            ) from None


def config_names(options: Sequence[str]) -> Iterator[str]:
    """The files given by --config FILE or --config=FILE."""
    for option, value in zip(options, [*options[1:], ""], strict=False):  # options may be empty
        if option == "--config" or option.startswith("--config="):
            yield option.partition("=")[2] or value


def _check_tokens(path: Path, text: str) -> None:
    depth = 0
    opening = (
        yaml.BlockMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.FlowSequenceStartToken,
    )
    closing = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        depth += isinstance(token, opening) - isinstance(token, closing)
        if depth > MOST_NESTED:
            raise InputError(f"--config {path}: is nested more than {MOST_NESTED} deep")
        if isinstance(token, yaml.ScalarToken) and token.plain and len(token.value) > MOST_PLAIN:
            raise InputError(f"--config {path}: has a value of {len(token.value)} characters; put it in quotes")
        if isinstance(token, yaml.AliasToken):
            raise InputError(f"--config {path}: has an alias, *{token.value}; write out what it stands for")


def _check_values(path: Path, value: Any) -> None:
    """Raises InputError for numbers beyond 64 bits, and for a file that names another.

    Quoted numbers count as well, because the parser converts them.
    """
    if isinstance(value, dict):
        if "config" in value:
            raise InputError(f"--config {path}: has the key 'config', but one such file cannot name another")
        for part in value.values():
            _check_values(path, part)
    elif isinstance(value, list):
        for part in value:
            _check_values(path, part)
    elif (isinstance(value, int) and abs(value) >= 1 << 63) or (
        isinstance(value, str) and LONG_NUMBER.fullmatch(value)
    ):
        raise InputError(f"--config {path}: the number {str(value)[:24]} is too large")
