"""Fixtures for the tests that run vLLM: `make test-vllm`, or pytest in the environment that `make vllm-env` builds.

One process, eager, one thread. The variables here are set before vLLM is imported, because vLLM reads them at import.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two on shared cores are many times slower than one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or all engines side by side would share one core
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, on a CPU
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where tests can look into it
    "VLLM_NO_USAGE_STATS": "1",  # they would be sent away
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def vllm_is_there() -> bool:
    found = importlib.util.find_spec("vllm")
    return found is not None and found.origin is not None  # a mere folder of that name has no origin


class SkippedModule(pytest.Module):
    """Is not even imported; reports one skip with its reason."""

    def collect(self) -> Any:
        pytest.skip("vLLM is not installed here; `make test-vllm` runs these tests in an environment that has it")


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return None if vllm_is_there() else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def prompts(embedded_pair_folder: Path) -> list[list[int]]:
    """Token ids of the embedded pair's 240 test prompts, with the one that begins a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_pair_folder / "target")
    lines = (embedded_pair_folder / "prompts" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


@pytest.fixture(scope="module")
def make_llm(embedded_pair_folder: Path) -> Iterator[Callable[..., Any]]:
    """Makes vLLM engines on the embedded pair: make_llm(speculation=None, **options of vllm.LLM).

    speculation: entries of `speculative_config` beside the draft model; None decodes without one. Engines live as long
    as the module's tests; each takes some seconds and 1 GiB.
    """
    from vllm import LLM

    made = []

    def make(speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
        if speculation is not None:
            draft = {"method": "draft_model", "model": str(embedded_pair_folder / "draft")}
            options["speculative_config"] = {**draft, "num_speculative_tokens": 4, **speculation}
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 32,
            "async_scheduling": False,
            "disable_log_stats": False,
            "seed": 0,
        }
        made.append(LLM(model=str(embedded_pair_folder / "target"), **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()
    made.clear()


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    """generate(llm, prompts, **SamplingParams): the new token ids of each prompt, an end-of-text token included. With a
    seed each request has one of its own: requests of one seed draw the same numbers, and are not independent."""
    from vllm import SamplingParams

    def run(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        first = sampling.pop("seed", None)
        seeds = [None if first is None else first + 1000 * index for index in range(len(inputs))]
        each = [SamplingParams(**sampling, seed=seed) for seed in seeds]
        outputs = llm.generate(inputs, each, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run
