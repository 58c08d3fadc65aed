"""When memory runs out, the batch is halved, and every record stays the same."""

from __future__ import annotations

import pytest
import torch

from accept_head import InputError, Pair, Sampling
from accept_head.training.collect.score import score
from accept_head.training.halving import Halving
from accept_head.training.respond.transformers import respond

PROMPTS = [[1, 40, 41], [1, 100, 7, 8, 9, 60, 61, 62], [1], [1, 200, 201, 30, 31], [1, 9], [1, 77, 78], [1, 5, 6]]
SAMPLED, GREEDY = Sampling(), Sampling(temperature=0)


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


def said(model, byte_tokenizer, sampling=SAMPLED, **options):
    return respond(model, byte_tokenizer(), PROMPTS, sampling, max_new_tokens=8, seed=5, **options)


@pytest.mark.parametrize(
    ("sampling", "most"), [(SAMPLED, 1), (SAMPLED, 3), (GREEDY, 2), (Sampling(temperature=0.7, top_k=0, top_p=0.9), 6)]
)
def test_responses_are_those_of_the_whole_batch(model, byte_tokenizer, scarce, sampling, most):
    whole = said(model, byte_tokenizer, sampling)
    forward = scarce(most)
    assert said(model, byte_tokenizer, sampling) == whole
    assert forward.batches[0] == len(PROMPTS) and forward.batches[-1] <= most
    assert len({tuple(row) for row in whole}) == len(PROMPTS)


def test_scores_are_those_of_the_whole_batch(model, random_llama, byte_tokenizer, scarce):
    pair = Pair(model, random_llama(2, hidden=16, layers=1), byte_tokenizer(), 261)
    responses = said(model, byte_tokenizer)
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


def test_a_message_says_so_once_and_what_fits_is_remembered(model, byte_tokenizer, scarce, capfd):
    forward = scarce(4)
    halving = Halving("generating", "do less")
    for _ in range(2):
        said(model, byte_tokenizer, halving=halving)
    (line,) = capfd.readouterr().err.splitlines()
    assert "out of memory" in line and "7" in line and "3" in line
    assert halving.most == 3
    assert forward.batches.count(7) == 1


def test_a_cpus_allocator_counts_as_well(model, byte_tokenizer, scarce):
    """Its error is a mere RuntimeError; this is a real one, of more memory than any machine has."""
    whole = said(model, byte_tokenizer)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    scarce(2, caught.value)
    assert said(model, byte_tokenizer) == whole


def test_one_prompt_that_does_not_fit_is_the_users_to_know(model, byte_tokenizer, scarce):
    scarce(0)
    with pytest.raises(InputError, match=r"out of memory while generating with a single prompt.*--max_new_tokens"):
        said(model, byte_tokenizer)


def test_other_errors_are_not_swallowed(model, byte_tokenizer, scarce):
    forward = scarce(2, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        said(model, byte_tokenizer)
    assert len(forward.batches) == 1
