"""Greedy output under every policy equals vLLM's without speculation. The drafts equal those of our own loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accept_head import InputError, Pair
from accept_head.inference.costs.host import CPU_BLOCK, VLLM_V1
from tests.integration.vllm.engines import at_most, our_rounds, toy_head, use, worker_of

K_MAX, NEW_TOKENS = 6, 40
HEADS = {
    "before": {"reads": "before"},
    "drawn": {"reads": "drawn"},
    "embedding": {"reads": "before", "embedding_std": 0.5, "width": 96},
    "both": {"reads": "before", "predicts": "both", "embedding_std": 0.5},
    "base": {"base": True, "residual": False},
    "residual": {"base": True, "depth": 2, "embedding_std": 0.5, "width": 32, "standardised": True},
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, embedded_pair: Pair) -> dict[str, Path]:
    """One that was trained, and untrained ones for the other ways to read the draft."""
    hidden = embedded_pair.draft.config.hidden_size
    made = {name: toy_head(tmp_path_factory.mktemp(name), hidden, **config) for name, config in HEADS.items()}
    return made


@pytest.fixture(scope="module")
def batch_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("map") / "map.json"
    table = [[1, 1, 5], [2, 3, 3], [4, 8, 1], [9, 64, 0]]
    path.write_text(json.dumps({"num_speculative_tokens_per_batch_size": table, "num_speculative_tokens": 5}))
    return path


POLICIES = (
    "fixed:0",
    "fixed:1",
    f"fixed:{K_MAX}",
    "max-prob:0.5",
    "svip:0.35",
    "adaedl:0.4",
    "online-logistic:0.3",
    "online-signals:0.6",
    "confidence:0.3",
    "cumulative-confidence:0.2",
    "batch-map:{map}",
    "head:{before}:0.5",
    "head:{embedding}:0.5",
    "head:{drawn}:0.5",
    "head:{drawn}:0.5,lag=0",
    "head:{both}:0.5",
    "head:{base}:0.5",
    "head:{base}:0.5,online=true",
    "head:{residual}:0.5",
    "head:{before}:0.5,online=true",
    "head:{embedding}:0.5,online=true,train=true",
    "head:{before}:0.5,costs=0.2",
    "head:{before}:1,costs=auto",
    "head:{both}:0.5,online=true,costs=0.2",
    "fixed:6,costs=0.3",
    "entropy:1.0",
    "hf-heuristic",
    "hf-confidence",
    "max-prob-mean:0.4",
    "leviathan:0.2",
    "bandit:6",
    "goodput:{costs}",
    "adaspec:{costs}",
    "budget:{costs}",
)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    draft, target = ({"alpha": 1e-6, "beta": 1e-4, "gamma": seconds} for seconds in (2e-3, 1e-2))
    path.write_text(json.dumps({"t_draft": 2e-3, "t_target": 1e-2, "batch": {"draft": draft, "target": target}}))
    return path


@pytest.fixture(scope="module")
def spec_of(heads: dict[str, Path], batch_map: Path, costs: Path) -> Any:
    return lambda policy: policy.format(map=batch_map, costs=costs, **heads)


@pytest.fixture(scope="module")
def plain(make_llm: Any) -> Any:
    return make_llm(max_num_seqs=16)


@pytest.fixture(scope="module")
def speculative(make_llm: Any) -> Any:
    accept_head = {"accept_head": {"policy": "fixed:1"}}
    return make_llm(
        {"num_speculative_tokens": K_MAX},
        max_num_seqs=16,
        additional_config=accept_head,
        per_request_spec_decode_metrics="detailed",
    )


def test_the_plugin_is_loaded_by_vllm_itself(speculative: Any) -> None:
    from accept_head.inference.adapters.vllm.v1 import AcceptHeadProposer

    assert type(worker_of(speculative).drafter) is AcceptHeadProposer


def test_on_a_cpu_a_rule_by_costs_is_told_of_blocks(speculative: Any) -> None:
    assert use(speculative, "fixed:6,costs=0.3").drafting.policy.host == replace(VLLM_V1, block=CPU_BLOCK)


@pytest.fixture(scope="module")
def alone(plain: Any, generate: Any) -> Any:
    """alone(prompts, rows, tokens): what vLLM decodes greedily without speculation; each is decoded once."""
    known: dict[tuple[int, int, int], list[list[int]]] = {}

    def decode(prompts: Any, rows: int, tokens: int) -> list[list[int]]:
        key = len(prompts), rows, tokens
        if key not in known:
            at_most(plain, rows)
            known[key] = generate(plain, prompts, temperature=0.0, max_tokens=tokens)
        return known[key]

    return decode


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_that_of_the_target_alone(
    policy: str, rows: int, alone: Any, speculative: Any, spec_of: Any, prompts: Any, generate: Any
) -> None:
    some = prompts[::12][: max(6, rows)]
    expected = alone(some, rows, NEW_TOKENS)
    assert greedy(speculative, spec_of(policy), rows, some, NEW_TOKENS, generate) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rows"), [*((policy, 16) for policy in (None, *POLICIES)), ("head:{before}:0.5", 4)]
)
def test_greedy_output_of_two_hundred_prompts(
    policy: str | None, rows: int, alone: Any, speculative: Any, spec_of: Any, prompts: Any, generate: Any
) -> None:
    some, tokens = prompts[:200], 24
    expected = alone(some, rows, tokens)
    assert greedy(speculative, policy and spec_of(policy), rows, some, tokens, generate) == expected


def greedy(engine: Any, policy: str | None, rows: int, prompts: Any, tokens: int, generate: Any) -> list[list[int]]:
    """What the engine decodes with a policy, which must have drafted something unless it is not to."""
    at_most(engine, rows)
    host = use(engine, policy)
    outputs: list[list[int]] = generate(engine, prompts, temperature=0.0, max_tokens=tokens)
    if host is not None:
        none_wanted = policy == "fixed:0" or (rows == 16 and policy is not None and policy.startswith("batch-map"))
        assert host.metrics.read()["accepted"] > 0 or none_wanted
    return outputs


def test_prompts_fed_in_chunks_beside_others_are_decoded_alike(
    make_llm: Any, plain: Any, spec_of: Any, prompts: Any, generate: Any
) -> None:
    chunked = make_llm({"num_speculative_tokens": K_MAX}, max_num_seqs=8, max_num_batched_tokens=96)
    at_most(plain, 8)
    long = [prompt * (1 + 5 * (index % 3 == 0)) for index, prompt in enumerate(prompts[::15])]
    long = [prompt[:300] for prompt in long]
    use(chunked, spec_of("head:{before}:0.5"))
    sampling = {"temperature": 0.0, "max_tokens": 24}
    assert generate(chunked, long, **sampling) == generate(plain, long, **sampling)


ROW_RULES = (
    "fixed:3",
    "max-prob:0.5",
    "svip:0.35",
    "adaedl:0.4",
    "head:{before}:0.5",
    "head:{drawn}:0.5",
    "head:{both}:0.5",
)


@pytest.mark.parametrize("policy", [*ROW_RULES, "head:{drawn}:0.5,lag=0"])
def test_rounds_are_those_of_our_own_loop(
    policy: str, speculative: Any, spec_of: Any, prompts: Any, embedded_pair: Pair
) -> None:
    """How many tokens were drafted and accepted, in every round. End tokens are ignored, so that texts are long."""
    from vllm import SamplingParams

    spec = spec_of(policy) + f",k_max={K_MAX}" * (not policy.startswith("fixed"))
    use(speculative, spec)
    at_most(speculative, 4)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[::10]]
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = speculative.generate(inputs, sampling, use_tqdm=False)
    theirs = [
        list(zip(said.per_step_drafted, said.per_step_accepted, strict=True))
        for said in (output.outputs[0].spec_decode_metrics for output in outputs)
    ]
    # vLLM's first token comes with the prompt and without a draft.
    begun = [[*prompt, output.outputs[0].token_ids[0]] for prompt, output in zip(prompts[::10], outputs, strict=True)]
    ours = our_rounds(embedded_pair, begun, spec, new_tokens=NEW_TOKENS - 1)
    assert theirs == [[each for each in mine if each[0]] for mine in ours]  # vLLM notes no round without a draft
    assert sum(map(len, theirs)) > 100


def test_lengths_follow_each_request_when_others_leave(speculative: Any, spec_of: Any, prompts: Any) -> None:
    """Requests of very different lengths, and one that is aborted half-way: nobody else's output changes."""
    from vllm import SamplingParams

    use(speculative, spec_of("adaedl:0.4"))
    at_most(speculative, 6)
    chosen = prompts[:12]

    def run(aborted: int | None) -> dict[str, list[int]]:
        engine, ended = speculative.llm_engine, {}
        for index, prompt in enumerate(chosen):
            sampling = SamplingParams(temperature=0.0, max_tokens=4 + 5 * (index % 7))
            engine.add_request(f"{aborted}-{index}", {"prompt_token_ids": prompt}, sampling)
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id.partition("-")[2]] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == 5 and aborted is not None:
                engine.abort_request([f"{aborted}-{aborted}"])
        return ended

    whole, cut = run(None), run(3)
    assert len(whole) == 12
    assert {index: ids for index, ids in whole.items() if index != "3"} == {
        index: ids for index, ids in cut.items() if index != "3"
    }


def test_what_is_wrong_is_said_before_anything_is_loaded(make_llm: Any) -> None:
    with pytest.raises((InputError, ValueError), match="policy"):
        make_llm({}, additional_config={"accept_head": {"policy": ""}})
