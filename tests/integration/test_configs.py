"""Every recipe in configs/ begins with commands that accept it, and the paper's recipe equals the named one."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.doc_blocks import REPOSITORY, Block, problems

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_opens_with_commands_that_take_it(path, monkeypatch):
    """The verb's own parser reads the command with the config in it, so keys, values and required options are right."""
    monkeypatch.chdir(REPOSITORY)
    name = str(path.relative_to(REPOSITORY))
    commands = "\n".join(re.findall(r"^#   (\S.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert f"--config {name}" in commands
    assert problems(Block(name, 1, commands)) == []


@pytest.mark.parametrize("text", ["magic: 7", "epochs: many"])
def test_a_config_with_a_wrong_key_or_value_would_be_caught(text, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    command = f"accept-head train --config {tmp_path}/wrong.yaml --traces TRACES --draft DRAFT --out HEAD"
    assert problems(Block("made up", 1, command))


def test_the_specdecpp_config_is_the_recipe_of_that_name(repository):
    from accept_head.training.learn.recipe import RECIPES

    values = yaml.safe_load((repository / "configs" / "specdecpp.yaml").read_text())
    assert values.pop("recipe") == "specdecpp"
    assert RECIPES["specdecpp"].override(**values) == RECIPES["specdecpp"]
