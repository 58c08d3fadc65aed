"""Every command and option that README and the configs name exists, and the README's Python runs."""

from __future__ import annotations

import importlib
import inspect
import json
import re

import pytest
import yaml

from accept_head.cli import VERBS

PARAMETERS = {
    verb: set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    for verb, (module, name, _) in VERBS.items()
}


def commands(text):
    """(verb, options) of every accept-head command line in a text."""
    for line in text.splitlines():
        if found := re.search(r"(?:accept-head|-m accept_head) +([\w-]+)((?: +--?\w+.*)?)$", line.strip("# `")):
            yield found[1], re.findall(r"--(\w+)", found[2])


def test_readme_names_only_what_exists(repository):
    found = list(commands((repository / "README.md").read_text()))
    assert {verb for verb, _ in found} >= {"collect", "train"}
    for verb, options in found:
        assert set(options) <= PARAMETERS[verb] | {"config"}


def test_a_made_up_option_would_be_caught():
    ((verb, options),) = commands("    accept-head train --traces T --magic 7")
    assert not set(options) <= PARAMETERS[verb]


def test_every_config_opens_with_a_command_that_takes_its_keys(repository):
    paths = sorted((repository / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        text = path.read_text()
        verb, options = next(commands(text))
        keys = set(yaml.safe_load(text))
        assert keys <= PARAMETERS[verb] and set(options) <= PARAMETERS[verb] | {"config"}, path
        required = {
            name
            for name, parameter in inspect.signature(_function(verb)).parameters.items()
            if parameter.default is inspect.Parameter.empty
        }
        assert required <= keys | set(options), path


def _function(verb):
    module, name, _ = VERBS[verb]
    return getattr(importlib.import_module(module), name)


def test_the_specdecpp_config_is_the_recipe_of_that_name(repository):
    from accept_head.training.learn.recipe import RECIPES

    values = yaml.safe_load((repository / "configs" / "specdecpp.yaml").read_text())
    assert values.pop("recipe") == "specdecpp"
    assert RECIPES["specdecpp"].override(**values) == RECIPES["specdecpp"]


def test_the_python_of_the_readme_runs(repository, embedded_pair_folder, tmp_path, monkeypatch, capsys):
    import torch

    from accept_head import AcceptanceHead, HeadConfig

    torch.manual_seed(0)
    AcceptanceHead(HeadConfig(hidden_size=128)).save_pretrained(tmp_path / "head")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    for name in ("target", "draft"):
        code = code.replace(f'"{name.upper()}"', repr(str(embedded_pair_folder / name)))
    exec(compile(code, "README.md", "exec"), {})
    assert "DecodeStats" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo.json"])
def test_readme_quotes_the_committed_result(repository, name):
    """Each policy's figures in the README's table are those of the JSON."""
    result = json.loads((repository / "benchmarks" / "results" / name).read_text())
    readme = (repository / "README.md").read_text()
    for row in result["summary"]["policies"]:
        assert re.search(
            rf"{re.escape(row['name'])}\b.*{row['discard_rate']:.3f}.*{row['verification_rate']:.3f}", readme
        ), row["name"]
