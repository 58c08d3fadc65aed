"""vLLM's V2 runner decodes correctly in Triton's interpreter, which other tests of V2 rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.vllm.interpreter import decode, in_interpreter

NEW_TOKENS, K = 24, 4


@pytest.fixture(scope="module")
def short_prompts(prompts: list[list[int]]) -> list[list[int]]:
    return sorted(prompts, key=len)[:4]


@pytest.fixture(scope="module")
def speculative(embedded_pair_folder: Path, short_prompts: list[list[int]]) -> dict[str, Any]:
    return run(speculation(embedded_pair_folder), short_prompts, temperature=0.0)


def speculation(pair: Path, **options: Any) -> dict[str, Any]:
    draft = {"method": "draft_model", "model": str(pair / "draft"), "num_speculative_tokens": K, **options}
    return {"model": str(pair / "target"), "speculative_config": draft}


def run(llm: dict[str, Any], prompts: list[list[int]], temperature: float) -> dict[str, Any]:
    runs = [{"prompts": prompts, "sampling": {"temperature": temperature, "max_tokens": NEW_TOKENS}}]
    (result,) = in_interpreter(decode, llm=llm, runs=runs)
    return result


def test_greedy_speculation_gives_what_transformers_give(
    speculative: dict[str, Any], embedded_pair: Any, short_prompts: list[list[int]]
) -> None:
    assert speculative["outputs"] == [greedy(embedded_pair.target, ids) for ids in short_prompts]
    assert all(set(rounds) == {K} for rounds in speculative["drafted"])
    assert sum(map(sum, speculative["accepted"])) > 0


@pytest.mark.slow
def test_greedy_speculation_gives_what_v2_gives_without(
    speculative: dict[str, Any], embedded_pair_folder: Path, short_prompts: list[list[int]]
) -> None:
    plain = run({"model": str(embedded_pair_folder / "target")}, short_prompts, temperature=0.0)
    assert speculative["outputs"] == plain["outputs"]
    assert "drafted" not in plain


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :].tolist()


def fails_in_the_child(word: str) -> None:
    raise ValueError(word)


def test_what_fails_in_the_other_process_is_said_here() -> None:
    with pytest.raises(AssertionError, match="ValueError: unmistakable"):
        in_interpreter(fails_in_the_child, word="unmistakable")
