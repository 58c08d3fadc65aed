"""Sampled output under our policies is distributed as vLLM's without speculation. A biased policy is detected.

Tests reject at p < 1e-4, with fixed seeds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.rejection_sampler import RejectionSampler

from accept_head import Pair
from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.policy import BOTH, DraftStep, RowPolicy, Signal
from tests.integration.vllm.engines import at_most, drafter_of, toy_head, use
from tests.integration.vllm.zstat import p_value, z_statistics

FALSE_ALARM = 1e-4
ROWS, K_MAX = 64, 4
SAMPLES, TOKENS = 5_000, 4  # the first of them comes with the prompt, without a draft
POLICIES = ("head:{trained}:0.5", "head:{drawn}:0.5", "adaedl:0.4", "head:{trained}:0.5,costs=0.2")


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory: pytest.TempPathFactory, embedded_pair: Pair, embedded_pair_folder: Path) -> Any:
    drawn = toy_head(tmp_path_factory.mktemp("drawn"), embedded_pair.draft.config.hidden_size, reads="drawn")
    return lambda policy: policy.format(trained=embedded_pair_folder / "heads" / "sampled", drawn=drawn)


@pytest.fixture(scope="module")
def plain(make_llm: Any) -> Any:
    return make_llm(max_num_seqs=ROWS)


@pytest.fixture(scope="module")
def speculative(make_llm: Any) -> Any:
    return make_llm(
        {"num_speculative_tokens": K_MAX, "draft_sample_method": "probabilistic"},
        max_num_seqs=ROWS,
        additional_config={"accept_head": {"policy": "fixed:1"}},
    )


class DropsSurprises(RowPolicy):
    """Biased: a drawn token that is not the draft's most likely one is dropped, and what came after it. It says that it
    is lossless."""

    needs = frozenset({Signal.LOGPROB, Signal.MAX_PROB})
    lossless, max_draft_tokens = BOTH, K_MAX

    def start_round(self, live: Tensor) -> Tensor:
        self.kept = torch.zeros(len(live), dtype=torch.long)
        self.going = torch.ones_like(live)
        return super().start_round(live)

    def keep_drafting(self, step: DraftStep) -> Tensor:
        assert step.logprob is not None and step.max_prob is not None
        self.going = self.going & (step.logprob.exp() > 0.999 * step.max_prob)
        self.kept += self.going
        return step.active & self.going

    def trim(self, drafted: Tensor) -> Tensor:
        return torch.minimum(self.kept, drafted)


def use_biased(llm: Any) -> None:
    drafter = drafter_of(llm)
    drafter.host = PolicyHost(DropsSurprises(), rows=ROWS, limit=K_MAX, device=drafter.device, greedy=False)


# --- a statistic along the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_long_samples_follow_the_target(
    policy: str, speculative: Any, spec_of: Any, prompts: Any, generate: Any, embedded_pair: Pair
) -> None:
    use(speculative, spec_of(policy))
    at_most(speculative, 16)
    outputs = generate(speculative, prompts[::3], temperature=1.0, max_tokens=48, seed=7)
    statistics = z_statistics(embedded_pair.target, embedded_pair.draft, prompts[::3], outputs)
    assert p_value(statistics) > FALSE_ALARM, statistics


def test_greedy_requests_beside_sampled_ones_stay_greedy(
    plain: Any, speculative: Any, spec_of: Any, prompts: Any, generate: Any
) -> None:
    use(speculative, spec_of(POLICIES[0]))
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:24]]
    mixed = [SamplingParams(temperature=float(index % 2), max_tokens=32) for index in range(24)]
    outputs = speculative.generate(inputs, mixed, use_tqdm=False)
    greedy = [list(output.outputs[0].token_ids) for output in outputs[::2]]
    assert greedy == generate(plain, prompts[:24:2], temperature=0.0, max_tokens=32)


def test_a_round_without_drafts_is_sampled_as_without_speculation(
    plain: Any, speculative: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds, limits, penalties and logprobs included; and without the noise of vLLM's rejection sampler."""
    calls: list[int] = []
    original = RejectionSampler.forward

    def counted(self: Any, metadata: Any, *inputs: Any) -> Any:
        calls.append(sum(metadata.num_draft_tokens))
        return original(self, metadata, *inputs)

    monkeypatch.setattr(RejectionSampler, "forward", counted)
    limits = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 3}

    def texts(llm: Any) -> list[list[tuple[int, float]]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:12]]
        each = [SamplingParams(**limits, max_tokens=24, seed=index) for index in range(12)]
        outputs = [done.outputs[0] for done in llm.generate(inputs, each, use_tqdm=False)]
        return [
            [(token, known[token].logprob) for token, known in zip(done.token_ids, done.logprobs, strict=True)]
            for done in outputs
        ]

    use(speculative, "none")
    drafted_nothing, without = texts(speculative), texts(plain)
    for ours, theirs in zip(drafted_nothing, without, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose([value for _, value in ours], [value for _, value in theirs], atol=1e-4)
    assert not calls
    use(speculative, "fixed:2")
    texts(speculative)
    assert calls and min(calls) > 0


# --- the joint distribution of the first tokens ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(plain: Any, prompts: Any, generate: Any) -> Counter[tuple[int, ...]]:
    return sample(plain, prompts, generate, seed=1)


def sample(llm: Any, prompts: Any, generate: Any, seed: int) -> Counter[tuple[int, ...]]:
    at_most(llm, ROWS)
    torch.manual_seed(seed)
    outputs = generate(llm, [prompts[0]] * SAMPLES, temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    return Counter(tuple(output) for output in outputs)


def two_sample_p(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """Of the texts, and of the token at each place alone, where a bias has fewer cells to hide in (Bonferroni)."""
    tests = [homogeneity(first, second)]
    for place in range(1, TOKENS):
        tests.append(homogeneity(*(marginal(counts, place) for counts in (first, second))))
    return min(1.0, len(tests) * min(tests))


def marginal(counts: Counter[tuple[int, ...]], place: int) -> Counter[tuple[int, ...]]:
    tokens: Counter[tuple[int, ...]] = Counter()
    for text, count in counts.items():
        tokens[(text[place],)] += count
    return tokens


def homogeneity(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]], least: int = 20) -> float:
    """p of Pearson's test. Texts with fewer than `least` in both samples together are one by their first three tokens,
    then two, then one, then all that is left."""
    cells: Counter[tuple[tuple[int, ...], int]] = Counter()
    for which, counts in enumerate((first, second)):
        for text, count in counts.items():
            cells[text, which] += count
    for length in range(TOKENS - 1, -1, -1):
        totals: Counter[tuple[int, ...]] = Counter()
        for (text, _), count in cells.items():
            totals[text] += count
        merged: Counter[tuple[tuple[int, ...], int]] = Counter()
        for (text, which), count in cells.items():
            merged[text if totals[text] >= least else text[:length], which] += count
        cells = merged
    texts = sorted({text for text, _ in cells})
    table = np.array([[cells[text, which] for text in texts] for which in (0, 1)])
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES[2:])
def test_ten_thousand_samples_are_those_of_vllm_without_speculation(
    policy: str, reference: Any, speculative: Any, spec_of: Any, prompts: Any, generate: Any
) -> None:
    host = use(speculative, spec_of(policy))
    drawn = sample(speculative, prompts, generate, seed=2)
    assert host.metrics.read()["accepted"] > 0.2 * SAMPLES
    p = two_sample_p(reference, drawn)
    print(f"{policy}: p = {p:.3g}, {len(drawn)} different texts")
    assert p > FALSE_ALARM


@pytest.mark.slow
def test_a_biased_adapter_is_found(reference: Any, speculative: Any, prompts: Any, generate: Any) -> None:
    use_biased(speculative)
    drawn = sample(speculative, prompts, generate, seed=2) + sample(speculative, prompts, generate, seed=3)
    p = two_sample_p(reference, drawn)
    print(f"biased: p = {p:.3g}")
    assert p < FALSE_ALARM


def test_the_two_sample_test_finds_a_small_difference_and_no_other() -> None:
    random = np.random.default_rng(0)
    p = random.dirichlet(np.full(400, 0.3))
    tilted = p * np.where(np.arange(400) % 2, 1.2, 0.8)
    draws = [
        Counter((int(x) // 20, int(x), 0, 0) for x in random.choice(400, SAMPLES, p=q / q.sum()))
        for q in (p, p, tilted)
    ]
    assert two_sample_p(draws[0], draws[1]) > FALSE_ALARM
    assert two_sample_p(draws[0], draws[2]) < FALSE_ALARM
