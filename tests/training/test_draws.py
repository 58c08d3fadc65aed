"""Drawn tokens and their alternatives against a plain loop over the records that treats each draw separately."""

from __future__ import annotations

import itertools

import pytest
import torch
from datasets import Dataset

from accept_head.signals import SIGNALS
from accept_head.trace.columns import trace_features
from accept_head.training.learn.batches import LABELS, collate
from accept_head.training.learn.draws import draws
from accept_head.training.learn.mixing import pack_prefix

LENGTHS = [(5, 7), (3, 11), (9, 4), (1, 1)]
AXES = [LABELS.index("token"), LABELS.index("after")]


def state_batch(records, kept):
    """The state of each place is one number: where it stood in the draft's input."""
    data = Dataset.from_list(records, features=trace_features(alternatives=True)).with_format("torch")
    batch = collate([pack_prefix(trace, kept) for trace in data])
    hidden = torch.arange(batch.input_ids.numel()).view(*batch.input_ids.shape, 1).float()
    return batch.at(hidden, AXES), hidden


def draws_one_by_one(records, kept, hidden):
    """(state, token, log q, entropy, max q, a, whether β of the next one is known, β) of each."""
    for row, trace in enumerate(records):
        for i, token in enumerate(trace["draft_ids"]):
            state = float(hidden[row, len(trace["prompt_ids"]) - 1 + i, 0])
            shared = trace["draft_entropy"][i], trace["draft_max_prob"][i]
            known = trace["accepted"][i] and trace["acceptance"][i] > 0 and i + 1 < len(trace["draft_ids"])
            after = trace["overlap"][i + 1] if known else 0.0
            yield state, token, trace["draft_logprob"][i], *shared, trace["acceptance"][i], known, after
            for j in range(3 * i, 3 * i + kept):
                values = (trace[name][j] for name in ("alternative_ids", "alternative_logprob"))
                yield state, *values, *shared, trace["alternative_acceptance"][j], False, 0.0


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_each_token_drawn_from_a_state_stands_once_with_the_sum_of_its_labels(make_traces, kept):
    """Only the token label is known of an alternative, and of the signals only log q is its own."""
    records = make_traces(LENGTHS, alternatives=3)
    batch, hidden = state_batch(records, kept)
    found = draws(batch, AXES)

    expected = []
    one_by_one = list(draws_one_by_one(records, kept, hidden))
    for _, again in itertools.groupby(one_by_one, key=lambda draw: draw[0]):
        tokens = {}
        for draw in again:
            tokens.setdefault(draw[1], []).append(draw)
        for same in tokens.values():
            sums = [sum(d[5] for d in same), sum(1 - d[5] for d in same)]
            sums += [sum(d[7] for d in same), sum(d[6] * (1 - d[7]) for d in same)]
            expected.append((*same[0][:5], *sums))
    assert (len(expected) < len(one_by_one)) == (kept > 0), "no token was drawn twice: the test has no power"
    states = batch.hidden[:, 0] if found.place is None else batch.hidden[found.place, 0]
    signals = [found.signals[:, SIGNALS.index(f"draft_{name}")] for name in ("logprob", "entropy", "max_prob")]
    sums = found.accept[:, 0], found.reject[:, 0], found.accept[:, 1], found.reject[:, 1]
    got = list(zip(*(column.tolist() for column in (states, found.ids, *signals, *sums)), strict=True))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert batch.counts.tolist() == [count for _, count in LENGTHS]


def test_a_place_that_only_another_label_counts_at_has_no_alternatives(make_traces):
    records = make_traces(LENGTHS, alternatives=3)
    batch, _ = state_batch(records, 3)
    batch.weights[:2, LABELS.index("token")] = 0.0
    batch.weights[:2, LABELS.index("after")] = torch.tensor([1.0, 0.0])
    found = draws(batch, AXES)
    assert (found.place == 0).sum() == 1, "its token is kept for what is said of the next one"
    assert (found.place == 1).sum() == 0, "nothing is known of it"
    assert (found.place == 2).sum() > 1
    alone = draws(batch, AXES[1:])
    assert torch.equal(alone.accept + alone.reject > 0, torch.ones_like(alone.accept, dtype=torch.bool))
