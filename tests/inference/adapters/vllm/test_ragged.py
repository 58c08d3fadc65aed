"""Draft lengths on their way to vLLM's scheduler under its V2 runner. If they would be lost, this is an error."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accept_head import InputError
from accept_head.inference.adapters.vllm.ragged import check_handler, leave_lengths, ragged_handler

RUNNER = "vllm.v1.worker.gpu.model_runner"


class Handler:
    """As vLLM's: a list of placeholders for each request."""

    def set_draft_tokens(self, input_batch, draft_tokens):
        self.shape = draft_tokens.shape

    def get_draft_tokens(self):
        return SimpleNamespace(draft_token_ids=[[-1] * self.shape[1] for _ in range(self.shape[0])])


class Changed:
    """Of another vLLM."""

    def set_draft_tokens(self, input_batch, draft_tokens):
        pass


@pytest.fixture
def runner(monkeypatch):
    """The module whose handler the adapter looks at."""
    parts = RUNNER.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    module = sys.modules[RUNNER]
    monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], module, raising=False)
    return module


def test_lists_are_as_long_as_the_batch_says():
    handler, batch = ragged_handler(Handler)(), SimpleNamespace()
    leave_lengths(batch, [2, 0, 4])
    handler.set_draft_tokens(batch, torch.zeros(3, 4))
    assert [len(ids) for ids in handler.get_draft_tokens().draft_token_ids] == [2, 0, 4]
    handler.set_draft_tokens(SimpleNamespace(), torch.zeros(2, 4))  # vLLM's own round
    assert [len(ids) for ids in handler.get_draft_tokens().draft_token_ids] == [4, 4]


def test_our_handler_passes(runner):
    runner.DraftTokensHandler = ragged_handler(Handler)
    check_handler()


def test_a_handler_that_would_lose_the_lengths_is_an_error(runner):
    """The runner was imported before the plugin could exchange it."""
    runner.DraftTokensHandler = Handler
    with pytest.raises(InputError, match="imported before vLLM loaded its plugins"):
        check_handler()


def test_a_handler_of_another_vllm_is_left_alone_and_named(runner):
    assert ragged_handler(Changed) is Changed
    runner.DraftTokensHandler = Changed
    with pytest.raises(InputError, match=r"no Changed\.get_draft_tokens"):
        check_handler()
