"""Scores against a slow loop: one unpadded forward per sequence, transformers' warpers by hand, coupling in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import rel_entr

from accept_head import Pair, Sampling
from accept_head.prompts import Prompt
from accept_head.trace.columns import ALTERNATIVE_COLUMNS
from accept_head.trace.shards import read_traces
from accept_head.training.collect.score import score
from tests.training.by_hand import (
    Z_LIMIT,
    FixedLogits,
    distributions,
    likely_responses,
    p_value,
    processed,
    response_logits,
    signal_rows,
    uniform_number,
)
from tests.training.records import make_records

SAMPLINGS = [
    Sampling(temperature=0.8, top_k=20),
    Sampling(temperature=1.3, top_k=0, top_p=0.9),
    Sampling(temperature=1.0, top_k=50, top_p=0.95),
    Sampling(temperature=0),
]


def divergences_of(pair, prompt, response, sampling):
    """(N,) KL of the target against the draft, by scipy: both softmaxes at this temperature, no token left out."""
    plain = Sampling(temperature=sampling.temperature or 1.0, top_k=0)
    p, q = (distributions(model, prompt, response, plain, 261) for model in (pair.target, pair.draft))
    return rel_entr(p, q).sum(-1)


def test_logits_are_computed_at_response_positions_of_as_many_rows_as_fit(related_pair, sequences, monkeypatch):
    """Whatever the prompts' lengths: memory does not grow with prompt x vocabulary."""
    prompts, responses = sequences
    prompts = [[1, *range(20, 100)], *prompts[1:]]
    options = {"seed": 5, "indices": [7, 1, 2, 3]}
    shapes = []
    for model in (related_pair.target, related_pair.draft):
        monkeypatch.setattr(model, "forward", noting(model.forward, shapes))
    whole = score(related_pair, prompts, responses, Sampling(), **options)
    longest = max(map(len, responses))
    assert {shape[:2] for shape in shapes} == {(4, longest)}
    shapes.clear()
    room = 2.5 * longest * 2 * 261 * 4 / 0.25  # for the logits of two responses
    monkeypatch.setattr("accept_head.training.collect.score.available_bytes", lambda device: room)
    parts = score(related_pair, prompts, responses, Sampling(), **options)
    assert {shape[0] for shape in shapes} == {2}
    for one, other in zip(whole, parts, strict=True):
        assert one["draft_ids"] == other["draft_ids"] and one["overlap"] == pytest.approx(other["overlap"], abs=1e-5)


def noting(forward, shapes):
    def run(**options):
        output = forward(**options)
        shapes.append(tuple(output.logits.shape))
        return output

    return run


def coupled_by_hand(p, q, x, seed, index, step):
    """(Y, accepted) of one position."""
    if q[x] > 0 and uniform_number(seed, index, step, 0) < q[x] / p[x]:
        return x, True
    rest = np.maximum(q - p, 0)
    below = np.cumsum(rest) > uniform_number(seed, index, step, 1) * rest.sum()
    return int(below.argmax()), False


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_column_equals_that_of_a_slow_loop(related_pair, sequences, sampling):
    prompts, _ = sequences
    responses = likely_responses(related_pair, prompts, sampling, 8)
    responses[1] = responses[1][:3]  # unequal lengths, so that the batch is padded
    indices = [7, 1_000_000_007, 2, 3]
    scored = score(related_pair, prompts, responses, sampling, seed=5, indices=indices)

    outcomes = set()
    for prompt, response, index, columns in zip(prompts, responses, indices, scored, strict=True):
        p_rows = distributions(related_pair.target, prompt, response, sampling, 261)
        draft_logits = response_logits(related_pair.draft, prompt, response, 261)
        q_rows, signals = processed(draft_logits, sampling), signal_rows(draft_logits, sampling)
        divergences = divergences_of(related_pair, prompt, response, sampling)
        assert columns["response_ids"] == response
        assert all(len(values) == len(response) for values in columns.values())
        for i, (p, q, signal) in enumerate(zip(p_rows, q_rows, signals, strict=True)):
            y, accepted = coupled_by_hand(p, q, response[i], 5, index, i)
            assert (columns["draft_ids"][i], columns["accepted"][i]) == (y, accepted)
            expected = {
                "acceptance": min(1.0, p[y] / q[y]),
                "overlap": np.minimum(p, q).sum(),
                "target_logprob": math.log(p[response[i]]),
                "draft_logprob": math.log(signal[y]),
                "draft_max_prob": signal.max(),
                "draft_entropy": -sum(value * math.log(value) for value in signal if value > 0),
                "divergence": divergences[i],
            }
            assert {name: columns[name][i] for name in expected} == pytest.approx(expected, abs=2e-4)
            outcomes.add(accepted)
    assert outcomes == {True, False}


def test_slow_loop_would_see_scores_read_one_position_late(random_pair, sequences):
    prompts, responses = sequences
    scored = score(random_pair, prompts, responses, Sampling(), seed=5, indices=[0, 1, 2, 3])
    p = distributions(random_pair.target, prompts[0], responses[0], Sampling(), 261)
    q = distributions(random_pair.draft, prompts[0], responses[0], Sampling(), 261)
    assert np.abs(np.minimum(p, q).sum(-1)[1:] - scored[0]["overlap"][:-1]).max() > 0.01


def test_divergence_is_finite_where_top_k_leaves_the_two_nothing_in_common(random_pair, sequences):
    prompts, responses = sequences
    scored = score(random_pair, prompts, responses, Sampling(top_k=1), seed=5, indices=[0, 1, 2, 3])
    overlaps = np.concatenate([row["overlap"] for row in scored])
    divergences = np.concatenate([row["divergence"] for row in scored])
    assert (overlaps == 0).any()
    assert np.isfinite(divergences).all() and (divergences > 0).all()


def test_a_draft_that_is_its_target_has_no_divergence(random_pair, sequences):
    prompts, responses = sequences
    pair = Pair(random_pair.target, random_pair.target, random_pair.tokenizer, 261)
    for row in score(pair, prompts, responses, Sampling(temperature=0.7), seed=5, indices=[0, 1, 2, 3]):
        assert row["divergence"] == [0.0] * len(row["divergence"])


def test_the_slow_loop_would_see_a_divergence_of_the_draft_against_the_target(related_pair, sequences):
    prompts, _ = sequences
    responses = likely_responses(related_pair, prompts[:1], Sampling(), 8)
    (scored,) = score(related_pair, prompts[:1], responses, Sampling(), seed=5, indices=[0])
    turned = Pair(related_pair.draft, related_pair.target, related_pair.tokenizer, 261)
    expected, wrong = (divergences_of(pair, prompts[0], responses[0], Sampling()) for pair in (related_pair, turned))
    assert scored["divergence"] == pytest.approx(expected, abs=2e-4)
    assert scored["divergence"] != pytest.approx(wrong, abs=1e-2)


def test_greedy_acceptance_says_whether_the_two_argmaxes_agree(related_pair):
    prompts = [[1, 50], [1, 60, 61], [1, 70, 71, 72]]
    responses = likely_responses(related_pair, prompts, Sampling(temperature=0), 20)
    scored = score(related_pair, prompts, responses, Sampling(temperature=0), seed=0, indices=[0, 1, 2])
    agreed = []
    for prompt, response, columns in zip(prompts, responses, scored, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        models = (related_pair.target, related_pair.draft)
        wanted, proposed = (model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1) for model in models)
        assert columns["draft_ids"] == proposed.tolist()
        agree = (wanted == proposed).tolist()
        assert columns["accepted"] == agree
        assert columns["acceptance"] == columns["overlap"] == [float(value) for value in agree]
        agreed += agree
    assert 0 < sum(agreed) < len(agreed)


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_alternatives_have_the_acceptance_of_a_slow_loop_and_leave_all_else_as_it_is(related_pair, sequences, sampling):
    prompts, _ = sequences
    responses = likely_responses(related_pair, prompts, sampling, 8)
    responses[1] = responses[1][:3]
    options = {"seed": 5, "indices": [7, 8, 2, 3]}
    without = score(related_pair, prompts, responses, sampling, **options)
    seen = set()
    for prompt, response, columns, plain in zip(
        prompts, responses, score(related_pair, prompts, responses, sampling, **options, alternatives=3), without,
        strict=True,
    ):  # fmt: skip
        others = {name: np.array(columns.pop(name)).reshape(len(response), 3) for name in ALTERNATIVE_COLUMNS}
        assert columns == plain
        p_rows, q_rows = (
            distributions(model, prompt, response, sampling, 261) for model in (related_pair.target, related_pair.draft)
        )
        for i, (p, q) in enumerate(zip(p_rows, q_rows, strict=True)):
            ids = others["alternative_ids"][i]
            assert (q[ids] > 0).all(), "an alternative that the draft cannot draw"
            assert others["alternative_logprob"][i] == pytest.approx(np.log(q[ids]), abs=2e-4)
            assert others["alternative_acceptance"][i] == pytest.approx(np.minimum(1, p[ids] / q[ids]), abs=2e-4)
            seen |= set(ids.tolist())
    assert len(seen) > 10


def test_alternatives_have_the_drafts_distribution_and_know_nothing_of_the_drawn_token(random_pair):
    """Chi-square over 2,000 x 3 draws of one position; right ones fail with p = 1e-4. Drawn again with the numbers of
    the coupling, they would mostly be the drawn token itself."""
    sampling, prompt, draws = Sampling(temperature=1.5, top_k=0), [1, 90, 91, 92], 2000
    p, q = (distributions(model, prompt, [5], sampling, 261)[0] for model in (random_pair.target, random_pair.draft))
    scored = score(
        random_pair, [prompt] * draws, [[5]] * draws, sampling, seed=1, indices=list(range(draws)), alternatives=3
    )
    drawn = np.array([row["alternative_ids"] for row in scored])
    for column in (*drawn.T, drawn.ravel()):
        counts = np.bincount(column, minlength=261)
        assert p_value(counts, q * len(column)) > 1e-4
    assert p_value(counts, p * len(column)) < 1e-4, "the test has no power"
    for first, second in ((0, 1), (1, 2), (0, 2)):
        same, expected = (drawn[:, first] == drawn[:, second]).mean(), (q**2).sum()
        assert abs(same - expected) < Z_LIMIT * math.sqrt(expected * (1 - expected) / draws)
    drafted = np.array([row["draft_ids"][0] for row in scored])
    frequent = np.bincount(drafted).argmax()
    same, expected = (drawn[drafted == frequent] == frequent).mean(), q[frequent]
    assert abs(same - expected) < Z_LIMIT * math.sqrt(expected * (1 - expected) / (3 * (drafted == frequent).sum()))


def test_batch_composition_does_not_change_what_is_drafted(random_pair, sequences):
    prompts, responses = sequences
    options = {"sampling": Sampling(temperature=1.2), "seed": 9}
    together = score(random_pair, prompts, responses, indices=[0, 1, 2, 3], **options)
    backwards = score(random_pair, prompts[::-1], responses[::-1], indices=[3, 2, 1, 0], **options)[::-1]
    alone = [
        score(random_pair, [prompts[row]], [responses[row]], indices=[row], **options)[0] for row in range(len(prompts))
    ]
    for first, second, third in zip(together, backwards, alone, strict=True):
        for name in ("draft_ids", "accepted"):
            assert first[name] == second[name] == third[name]
        assert first["acceptance"] == pytest.approx(third["acceptance"], abs=1e-4)
    for changed in ({"indices": [4, 5, 6, 7]}, {"indices": [0, 1, 2, 3], "seed": 10}):
        other = score(random_pair, prompts, responses, **{**options, **changed})
        assert [row["draft_ids"] for row in other] != [row["draft_ids"] for row in together]


def test_chunks_of_positions_do_not_change_the_scores(random_pair, sequences, monkeypatch):
    prompts, responses = sequences
    whole = score(random_pair, prompts, responses, Sampling(), seed=9, indices=[0, 1, 2, 3])
    monkeypatch.setattr("accept_head.training.collect.score.CHUNK_ELEMENTS", 261 * 4)
    assert score(random_pair, prompts, responses, Sampling(), seed=9, indices=[0, 1, 2, 3]) == whole


def test_proposals_have_the_drafts_distribution(random_pair):
    """Chi-square over 6,000 couplings of one position with X ∼ p; right proposals fail with p = 1e-4."""
    sampling, prompt, draws = Sampling(temperature=1.5, top_k=0), [1, 90, 91, 92], 6000
    q = distributions(random_pair.draft, prompt, [5], sampling, 261)[0]
    # Half of the target's mass is the draft's, so that both branches of the coupling matter.
    p = (q + np.random.default_rng(0).dirichlet(np.full(261, 0.2))) / 2
    target = FixedLogits(torch.from_numpy(1.5 * np.log(p)).float())
    pair = Pair(target, random_pair.draft, random_pair.tokenizer, 261)
    x = torch.multinomial(torch.from_numpy(p), draws, replacement=True, generator=torch.Generator().manual_seed(0))
    scored = score(pair, [prompt] * draws, x.unsqueeze(-1).tolist(), sampling, seed=1, indices=list(range(draws)))

    drafted = np.bincount([row["draft_ids"][0] for row in scored], minlength=261)
    assert p_value(drafted, q * draws) > 1e-4
    assert p_value(drafted, p * draws) < 1e-4, "the test has no power"
    beta = np.minimum(p, q).sum()
    assert 0.2 < beta < 0.8
    accepted = np.mean([row["accepted"][0] for row in scored])
    assert abs(accepted - beta) < Z_LIMIT * math.sqrt(beta * (1 - beta) / draws)


def test_accepted_share_of_the_trained_pairs_traces_is_what_overlap_and_labels_promise(embedded_traces):
    """Given all that went before it, accepted_i is Bernoulli(β_i), and Bernoulli(a(Y_i)) once Y_i is known.

    Both sums of differences are martingales, and right traces exceed the limit with p = 1e-4 each.
    """
    config, traces = read_traces(embedded_traces("train"))
    assert config.sampling == Sampling()
    flat = {
        name: np.concatenate([np.asarray(row, dtype=float) for row in traces[name]])
        for name in ("accepted", "overlap", "acceptance")
    }
    assert len(flat["accepted"]) > 5000
    for promised in (flat["overlap"], flat["acceptance"]):
        assert abs(z_score(flat["accepted"], promised)) < Z_LIMIT
        assert abs(z_score(flat["accepted"], 0.95 * promised)) > Z_LIMIT, "the test has no power"


def z_score(outcomes, probabilities):
    return (outcomes - probabilities).sum() / math.sqrt((probabilities * (1 - probabilities)).sum())


def test_accepted_proposals_are_the_targets_tokens_and_rejected_ones_are_not(embedded_traces):
    _, traces = read_traces(embedded_traces("train"))
    for trace in traces.select(range(50)):
        same = [x == y for x, y in zip(trace["response_ids"], trace["draft_ids"], strict=True)]
        assert same == trace["accepted"]
        assert all(label < 1 for label, kept in zip(trace["acceptance"], trace["accepted"], strict=True) if not kept)


def test_finished_says_whether_the_response_ended_by_itself(random_llama, byte_tokenizer):
    target = random_llama(1)
    with torch.no_grad():
        target.lm_head.weight[2] *= 3  # the end token is likelier, so that some responses end and some do not
    pair = Pair(target, random_llama(2, hidden=16, layers=1), byte_tokenizer(), 261)
    prompts = [Prompt(i, str(i), "", (1, 20 + i)) for i in range(24)]
    records = make_records(pair, prompts, _Settings())
    assert {record["finished"] for record in records} == {True, False}
    for record in records:
        assert record["finished"] == (record["response_ids"][-1] == 2)
        assert 2 not in record["response_ids"][:-1]
        assert record["finished"] or len(record["response_ids"]) == _Settings.max_new_tokens


class _Settings:
    """The part of a TraceConfig that make_records reads."""

    end_token_ids = (2,)
    shard_size = 24
    sampling = Sampling()
    max_new_tokens = 10
    batch_size = 24
    seed = 0
    alternatives = None
    depths = None


def test_a_target_with_more_outputs_than_the_draft_answers_in_the_shared_vocabulary(random_llama, byte_tokenizer):
    """Embedding matrices are padded to different sizes in real families; no id beyond the smaller one may be drawn."""
    pair = Pair(random_llama(1, vocab=320), random_llama(2, hidden=16, layers=1), byte_tokenizer(), 261)
    prompts = [Prompt(i, str(i), "", (1, 20 + i)) for i in range(8)]
    for record in make_records(pair, prompts, _Settings()):
        assert max(record["response_ids"]) < 261
