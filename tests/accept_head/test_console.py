"""Progress on a terminal is a bar; in a log it is whole lines, also while nothing is finished."""

from __future__ import annotations

import re
import sys
import time

import pytest

from accept_head import console
from accept_head.console import Progress


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY", 0.2)


def test_a_log_gets_whole_lines_with_what_is_done_left_and_the_rate(quick, capsys):
    with Progress(total=4, desc="collect", unit="prompt") as progress:
        for _ in range(4):
            time.sleep(0.25)
            progress.set_postfix_str("12 tokens/s", refresh=False)
            progress.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("collect: 0/4 prompts") and lines[-1].startswith("collect: 4/4 prompts")
    assert len(lines) >= 4 and "" not in lines
    assert any(
        re.fullmatch(r"collect: 2/4 prompts after 00:0\d, 00:0\d left, .*prompt.*, 12 tokens/s", line) for line in lines
    )


def test_slow_steps_of_a_loop_are_counted_once(quick, capsys):
    for _ in Progress(range(4), "rollouts", unit="shard"):
        time.sleep(0.35)
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert said[-1] == "4/4" and set(said) <= {f"{done}/4" for done in range(5)}


def test_a_step_without_an_end_is_heard_of(quick, capsys):
    progress = Progress(total=2, desc="collect", unit="prompt")
    said, until = "", time.monotonic() + 20
    while said.count("\n") < 3 and time.monotonic() < until:
        time.sleep(0.05)
        said += capsys.readouterr().err
    assert said.count("collect: 0/2 prompts") >= 3
    progress.close()
    progress.close()
    assert len(capsys.readouterr().err.splitlines()) == 1
    time.sleep(0.5)
    assert capsys.readouterr().err == "", "it ends with its bar"


def test_many_quick_steps_are_few_lines(capsys):
    assert list(Progress(range(1000), "rollouts", unit="shard")) == list(range(1000))
    assert len(capsys.readouterr().err.splitlines()) <= 3


def test_disabled_says_nothing(capsys):
    list(Progress(range(5), disable=True))
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    list(Progress(range(3), "rollouts"))
    assert "\r" in capsys.readouterr().err
