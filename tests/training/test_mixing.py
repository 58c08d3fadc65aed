"""Token mixing against plain loops; exact packing against one ordinary forward pass for every position."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

from accept_head.pair import attention_mask_for, base_model
from accept_head.signals import SIGNALS
from accept_head.trace.columns import trace_features
from accept_head.training.learn.batches import collate
from accept_head.training.learn.data import PackedTraces, StepSampler
from accept_head.training.learn.mixing import mix_tokens, pack_exact, pack_mixed, pack_prefix

LENGTHS = [(5, 7), (3, 11), (9, 4), (1, 1)]  # prompt and response tokens: unequal, so that a batch has padding


@pytest.fixture
def traces(make_traces):
    """Traces as PackedTraces hands them to the packing functions: columns as tensors."""
    return list(Dataset.from_list(make_traces(LENGTHS), features=trace_features()).with_format("torch"))


@pytest.fixture(scope="module")
def many_traces(make_traces):
    return Dataset.from_list(make_traces([(4, 40)] * 400, seed=3), features=trace_features())


def mixed_tokens(packed, trace):
    return packed.input_ids[len(trace["prompt_ids"]) :]


# --- token mixing ---------------------------------------------------------------------------------------------------


def test_mixed_token_is_the_targets_exactly_where_the_uniform_is_below_r():
    response, draft = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 4])
    uniform = torch.tensor([0.0, 0.1499, 0.15, 0.9])
    assert mix_tokens(response, draft, uniform, 0.15).tolist() == [1, 2, 7, 4]


@pytest.mark.parametrize("r", [0.0, 0.15, 0.5, 1.0])
def test_mixed_labels_count_only_where_the_fed_token_is_the_one_they_speak_of(traces, r):
    for seed, trace in enumerate(traces):
        prompt, response, draft = (trace[name].tolist() for name in ("prompt_ids", "response_ids", "draft_ids"))
        uniform = torch.rand(len(response), generator=torch.Generator().manual_seed(seed))
        packed = pack_mixed(trace, uniform, r)

        fed = [x if u < r else y for x, y, u in zip(response, draft, uniform.tolist(), strict=True)]
        token_mask, next_mask = [False] * len(packed.input_ids), [False] * len(packed.input_ids)
        token_label, next_label = [0.0] * len(packed.input_ids), [0.0] * len(packed.input_ids)
        after_mask, after_label = [False] * len(packed.input_ids), [0.0] * len(packed.input_ids)
        next_mask[len(prompt) - 1], next_label[len(prompt) - 1] = True, trace["overlap"][0].item()
        for i, token in enumerate(fed):
            token_mask[len(prompt) + i] = token == draft[i]
            token_label[len(prompt) + i] = trace["acceptance"][i].item()
            if i + 1 < len(fed):
                next_mask[len(prompt) + i] = token == response[i]
                next_label[len(prompt) + i] = trace["overlap"][i + 1].item()
                after_mask[len(prompt) + i] = token == draft[i] and trace["accepted"][i].item()
                after_label[len(prompt) + i] = trace["overlap"][i + 1].item()
        assert packed.input_ids.tolist() == prompt + fed
        assert packed.position_ids.tolist() == list(range(len(packed.input_ids)))
        assert (packed.weights[:, 0] > 0).tolist() == token_mask
        assert (packed.weights[:, 1] > 0).tolist() == next_mask
        assert (packed.weights[:, 2] > 0).tolist() == after_mask
        where_after = packed.weights[:, 2] > 0
        assert packed.labels[where_after, 2].tolist() == [v for v, m in zip(after_label, after_mask, strict=True) if m]
        where_token, where_next, _ = (packed.weights > 0).unbind(-1)
        assert packed.labels[where_token, 0].tolist() == [v for v, m in zip(token_label, token_mask, strict=True) if m]
        assert packed.labels[where_next, 1].tolist() == [v for v, m in zip(next_label, next_mask, strict=True) if m]


@pytest.mark.parametrize(
    "pack",
    [lambda trace: pack_mixed(trace, torch.full(trace["response_ids"].shape, 0.9), 0.5), pack_exact, pack_prefix],
    ids=["mixing", "exact", "prefix"],
)
def test_the_drawn_token_stands_where_its_label_and_its_signals_do(traces, pack):
    """Found by value: the label at a place is a(Y), the signals are those of the very Y that stands there."""
    batch = collate([pack(trace) for trace in traces])
    for row, trace in enumerate(traces):
        names = ("draft_ids", "acceptance", *SIGNALS)
        known = list(zip(*(trace[name].tolist() for name in names), strict=True))
        counts = batch.weights[row, :, 0] > 0
        read = batch.labels[row, counts, 0].tolist(), *batch.signals[row, counts].T.tolist()
        assert list(zip(batch.drawn_ids[row, counts].tolist(), *read, strict=True)) == known


@pytest.mark.parametrize("r", [0.15, 0.6])
def test_share_of_target_tokens_is_r(many_traces, r):
    """Binomial: n = 400 x 40 positions; |z| < 4 fails a right mask with p < 1e-4."""
    packed = PackedTraces(many_traces, "mixing", r=r, seed=0)
    taken = total = 0
    for row, trace in enumerate(many_traces.with_format("torch")):
        differ = trace["response_ids"] != trace["draft_ids"]
        fed = mixed_tokens(packed[0, row], trace)
        taken += int((fed == trace["response_ids"])[differ].sum())
        total += int(differ.sum())
    z = (taken - total * r) / math.sqrt(total * r * (1 - r))
    assert abs(z) < 4
    off_by_five_percent = (taken - total * (r + 0.05)) / math.sqrt(total * r * (1 - r))
    assert abs(off_by_five_percent) > 4, "the test has no power"


def fed_by_trace(traces, *, seed, epochs, micro_batch_size, world):
    """{(epoch, prompt index): fed ids} of a whole run, over all ranks."""
    fed = {}
    packed = PackedTraces(traces, "mixing", r=0.5, seed=seed)
    for rank in range(world):
        options = {"epochs": epochs, "batch_size": 8, "micro_batch_size": micro_batch_size, "seed": seed}
        for micro_batch in StepSampler(len(traces), **options, rank=rank, world=world):
            for epoch, row in micro_batch:
                item = packed[epoch, row]
                fed[epoch, item.index] = item.input_ids.tolist()
    return fed


def test_mask_is_redrawn_each_epoch_and_depends_on_seed_epoch_and_trace_alone(many_traces):
    traces = many_traces.select(range(16))
    reference = fed_by_trace(traces, seed=5, epochs=2, micro_batch_size=8, world=1)
    assert len(reference) == 2 * 16
    for micro_batch_size, world in ((1, 1), (4, 1), (2, 2), (1, 4)):
        assert fed_by_trace(traces, seed=5, epochs=2, micro_batch_size=micro_batch_size, world=world) == reference
    for index in range(16):
        assert reference[0, index] != reference[1, index]
    other_seed = fed_by_trace(traces, seed=6, epochs=2, micro_batch_size=8, world=1)
    assert all(other_seed[key] != reference[key] for key in reference)


# --- exact packing --------------------------------------------------------------------------------------------------


def hidden_states(model, batch, allowed, positions):
    mask = attention_mask_for(model, allowed)
    return base_model(model)(input_ids=batch.input_ids, position_ids=positions, attention_mask=mask, use_cache=False)[0]


def separate_hidden_state(model, ids):
    """The last hidden state of an ordinary forward over `ids`, at its last token."""
    return model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1]


def separate_of_proposals(model, trace):
    """(N, hidden): for every i, the state at Y_i of a forward of its own over (x, X_<i, Y_i)."""
    prompt, response, draft = (trace[name].tolist() for name in ("prompt_ids", "response_ids", "draft_ids"))
    return torch.stack([separate_hidden_state(model, [*prompt, *response[:i], draft[i]]) for i in range(len(response))])


def at_proposals(hidden, row, trace):
    trunk = len(trace["prompt_ids"]) + len(trace["response_ids"])
    return hidden[row, trunk : trunk + len(trace["response_ids"])]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_state_at_every_proposal_equals_that_of_a_forward_of_its_own(random_llama, traces, attention):
    model = random_llama(4, attention=attention)
    batch = collate([pack_exact(trace) for trace in traces])
    assert batch.input_ids.shape == (4, 25)
    hidden = hidden_states(model, batch, batch.allowed, batch.position_ids)
    assert hidden.isfinite().all(), "a padded query must not spoil the batch"
    for row, trace in enumerate(traces):
        expected = separate_of_proposals(model, trace)
        torch.testing.assert_close(at_proposals(hidden, row, trace), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_state_at_every_target_token_equals_that_of_an_ordinary_forward(random_llama, traces, attention):
    """The next label β_{i+1} stands at X_i, and β₁ at the prompt's end."""
    model = random_llama(4, attention=attention)
    batch = collate([pack_exact(trace) for trace in traces])
    hidden = hidden_states(model, batch, batch.allowed, batch.position_ids)
    for row, trace in enumerate(traces):
        prompt, response = trace["prompt_ids"].tolist(), trace["response_ids"].tolist()
        where = (batch.weights[row, :, 1] > 0).nonzero().flatten().tolist()
        assert where == list(range(len(prompt) - 1, len(prompt) + len(response) - 1))
        assert torch.equal(batch.labels[row, where, 1], trace["overlap"])
        expected = torch.stack([separate_hidden_state(model, prompt + response[:i]) for i in range(len(response))])
        torch.testing.assert_close(hidden[row, where], expected, atol=1e-5, rtol=0)


def test_exact_labels_stand_at_the_proposals_and_nowhere_else(traces):
    batch = collate([pack_exact(trace) for trace in traces])
    assert batch.indices.tolist() == [0, 1, 2, 3]
    for row, trace in enumerate(traces):
        start, count = len(trace["prompt_ids"]), len(trace["response_ids"])
        where = list(range(start + count, start + 2 * count))
        assert (batch.weights[row, :, 0] > 0).nonzero().flatten().tolist() == where
        assert torch.equal(batch.labels[row, where, 0], trace["acceptance"])
        assert torch.equal(batch.input_ids[row, where], trace["draft_ids"])


# --- what comes after a drawn token -----------------------------------------------------------------------------------


def after_by_hand(trace):
    """{i: β_{i+1}} of the accepted Y_i, i counted from 0; the last has nothing after it."""
    found, overlap = {}, trace["overlap"].tolist()
    for i, accepted in enumerate(trace["accepted"].tolist()):
        if accepted and i + 1 < len(overlap):
            found[i] = overlap[i + 1]
    return found


def after_of(packed, start):
    """The same as a pack says it: label i stands at start + i."""
    return {
        place - start: packed.labels[place, 2].item()
        for place in (packed.weights[:, 2] > 0).nonzero().flatten().tolist()
    }


@pytest.mark.parametrize("packing", ["exact", "prefix"])
def test_what_comes_after_a_drawn_token_counts_where_that_is_accepted(many_traces, packing):
    """Beside its token label, so that both logits of one input are trained."""
    for trace in list(many_traces.select(range(20)).with_format("torch")):
        prompt, response = len(trace["prompt_ids"]), len(trace["response_ids"])
        packed, start = (
            (pack_exact(trace), prompt + response) if packing == "exact" else (pack_prefix(trace), prompt - 1)
        )
        expected = after_by_hand(trace)
        assert after_of(packed, start) == expected and len(expected) > 5
        assert (packed.weights > 0)[packed.weights[:, 2] > 0, 0].all()


def test_in_scored_text_a_token_that_the_target_would_never_say_is_not_accepted(many_traces):
    """Text of other settings may hold it, and the draft propose it: Y_i = X_i, and yet a(Y_i) = 0."""
    trace = many_traces.with_format("torch")[0]
    trace["acceptance"] = torch.where(torch.arange(40) % 3 == 0, 0.0, trace["acceptance"])
    expected = {i: beta for i, beta in after_by_hand(trace).items() if i % 3}
    assert after_of(pack_prefix(trace), len(trace["prompt_ids"]) - 1) == expected != after_by_hand(trace)


# --- prefix packing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prefix_packed_state_is_the_one_each_proposal_was_drawn_from(random_llama, traces, attention):
    model = random_llama(4, attention=attention)
    batch = collate([pack_prefix(trace) for trace in traces])
    hidden = hidden_states(model, batch, batch.allowed, batch.position_ids)
    for row, trace in enumerate(traces):
        prompt, response = trace["prompt_ids"].tolist(), trace["response_ids"].tolist()
        where = (batch.weights[row, :, 0] > 0).nonzero().flatten().tolist()
        assert where == list(range(len(prompt) - 1, len(prompt) + len(response) - 1))
        assert torch.equal(batch.weights[row, :, 0] > 0, batch.weights[row, :, 1] > 0)
        assert torch.equal(batch.labels[row, where, 0], trace["acceptance"])
        assert torch.equal(batch.labels[row, where, 1], trace["overlap"])
        expected = torch.stack([separate_hidden_state(model, prompt + response[:i]) for i in range(len(response))])
        torch.testing.assert_close(hidden[row, where], expected, atol=1e-5, rtol=0)


# --- alternatives ----------------------------------------------------------------------------------------------------


def test_a_packing_that_feeds_the_drawn_token_has_no_alternatives_to_it(make_traces):
    (trace,) = Dataset.from_list(
        make_traces(LENGTHS[:1], alternatives=3), features=trace_features(alternatives=True)
    ).with_format("torch")
    for packed in (pack_exact(trace), pack_mixed(trace, torch.rand(LENGTHS[0][1]), 0.15)):
        assert packed.alternative_ids.shape == (len(packed.input_ids), 0)
        assert packed.alternatives.shape == (len(packed.input_ids), 0, 2)
