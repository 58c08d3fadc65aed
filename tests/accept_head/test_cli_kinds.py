"""A value of a wrong type gives one sentence with the option, the value and what was expected, for every option."""

from __future__ import annotations

import importlib
import typing

import pytest

from accept_head.cli import VERBS, main
from accept_head.command import options
from accept_head.command.options import kinds

WRONG = [
    (["tune", "--k_max", "x"], "k_max is ['x'], expected a list of integers"),
    (["bench", "--temperature", "0.3", "high"], "temperature is [0.3, 'high'], expected a list of numbers"),
    (["collect", "--max_prompts", "1.5"], "max_prompts is 1.5, expected an integer"),
    (["collect", "--dry_run", "maybe"], "dry_run is maybe, expected true or false"),
    (["collect", "--max_memory", "3"], "max_memory is 3, expected a mapping of texts to texts"),
    (["tune", "--t_draft", "fast"], "t_draft is fast, expected a number"),
    (["tune", "--search", "random"], "search is random, expected grid or cost"),
    (["train", "--alternatives", "some"], "alternatives is some, expected an integer or all"),
    (["train", "--depth", "deep"], "depth is deep, expected an integer or a list of integers"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_value_of_another_type_is_refused_in_words(words, sentence, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"accept-head: error: {sentence} (see accept-head {words[0]} --help)\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_words_for_its_kinds(verb):
    module, function, _ = VERBS[verb]
    hints = typing.get_type_hints(getattr(importlib.import_module(module), function))
    for name, hint in hints.items():
        if name != "return":
            words = [word for kind in kinds(hint) for word in options._kind_words(kind)]
            assert words and all(words), name


def test_what_the_parser_says_otherwise_stays():
    message = "Option 'head' is required but not provided"
    assert options.plainly(main, message) == message
