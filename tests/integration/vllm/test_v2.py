"""vLLM's V2 model runner in Triton's interpreter: early ends, drafts of different lengths, the head in its estimator.

The rounds are compared with those of our own loop, the outputs with transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accept_head import Pair, load_pair
from tests.inference.support.toy import random_head
from tests.integration.vllm.engines import our_rounds, toy_head, use
from tests.integration.vllm.interpreter import engine, generate, in_interpreter
from tests.integration.vllm.zstat import p_value, z_statistics

NEW_TOKENS, K_MAX = 20, 5
DRAFTS = {"draft_model": "draft", "eagle3": "eagle3"}  # by vLLM's name for the method
POLICIES = ("fixed:0", "fixed:3", "max-prob:0.5", "adaedl:0.4", "head:{trained}:0.5", "head:{drawn}:0.5")


def decode_by_policies(
    pair: str,
    policies: Sequence[str],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    rows: int,
    method: str = "draft_model",
) -> list[dict[str, Any]]:
    """In the interpreter's process: one engine, each policy in turn."""
    draft = {"method": method, "model": f"{pair}/{DRAFTS[method]}", "num_speculative_tokens": K_MAX}
    llm = engine(
        model=f"{pair}/target",
        max_num_seqs=rows,
        speculative_config={**draft, "draft_sample_method": "probabilistic" if temperature else "greedy"},
        additional_config={"accept_head": {"policy": policies[0]}},
    )
    results = []
    for policy in policies:
        host = use(llm, policy)
        sampling = {"temperature": temperature, "max_tokens": NEW_TOKENS, "ignore_eos": not temperature}
        results.append({**generate(llm, prompts, sampling), "counts": host.metrics.read()})
    return results


@pytest.fixture(scope="module")
def short_prompts(prompts: Any) -> Any:
    return sorted(prompts, key=len)[:4]


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory: pytest.TempPathFactory, embedded_pair: Pair, embedded_pair_folder: Path) -> Any:
    drawn = toy_head(tmp_path_factory.mktemp("drawn"), embedded_pair.draft.config.hidden_size, reads="drawn")

    def spec(policy: str) -> str:
        bounds = "" if policy.startswith("fixed") else f",k_max={K_MAX}"
        return policy.format(trained=embedded_pair_folder / "heads" / "sampled", drawn=drawn) + bounds

    return spec


def test_greedy_outputs_and_rounds(
    embedded_pair: Pair, embedded_pair_folder: Path, short_prompts: Any, spec_of: Any
) -> None:
    policies = [spec_of(policy) for policy in POLICIES]
    results = in_interpreter(
        decode_by_policies,
        pair=str(embedded_pair_folder),
        policies=policies,
        prompts=short_prompts,
        temperature=0.0,
        rows=4,
    )
    for policy, result in zip(policies, results, strict=True):
        check_rounds(embedded_pair, short_prompts, policy, result)
    lengths = {length for rounds in results[4]["drafted"] for length in rounds}
    assert len(lengths) > 1  # ragged


def check_rounds(pair: Pair, prompts: Any, policy: str, result: dict[str, Any]) -> None:
    """Greedily, the text is that of transformers, and the rounds are those of our own loop."""
    assert result["outputs"] == [greedy(pair.target, prompt) for prompt in prompts], policy
    if policy == "fixed:0":
        assert result["counts"]["drafted"] == 0
        return
    begun = [[*prompt, output[0]] for prompt, output in zip(prompts, result["outputs"], strict=True)]
    ours = our_rounds(pair, begun, policy, new_tokens=NEW_TOKENS)
    for mine, drafted, accepted in zip(ours, result["drafted"], result["accepted"], strict=True):
        length = 0
        for number, theirs in enumerate(zip(drafted, accepted, strict=True)):
            if length + 2 * (K_MAX + 1) > NEW_TOKENS:
                break
            assert mine[number] == theirs, policy
            length += theirs[1] + 1


def test_an_eagle3_drafter(embedded_pair_folder: Path, short_prompts: Any, tmp_path: Path) -> None:
    """Its rounds end early, too, and its states are those of our own loop: a head reads them.

    As most drafters', its config names the layers that it reads in `eagle_config` alone, where V2 does not look.
    """
    for name in ("target", "eagle3"):
        shutil.copytree(embedded_pair_folder / name, tmp_path / name)
    path = tmp_path / "eagle3" / "config.json"
    config = json.loads(path.read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(config))
    random_head(256, signals=True, reads="before", std=0.1).save_pretrained(tmp_path / "head")
    policies = ["fixed:3", f"max-prob:0.2,k_max={K_MAX}", f"head:{tmp_path / 'head'}:0.5,k_max={K_MAX}"]
    results = in_interpreter(
        decode_by_policies,
        pair=str(tmp_path),
        policies=policies,
        prompts=short_prompts,
        temperature=0.0,
        rows=4,
        method="eagle3",
    )
    pair = load_pair(embedded_pair_folder / "target", embedded_pair_folder / "eagle3", device="cpu")
    for policy, result in zip(policies, results, strict=True):
        check_rounds(pair, short_prompts, policy, result)
    for result in results[1:]:
        assert len({length for rounds in result["drafted"] for length in rounds}) > 1


def greedy(model: Any, prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}  # end tokens are ignored
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_sampled_output_follows_the_target(
    embedded_pair: Pair, embedded_pair_folder: Path, prompts: Any, spec_of: Any
) -> None:
    some = sorted(prompts, key=len)[:24]
    (result,) = in_interpreter(
        decode_by_policies,
        pair=str(embedded_pair_folder),
        policies=[spec_of("head:{trained}:0.5")],
        prompts=some,
        temperature=1.0,
        rows=24,
    )
    statistics = z_statistics(embedded_pair.target, embedded_pair.draft, some, result["outputs"])
    assert p_value(statistics) > 1e-4, statistics
    assert sum(map(sum, result["accepted"])) > 60


# --- adaptive verification: the head's logit as the feature of vLLM's estimator ---------------------------------------


def fit_a_head(steps: int, slope: float, shift: float) -> dict[str, Any]:
    """In the interpreter's process: an estimator with a head whose logits are wrong by a known slope and shift, and
    verdicts drawn from the truth."""
    from accept_head.head.network import AcceptanceHead
    from accept_head.inference.adapters.vllm.adaptive import HeadAcceptanceEstimator
    from tests.inference.support.replayed import NoWaiting

    torch.manual_seed(0)
    head = AcceptanceHead({"hidden_size": 8, "depth": 0, "reads": "before"}).eval()
    torch.nn.init.normal_(head.output.weight, std=0.7)
    slots, k, rows = 12, 2, 8
    estimator = HeadAcceptanceEstimator(head, slots, k, torch.device("cpu"))
    first: dict[str, Any] = {}
    for number in range(steps):
        idx = torch.randperm(slots)[:rows]
        hidden = torch.randn(k, rows, 8)
        confidence = torch.zeros(slots, k)
        for step in range(k):
            given = hidden[step], torch.zeros(rows, 4), torch.ones(slots), idx, torch.tensor(step), confidence
            with NoWaiting() if number == 0 else nullcontext():  # asynchronous scheduling is there not to wait
                estimator.predict_by_head(*given)
        if number == 0:
            expected = torch.stack([head.probability(each) for each in hidden], dim=1)
            first = {
                "confidence": confidence[:rows].tolist(),
                "expected": expected.tolist(),
                "features": estimator.features[idx].tolist(),
                "logits": torch.stack([head(each)[:, 0] for each in hidden], dim=1).tolist(),
            }
        truth = torch.sigmoid(slope * estimator.features[idx] + shift)
        accepted = (torch.rand(rows, k) < truth).long().cumprod(1).sum(1)
        estimator.step(idx, (accepted + 1).int(), (k - accepted).int())
    return {**first, "slope": estimator.slope.tolist(), "intercepts": estimator.intercepts.tolist()}


def test_vllms_refit_recalibrates_a_head() -> None:
    fitted = in_interpreter(fit_a_head, steps=1200, slope=0.6, shift=-0.4)
    np.testing.assert_allclose(fitted["features"], fitted["logits"], atol=1e-5)
    np.testing.assert_allclose(fitted["confidence"], fitted["expected"], atol=1e-5)  # at first it is the head's own
    np.testing.assert_allclose(fitted["slope"], 0.6, atol=0.1)
    np.testing.assert_allclose(fitted["intercepts"], -0.4, atol=0.15)
