"""The section "Serve" of docs/vllm.md, word for word: the wheel is built and installed, and the server answers.

The commands run in a folder that has only `checkpoints` from the repository. The wheel's sources have a version of
their own, which shows that neither the working directory nor the environment's editable install is used.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_soak import Server, environment, serving

from accept_head.cli import main
from accept_head.version import VERSION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OURS = f"{VERSION}+page"
MODULE = "python -m vllm.entrypoints.openai.api_server"


# --- what the page says ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def section(repository: Path) -> str:
    (text,) = re.findall(r"^## Serve\n(.*?)^## ", (repository / "docs" / "vllm.md").read_text(), re.DOTALL | re.M)
    return text


def command(section: str, program: str) -> list[str]:
    """The words of the section's one command of that program; a command is an indented paragraph."""
    texts = section.replace("\\\n", "").strip("\n").split("\n\n")
    paragraphs = [shlex.split(text) for text in texts if text.startswith("    ")]
    (words,) = [words for words in paragraphs if words[: len(program.split())] == program.split()]
    return words


def option(words: list[str], name: str) -> Any:
    return json.loads(words[words.index(name) + 1])


def options(words: list[str]) -> dict[str, Any]:
    """Each with what stands behind it, and the model."""
    flags = [index for index, word in enumerate(words) if word.startswith("--")]
    ends = [*flags[1:], len(words)]
    values = {words[begin]: " ".join(words[begin + 1 : end]) for begin, end in zip(flags, ends, strict=True)}
    parsed = {flag: json.loads(value) if value.startswith("{") else value for flag, value in values.items()}
    return {"model": words[2], **parsed}


def test_the_line_is_the_one_that_vllm_config_prints(
    section: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the paths, which it makes absolute, and the precision, with which greedy output can be compared."""
    monkeypatch.chdir(repository)
    assert main(command(section, "accept-head vllm-config")[1:]) == 0
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].replace(f"{repository}/", ""))
    assert options(command(section, "vllm serve")) == {**options(printed), "--dtype": "float32"}


# --- what is installed -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A folder to put on PYTHONPATH: the plugin from its wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("accept_head", "training", "inference"):
        shutil.copytree(repository / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    version = source / "accept_head" / "version.py"
    version.write_text(version.read_text().replace(f'"{VERSION}"', f'"{OURS}"'))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "wheels", source)
    (wheel,) = (folder / "wheels").iterdir()
    pip("install", "--no-deps", "--target", folder / "installed", wheel)
    return folder / "installed"


def pip(*arguments: Any) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, repository: Path, installed: Path) -> dict[str, Any]:
    """Where, and with what environment, the page's lines are run."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "checkpoints").symlink_to(repository / "checkpoints")
    return {"cwd": folder, "env": {**environment(), "PYTHONPATH": str(installed)}}


ASK = """
import importlib.metadata
import accept_head
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="accept_head")
print(accept_head.__file__, point.dist.version, point.load().__module__)
"""


def test_the_copy_from_the_wheel_is_imported(place: dict[str, Any], installed: Path) -> None:
    """PYTHONPATH comes before the editable install, whose finder is the last to be asked."""
    file, version, module = ask(place).split()
    assert Path(file).is_relative_to(installed)
    assert (version, module) == (OURS, "accept_head.inference.adapters.vllm.plugin")
    bare = {name: value for name, value in place["env"].items() if name != "PYTHONPATH"}
    assert not Path(ask({**place, "env": bare}).split()[0]).is_relative_to(installed)


def ask(place: dict[str, Any]) -> str:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=100, **place)
    return done.stdout


# --- what is served --------------------------------------------------------------------------------------------------


def startable(words: list[str]) -> list[str]:
    """`vllm serve …` as this environment can run it."""
    assert words[:2] == ["vllm", "serve"]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # it is vllm-cpu
        return [sys.executable, *MODULE.split()[1:], "--model", *words[2:]]
    return [str(Path(sys.executable).parent / "vllm"), *words[1:]]


@pytest.fixture(scope="module")
def server(section: str, place: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = command(section, "vllm serve")
    with serving(startable(words), tmp_path_factory.mktemp("log") / "vllm.log", seconds=1200, **place) as server:
        yield server


def test_the_page_says_how_to_start_vllm_cpu(section: str) -> None:
    assert MODULE in section


def test_the_server_runs_the_copy_from_the_wheel(server: Server, section: str) -> None:
    words = command(section, "vllm serve")
    policy = option(words, "--additional-config")["accept_head"]["policy"]
    assert f"accept-head {OURS}: policy {policy}\n" in server.log.read_text()


def test_the_curl_line_gets_the_targets_own_text(server: Server, section: str, repository: Path) -> None:
    words = [word.replace("http://localhost:8000", server.url) for word in command(section, "curl")]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100)
    reply = json.loads(done.stdout)
    asked = option(words, "-d")
    assert asked["temperature"] == 0
    assert reply["choices"][0]["text"] == greedy_text(repository / asked["model"], asked["prompt"], asked["max_tokens"])
    assert reply["usage"]["completion_tokens"] == asked["max_tokens"]


def greedy_text(model: Path, prompt: str, tokens: int) -> str:
    """By transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(prompt, return_tensors="pt")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    output = target.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def test_metrics_are_published(server: Server) -> None:
    """After the request above, and a second later at the latest."""
    time.sleep(2)
    metrics = server.metrics()
    verified = metrics["vllm:accept_head_num_verified_tokens_total"]
    assert verified == metrics["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert metrics["vllm:accept_head_num_accepted_tokens_total"] > 0


# --- what is refused -------------------------------------------------------------------------------------------------

# name: (what is put into which option of the page's line, what the log then says)
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "policy": ("--additional-config", {"accept_head": {"policy": "crystal-ball"}}, "policy 'crystal-ball'"),
    "field": ("--additional-config", {"accept_head": {"polcy": "fixed:4"}}, "accept_head: unknown field 'polcy'"),
    "method": (
        "--speculative-config",
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        "accept_head: speculative_config.method is 'ngram', expected 'draft_model' or 'eagle3'",
    ),
    "processes": (
        "--data-parallel-size",
        2,
        "accept_head: data_parallel_size is 2, which is not supported; expected 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_ends_the_server_with_a_sentence(
    name: str, section: str, place: dict[str, Any], tmp_path: Path
) -> None:
    flag, value, sentence = WRONG[name]
    words = command(section, "vllm serve")
    if flag not in words:
        words += [flag, ""]
    words[words.index(flag) + 1] = json.dumps(value)
    log = tmp_path / "vllm.log"
    with (
        pytest.raises(RuntimeError, match=r"vLLM is not up \(exit status [1-9]"),
        serving([*startable(words), "--enforce-eager"], log, **place),
    ):
        pytest.fail("it is up")
    assert sentence in log.read_text()
