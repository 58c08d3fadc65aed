"""Kernels are used where they can be run and pass their comparison with torch, and then nothing else changes.

`make test-vllm` runs it in the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch

from accept_head import Sampling
from accept_head.inference import generate
from accept_head.inference.kernels import head, launch, rows, sampling, signals, verify
from accept_head.inference.kernels import usable as door
from accept_head.inference.kernels.head import KernelScorer, scorer_of
from accept_head.inference.policies.head import HeadPolicy
from accept_head.sampling import draw
from tests.inference.support.kernels import DEVICE, runs
from tests.inference.support.toy import random_head, toy_pair

pytestmark = pytest.mark.usefixtures("anywhere")
CHECKS = {"signals": signals.CHECK, "sampling": sampling.CHECK, "verification": verify.CHECK, "the loop": rows.CHECK}


def fails(*_):
    raise RuntimeError("no kernel image")


def takes_all(p, q, ids, drafted, *_):
    return verify.Verified(drafted, ids[:, 0], torch.ones(ids.shape))


def says_another_length(*given, accept=rows.accept_by_kernel):
    accepted = accept(*given)
    return accepted._replace(lengths=accepted.lengths + 1)


# of each: where a function is put that fails or does something else
BROKEN = [
    ("signals", signals, "counters", fails),
    ("sampling", sampling, "draw_by_kernel", fails),
    ("sampling", sampling, "draw_by_kernel", lambda weights, numbers: draw(weights, numbers) + 1),
    ("verification", verify, "ratio_by_kernel", fails),
    ("verification", verify, "ratio_by_kernel", takes_all),
    ("the loop", rows, "BY_KERNEL", (*rows.BY_KERNEL[:-1], fails)),
    ("the loop", rows, "BY_KERNEL", (*rows.BY_KERNEL[:-1], says_another_length)),
]


@runs
@pytest.mark.parametrize(("name", "module", "attribute", "broken"), BROKEN)
def test_kernels_that_fail_where_they_are_tried_are_not_used(name, module, attribute, broken, monkeypatch, caplog):
    """No C compiler, an old GPU: decoding goes on with torch, and says so."""
    monkeypatch.setattr(door, "_passed", {})
    with monkeypatch.context() as patch:
        patch.setattr(module, attribute, broken)
        assert not door.usable(torch.zeros(1, device=DEVICE), CHECKS[name])
    assert f"no kernels for {name}" in caplog.text
    monkeypatch.setattr(door, "_passed", {})
    assert door.usable(torch.zeros(1, device=DEVICE), CHECKS[name])


@runs
def test_a_head_whose_kernels_fail_is_scored_by_torch(monkeypatch, caplog):
    made, hidden = random_head(16).to(DEVICE), torch.randn(2, 16, device=DEVICE)
    monkeypatch.setattr(door, "_passed", {})
    monkeypatch.setattr(head, "_run", fails)
    torch.testing.assert_close(scorer_of(made)(hidden, None, None), made.probability(hidden))
    assert "no kernels for the head" in caplog.text


@pytest.mark.parametrize("name", CHECKS)
def test_without_triton_nothing_changes(name, monkeypatch):
    monkeypatch.setattr(door, "_enabled", lambda: False)
    assert not door.usable(torch.zeros(1), CHECKS[name])
    assert not isinstance(scorer_of(random_head(16)), KernelScorer)


def test_kernels_that_broke_off_leave_no_counts():
    counts = launch.counters(torch.device("cpu"), 3)

    def breaks_off(device):
        counts[1] = 1
        raise RuntimeError("out of resources")

    assert not door.passes(door.Check("tests", breaks_off), counts.device)
    assert not counts.any()


BY_KERNEL = [
    (sampling, "draw_by_kernel"),
    (verify, "ratio_by_kernel"),
    (verify, "match_by_kernel"),
    (rows, "accept_by_kernel"),
]


@runs
@pytest.mark.parametrize("verifier", ["ratio", "match"])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1.1, top_k=3)], ids=["T=0", "T=1.1"]
)
def test_decoding_is_the_same_with_them(sampling, verifier, monkeypatch):
    """And every kernel's counters are zero again after it."""
    pair, used, results = toy_pair(), set(), []
    for model in (pair.target, pair.draft):
        model.to(DEVICE)
    made = random_head(16, signals=True, reads="before").to(DEVICE)
    assert all(door.usable(torch.zeros(1, device=DEVICE), check) for check in CHECKS.values())
    for module, name in BY_KERNEL:
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, run=run, name=name: used.add(name) or run(*given))
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(door, "_enabled", lambda: False)
        used.clear()
        policy = HeadPolicy(made, 0.5, k_max=4)
        assert isinstance(policy.probability, KernelScorer) is kernels
        options = {"max_new_tokens": 9, "sampling": sampling, "end_token_ids": [2], "batch_size": 2, "seed": 5}
        prompts = [[1], [2, 3, 4], [0, 1]]
        results.append(generate(pair.target, pair.draft, prompts, policy=policy, verifier=verifier, **options))
        tested = "match_by_kernel" if sampling.greedy or verifier == "match" else "ratio_by_kernel"
        assert used >= {tested, "accept_by_kernel"} if kernels else not used
        assert ("draw_by_kernel" in used) == (kernels and not sampling.greedy)
        assert not launch.counters(DEVICE, 1).any()
    assert results[0].tokens == results[1].tokens
    for one, other in zip(results[0].stats, results[1].stats, strict=True):
        assert (one.drafted, one.accepted, one.rounds) == (other.drafted, other.accepted, other.rounds)
