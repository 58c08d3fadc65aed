"""When memory runs out, the batch is halved, and every record stays the same."""

from __future__ import annotations

import pytest
import torch

from accept_head import InputError, Pair, Sampling
from accept_head.training.collect.score import score
from accept_head.training.halving import Halving
from tests.training.generated import generated

PROMPTS = [[1, 40, 41], [1, 100, 7, 8, 9, 60, 61, 62], [1], [1, 200, 201, 30, 31], [1, 9], [1, 77, 78], [1, 5, 6]]
SAMPLED = Sampling()


class Scarce:
    """A model's forward, with memory for so many rows."""

    def __init__(self, model, most, error=None):
        self.forward, self.most, self.batches = model.forward, most, []
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def __call__(self, input_ids=None, **options):
        self.batches.append(len(input_ids))
        if len(input_ids) > self.most:
            raise self.error
        return self.forward(input_ids=input_ids, **options)


@pytest.fixture
def model(random_llama):
    return random_llama(1)


@pytest.fixture
def scarce(model, monkeypatch):
    """scarce(rows): from now on the model has memory for so many."""

    def make(most, error=None):
        forward = Scarce(model, most, error)
        monkeypatch.setattr(model, "forward", forward)
        return forward

    return make


def test_scores_are_those_of_the_whole_batch(model, random_llama, byte_tokenizer, scarce):
    pair = Pair(model, random_llama(2, hidden=16, layers=1), byte_tokenizer(), 261)
    responses = generated(model, byte_tokenizer(), PROMPTS, SAMPLED, max_new_tokens=8)
    options = {"seed": 3, "indices": [10, 11, 12, 20, 21, 22, 30]}
    whole = score(pair, PROMPTS, responses, SAMPLED, **options)
    forward = scarce(2)
    parts = score(pair, PROMPTS, responses, SAMPLED, **options)
    assert forward.batches == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    for one, other in zip(whole, parts, strict=True):
        for name in ("response_ids", "draft_ids", "accepted"):
            assert one[name] == other[name]
        for name in set(one) - {"response_ids", "draft_ids", "accepted"}:
            assert one[name] == pytest.approx(other[name], abs=1e-5)
    swapped = score(pair, PROMPTS, responses, SAMPLED, seed=3, indices=[11, 10, 12, 20, 21, 22, 30])
    assert [row["draft_ids"] for row in swapped] != [row["draft_ids"] for row in whole], "the comparison is blind"


def test_a_message_says_so_once_and_what_fits_is_remembered(capfd):
    halving, tried = Halving("scoring", "do less"), []

    def run(start, stop):
        tried.append(stop - start)
        if stop - start > 4:
            torch.empty(1 << 50)  # the CPU's allocator has no error class of its own
        return list(range(start, stop))

    for _ in range(2):
        assert halving(7, run) == list(range(7))
    (line,) = capfd.readouterr().err.splitlines()
    assert "out of memory" in line and "7" in line and "3" in line
    assert halving.most == 3 and tried == [7, 3, 3, 1, 3, 3, 1]


def test_one_prompt_that_does_not_fit_is_the_users_to_know():
    def run(start, stop):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(InputError, match=r"out of memory while scoring with a single prompt.*do less"):
        Halving("scoring", "do less")(2, run)


def test_other_errors_are_not_swallowed():
    def run(start, stop):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        Halving("scoring", "do less")(2, run)
