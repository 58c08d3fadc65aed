"""Translates the user's options for the parser, and the parser's errors for the user.

jsonargparse makes a verb's options from its signature. It takes a list as one JSON text, accepts `null`, and names
python types in its errors.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from accept_head.errors import InputError

# jsonargparse's message about a value of a wrong type: the parameter, a sentence for each allowed type, the value.
UNFIT = re.compile(r'Parser key "(\w+)": (?:Does not validate .* Given value: |Expected a .*?\. Got value: )(.*)')
KIND_WORDS = {  # for one value and for several
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
}

WORDS = {"publish": ("head", "repo")}  # options that may directly follow the verb without their names


def without_nulls(function: Callable[..., object], parsed: Any) -> Any:
    """The parsed options. Raises InputError for a `null` where the parameter allows none, which the parser accepts."""
    for name, hint in get_type_hints(function).items():
        if name != "return" and type(None) not in (hint, *get_args(hint)) and name in parsed and parsed[name] is None:
            raise InputError(f"{name} is null, expected a value")
    return parsed


def plainly(function: Callable[..., object], message: str) -> str:
    """The parser's message about a value of a wrong type, without python types. Other messages stay unchanged."""
    hints = get_type_hints(function)
    if (found := UNFIT.search(message)) is None or found[1] not in hints:
        return message
    *others, last = (word for kind in kinds(hints[found[1]]) for word in _kind_words(kind))
    expected = f"{', '.join(others)} or {last}" if others else last
    return f"{message[: found.start()]}{found[1]} is {found[2]}, expected {expected}"


def _kind_words(kind: Any) -> list[str]:
    """Words for the values that this type allows."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) is list:
        return [f"a list of {KIND_WORDS[get_args(kind)[0]][1]}"]
    if get_origin(kind) is dict:
        return [f"a mapping of {' to '.join(KIND_WORDS[each][1] for each in get_args(kind))}"]
    return [KIND_WORDS[kind][0]]


def name_words(verb: str, options: Sequence[str]) -> list[str]:
    """`publish HEAD user/name` as `publish --head=HEAD --repo=user/name`. The parser refuses superfluous words."""
    words = list(itertools.takewhile(lambda option: not option.startswith("-"), options))
    named = [f"--{name}={word}" for name, word in zip(WORDS.get(verb, ()), words, strict=False)]
    return [*named, *options[len(named) :]]


def gather_lists(function: Callable[..., object], options: Sequence[str]) -> list[str]:
    """For list parameters: `--head a b` or `--head a --head b` as the single JSON list that the parser takes."""
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
    """The values of one list parameter in the parser's form. types: the types that the parameter allows."""
    texts = any(get_args(kind)[:1] == (str,) for kind in types if get_origin(kind) is list)
    if len(values) == 1 and (len(types) > 1 or isinstance(_value(values[0]), list)):
        return values[0]
    return json.dumps(values if texts else [_value(value) for value in values])


def kinds(hint: Any) -> list[Any]:
    """The types that a parameter allows, without None."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [kind for kind in types if kind is not type(None)]


def _value(text: str) -> Any:
    """The text as a number or list if possible, otherwise unchanged."""
    try:
        return json.loads(text) if text[:1] in "-.[0123456789" else text
    except (ValueError, RecursionError):
        return text
