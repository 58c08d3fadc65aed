"""vLLM with an EAGLE-3 drafter and our policies: its text is vLLM's without speculation, its rounds our own loop's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accept_head import load_pair
from accept_head.inference import generate as our_loop
from tests.integration.vllm.engines import at_most, use, worker_of

K_MAX, TOKENS = 6, 24
POLICIES = ("fixed:3", "confidence:0.1,k_max=6", "cumulative-confidence:0.1,k_max=6", "online-logistic:0.1,k_max=6")


@pytest.fixture(scope="module")
def drafter(embedded_pair_folder: Path) -> Path:
    """The trained one of the embedded target."""
    return embedded_pair_folder / "eagle3"


@pytest.fixture(scope="module")
def speculative(make_llm: Any, drafter: Path) -> Any:
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K_MAX}
    return make_llm(
        speculation,
        max_num_seqs=16,
        additional_config={"accept_head": {"policy": "fixed:1"}},
        per_request_spec_decode_metrics="detailed",
    )


@pytest.fixture(scope="module")
def alone(make_llm: Any, generate: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    tokens: list[list[int]] = generate(make_llm(max_num_seqs=16), prompts[:100], temperature=0.0, max_tokens=TOKENS)
    return tokens


def test_the_plugin_is_loaded_by_vllm_itself(speculative: Any) -> None:
    from accept_head.inference.adapters.vllm.v1 import AcceptHeadEagleProposer

    assert type(worker_of(speculative).drafter) is AcceptHeadEagleProposer


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_that_of_the_target_alone(
    speculative: Any, alone: list[list[int]], prompts: Sequence[list[int]], generate: Any, policy: str, rows: int
) -> None:
    count = 100 if rows == 16 else 12
    use(speculative, policy)
    at_most(speculative, rows)
    assert generate(speculative, prompts[:count], temperature=0.0, max_tokens=TOKENS) == alone[:count]


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_rounds_are_those_of_our_own_loop(
    speculative: Any,
    embedded_pair_folder: Path,
    drafter: Path,
    prompts: Sequence[list[int]],
    generate: Any,
    policy: str,
) -> None:
    pair = load_pair(embedded_pair_folder / "target", drafter, device="cpu", dtype="float32")
    ours = our_loop(pair.target, pair.draft, prompts[:8], policy=policy, max_new_tokens=TOKENS, batch_size=1)
    host = use(speculative, policy)
    at_most(speculative, 1)
    generate(speculative, prompts[:8], temperature=0.0, max_tokens=TOKENS)
    theirs = host.metrics.read()
    assert theirs["drafted"] > 0 < theirs["accepted"]
    assert theirs["drafted"] == sum(each.drafted for each in ours.stats)
    assert theirs["accepted"] == sum(each.accepted for each in ours.stats)
