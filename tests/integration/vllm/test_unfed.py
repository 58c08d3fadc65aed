"""While nothing is drafted, vLLM's drafter is not fed. When it drafts again it has caught up: its drafts are those of
our own loop, whose drafter has missed nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from accept_head import load_pair
from accept_head.inference.adapters.vllm.unfed import Unfed
from accept_head.inference.policies.registry import POLICIES
from accept_head.inference.policies.spec import named
from accept_head.inference.policy import RowPolicy
from tests.integration.vllm.engines import at_most, our_rounds, use

K_MAX, NEW_TOKENS, SELDOM = 4, 48, "seldom"


class Seldom(RowPolicy):
    """Drafts only where a row's text has a length that is divisible by nine."""

    needs, max_draft_tokens = frozenset(), K_MAX

    def start(self, batch, device):
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)

    def admit(self, rows, lengths):
        self.lengths[rows] = lengths

    def select(self, rows):
        self.lengths = self.lengths[rows]

    def start_round(self, live):
        return torch.where(self.lengths % 9 == 0, K_MAX, 0)

    def observe(self, outcome):
        self.lengths = outcome.lengths.clone()


@pytest.fixture(scope="module", params=["draft", "eagle3"])
def drafter(request: pytest.FixtureRequest, embedded_pair_folder: Path) -> Path:
    return embedded_pair_folder / request.param


@pytest.fixture(scope="module")
def pair(drafter: Path) -> Any:
    return load_pair(drafter.parent / "target", drafter, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def llm(make_llm: Any, drafter: Path) -> Any:
    named(SELDOM, "", "draft now and then")(Seldom)
    method = "eagle3" if drafter.name == "eagle3" else "draft_model"
    yield make_llm(
        {"method": method, "model": str(drafter), "num_speculative_tokens": K_MAX},
        max_num_seqs=8,
        max_num_batched_tokens=128,  # so that now and then more is missing than a forward takes
        additional_config={"accept_head": {"policy": SELDOM}},
        per_request_spec_decode_metrics="detailed",
    )
    del POLICIES[SELDOM]


def rounds_of(llm: Any, prompts: Any, rows: int) -> tuple[Any, list[list[tuple[int, int]]], dict[str, Any]]:
    """(texts to go on from, drafted and accepted tokens of each round, the host's counts)."""
    host = use(llm, SELDOM)
    at_most(llm, rows)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    begun = [[*prompt, done.outputs[0].token_ids[0]] for prompt, done in zip(prompts, outputs, strict=True)]
    said = [done.outputs[0].spec_decode_metrics for done in outputs]
    rounds = [list(zip(each.per_step_drafted, each.per_step_accepted, strict=True)) for each in said]
    return begun, rounds, host.metrics.read()


@pytest.mark.parametrize("rows", [1, 4])
def test_its_rounds_are_those_of_our_own_loop(llm: Any, pair: Any, prompts: Any, rows: int) -> None:
    begun, theirs, counts = rounds_of(llm, prompts[::12], rows)
    ours = our_rounds(pair, begun, SELDOM, new_tokens=NEW_TOKENS - 1, batch=rows)
    assert theirs == [[each for each in mine if each[0]] for mine in ours]  # vLLM notes no round without a draft
    assert counts["accepted"] > 30
    if rows == 1:  # one forward to catch up, and one for each token
        assert counts["draft_forwards"] < 1.1 * (K_MAX + 2) * counts["rounds"] / 5


@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_that_never_catches_up_drafts_worse(
    llm: Any, prompts: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail. The text stays the target's."""
    begun, whole, counts = rounds_of(llm, prompts[::12], rows)
    monkeypatch.setattr(Unfed, "take", lambda self, spans: [])
    again, holes, fewer = rounds_of(llm, prompts[::12], rows)
    assert again == begun and holes != whole and fewer["accepted"] < counts["accepted"]
