"""vLLM with an EAGLE-3 drafter and our policies: its text is vLLM's without speculation, its rounds our own loop's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accept_head import Pair, load_pair
from tests.inference.support.toy import random_head
from tests.integration.vllm.engines import at_most, our_rounds, use, worker_of
from tests.integration.vllm.test_sampled import FALSE_ALARM, ROWS, SAMPLES, sample, two_sample_p
from tests.integration.vllm.zstat import p_value, z_statistics

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
        {**speculation, "draft_sample_method": "probabilistic"},
        max_num_seqs=ROWS,
        additional_config={"accept_head": {"policy": "fixed:1"}},
        per_request_spec_decode_metrics="detailed",
    )


@pytest.fixture(scope="module")
def plain(make_llm: Any) -> Any:
    return make_llm(max_num_seqs=ROWS)


@pytest.fixture(scope="module")
def alone(plain: Any, generate: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    tokens: list[list[int]] = generate(plain, prompts[:100], temperature=0.0, max_tokens=TOKENS)
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


def test_long_samples_follow_the_target(
    speculative: Any, prompts: Sequence[list[int]], generate: Any, embedded_pair: Pair, head: str
) -> None:
    """The embedded draft model only gives the statistics a q."""
    use(speculative, head)
    at_most(speculative, 16)
    outputs = generate(speculative, prompts[::3], temperature=1.0, max_tokens=48, seed=7)
    statistics = z_statistics(embedded_pair.target, embedded_pair.draft, prompts[::3], outputs)
    assert p_value(statistics) > FALSE_ALARM, statistics


@pytest.mark.slow
def test_ten_thousand_samples_are_those_of_vllm_without_speculation(
    speculative: Any, plain: Any, prompts: Sequence[list[int]], generate: Any
) -> None:
    host = use(speculative, "max-prob:0.3,k_max=4")
    drawn = sample(speculative, prompts, generate, seed=2)
    assert host.metrics.read()["accepted"] > 0.1 * SAMPLES
    assert two_sample_p(sample(plain, prompts, generate, seed=1), drawn) > FALSE_ALARM


@pytest.fixture
def head(tmp_path: Path, embedded_pair: Pair) -> str:
    """One that reads the drafter's state and signals, and the embedding of the drawn token, whose id is not its place
    in the drafter's own vocabulary. It need not be good."""
    embeddings = embedded_pair.target.get_input_embeddings().weight
    head = random_head(256, signals=True, reads="before", std=0.1, embeddings=embeddings)
    head.save_pretrained(tmp_path / "head")
    return f"head:{tmp_path / 'head'}:0.98,k_max=6"


@pytest.mark.parametrize("policy", [*POLICIES[:3], "head"])
def test_rounds_are_those_of_our_own_loop(
    speculative: Any, embedded_pair_folder: Path, drafter: Path, prompts: Sequence[list[int]], policy: str, head: str
) -> None:
    """How many tokens were drafted and accepted, in every round. End tokens are ignored, so that texts are long."""
    from vllm import SamplingParams

    policy = head if policy == "head" else policy
    use(speculative, policy)
    at_most(speculative, 4)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[::12]]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = speculative.generate(inputs, sampling, use_tqdm=False)
    theirs = [
        list(zip(said.per_step_drafted, said.per_step_accepted, strict=True))
        for said in (output.outputs[0].spec_decode_metrics for output in outputs)
    ]
    # vLLM's first token comes with the prompt and without a draft, and it notes no round without one.
    begun = [[*prompt, output.outputs[0].token_ids[0]] for prompt, output in zip(prompts[::12], outputs, strict=True)]
    pair = load_pair(embedded_pair_folder / "target", drafter, device="cpu", dtype="float32")
    ours = our_rounds(pair, begun, policy, new_tokens=TOKENS - 1)
    assert theirs == [[each for each in mine if each[0]] for mine in ours]
    assert sum(accepted for each in theirs for _, accepted in each) > 40
    lengths = {drafted for each in theirs for drafted, _ in each}
    assert policy.startswith("fixed") or len(lengths) > 2, "the policy always drafts the same: the test has no power"
