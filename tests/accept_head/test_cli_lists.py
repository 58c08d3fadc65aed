"""List options: `--head A B`, `--head A --head B`, a JSON list, and a list in a YAML file mean the same."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from accept_head import cli
from accept_head.cli import main
from accept_head.command.options import gather_lists
from accept_head.inference.verbs.generate import generate_file
from accept_head.inference.verbs.tune import tune
from accept_head.training.learn.verb import train


def verb(
    traces: str,
    head: list[str] | None = None,
    thresholds: list[float] | None = None,
    lag: list[int] | None = None,
    depth: int | list[int] | None = None,
    w_rej: float | list[float] | None = None,
    seed: int = 0,
    write: bool = True,
    name: str = "",
) -> None:
    """A verb with options of every kind.

    Args:
        traces: A text.
        head: Texts.
        thresholds: Numbers.
        lag: Whole numbers.
        depth: A whole number or several.
        w_rej: A number or several.
        seed: A whole number.
        write: Yes or no.
        name: A text.
    """
    given = locals()
    usual = {"seed": 0, "write": True, "name": ""}
    received.append({key: value for key, value in given.items() if value != usual.get(key)})


received: list = []


@pytest.fixture
def call(monkeypatch, capsys):
    """call(*words) → what the verb was given beyond its defaults, or the one line on stderr."""
    module = ModuleType("verbs_of_this_test")
    module.verb = verb
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "verb", (module.__name__, "verb", "for this test"))

    def run(*words):
        received.clear()
        code = main(["verb", "--traces", "T", *words])
        error = capsys.readouterr().err
        assert (code, bool(received)) in ((0, True), (2, False))
        if code:
            assert len(error.splitlines()) == 1 and error.startswith("accept-head: error: ")
            return error
        assert received[0].pop("traces") == "T"
        return received[0]

    return run


SAME = [
    (["--head", "A"], {"head": ["A"]}),
    (["--head=A"], {"head": ["A"]}),
    (["--head", "A", "B"], {"head": ["A", "B"]}),
    (["--head", "A", "--head", "B"], {"head": ["A", "B"]}),
    (["--head=A", "--head=B"], {"head": ["A", "B"]}),
    (["--head=A", "B"], {"head": ["A", "B"]}),
    (["--head", '["A", "B"]'], {"head": ["A", "B"]}),
    (["--head", "A", "--seed", "3", "--head", "B"], {"head": ["A", "B"], "seed": 3}),
    (["--head", "A", "B", "--seed", "3"], {"head": ["A", "B"], "seed": 3}),
    (["--seed", "3", "--head", "A", "B"], {"head": ["A", "B"], "seed": 3}),
    (["--head", "a b/c", "ü=1"], {"head": ["a b/c", "ü=1"]}),
    (["--head", "v1.2/head", "-"], {"head": ["v1.2/head", "-"]}),
    (["--head", "C:\\heads\\mine"], {"head": ["C:\\heads\\mine"]}),
    (["--head", "it's", 'say "x"'], {"head": ["it's", 'say "x"']}),
    (["--thresholds", "0.3", "0.5"], {"thresholds": [0.3, 0.5]}),
    (["--thresholds", ".1", ".3"], {"thresholds": [0.1, 0.3]}),
    (["--thresholds", "0.3"], {"thresholds": [0.3]}),
    (["--thresholds=0.3"], {"thresholds": [0.3]}),
    (["--thresholds", "1e-1", "1"], {"thresholds": [0.1, 1.0]}),
    (["--thresholds", "-0.5", "-1"], {"thresholds": [-0.5, -1.0]}),
    (["--thresholds=-0.5"], {"thresholds": [-0.5]}),
    (["--thresholds", "[0.3, 0.5]"], {"thresholds": [0.3, 0.5]}),
    (["--thresholds=[0.3,0.5]"], {"thresholds": [0.3, 0.5]}),
    (["--thresholds", "0.3", "--lag", "0", "1"], {"thresholds": [0.3], "lag": [0, 1]}),
    (["--lag", "0", "--write", "false"], {"lag": [0], "write": False}),
    (["--depth", "3"], {"depth": 3}),
    (["--depth=3"], {"depth": 3}),
    (["--depth", "0", "3"], {"depth": [0, 3]}),
    (["--depth", "[0, 3]"], {"depth": [0, 3]}),
    (["--depth", "0", "--depth", "3", "--w_rej", "1", "6"], {"depth": [0, 3], "w_rej": [1.0, 6.0]}),
    (["--w_rej", "2.5"], {"w_rej": 2.5}),
    (["--name", "[A", "--head", "B"], {"name": "[A", "head": ["B"]}),
    (["--seed", "-3", "--name=a=b"], {"seed": -3, "name": "a=b"}),
    ([], {}),
]


@pytest.mark.parametrize(("words", "expected"), SAME)
def test_lists_are_gathered(call, words, expected):
    assert call(*words) == expected


@pytest.mark.parametrize("names", [["2024"], ["1.50", "A"], ["7", "8"], ["-1"]])
def test_texts_that_look_like_numbers_stay_texts(call, names):
    assert call("--head", *names) == {"head": names}


def test_a_text_that_begins_with_a_bracket_is_a_text(call):
    assert call("--head", "[draft] head") == {"head": ["[draft] head"]}


def test_lists_of_numbers_are_numbers_of_the_wanted_kind(call):
    assert [type(value) for value in call("--thresholds", "0", "1")["thresholds"]] == [float, float]
    assert [type(value) for value in call("--lag", "0", "1")["lag"]] == [int, int]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--head"], "head"),
        (["--head", "--seed", "3"], "head"),
        (["--thresholds", "high"], "thresholds"),
        (["--thresholds", "0.3", "high"], "thresholds"),
        (["--thresholds="], "thresholds"),
        (["--lag", "0.5"], "lag"),
        (["--lag", "0", "x"], "lag"),
        (["--depth", "deep"], "depth"),
        (["--seed", "1", "2"], "2"),
        (["stray"], "stray"),
        (["--heads", "A"], "heads"),
    ],
)
def test_wrong_lists_are_refused_by_name(call, words, named):
    assert named in call(*words)


def test_a_yaml_gives_lists_and_flags_win(call, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("head: [A, B]\nthresholds: [0.3, 0.5]\nseed: 4\ndepth: 2\n")
    given = {"head": ["A", "B"], "thresholds": [0.3, 0.5], "seed": 4, "depth": 2}
    assert call("--config", str(file)) == given
    for words in (["--config", str(file), "--head", "C"], ["--head", "C", "--config", str(file)]):
        assert call(*words) == {**given, "head": ["C"]}
    assert call(f"--config={file}", "--thresholds", "0.1", "--depth", "0", "1") == {
        **given,
        "thresholds": [0.1],
        "depth": [0, 1],
    }
    file.write_text("thresholds: [high]\n")
    assert "thresholds" in call("--config", str(file))


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "head:x:0.5", "--seed", "3", "--out=o"],
        ["--seed", "-3", "stray", "words"],
        ["--config", "a.yaml", "--print_config"],
        ["-h"],
        [],
    ],
)
@pytest.mark.parametrize("function", [generate_file, tune, train, verb])
def test_options_that_are_no_lists_pass_unchanged(function, options):
    assert gather_lists(function, options) == options


def test_the_stops_of_generate_and_the_heads_of_tune_are_lists():
    assert gather_lists(generate_file, ["--stop", "a", "b c", "--out", "o"]) == ["--out", "o", '--stop=["a", "b c"]']
    assert gather_lists(generate_file, ["--stop", "\n\n"]) == ['--stop=["\\n\\n"]']
    assert gather_lists(tune, ["--head", "A", "--traces", "T", "--head", "B"]) == ["--traces", "T", '--head=["A", "B"]']
