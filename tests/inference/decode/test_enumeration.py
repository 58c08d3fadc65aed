"""Losslessness proved on toy pairs: the loop's output has exactly the target's distribution, for every policy.

Nothing is sampled, so there are no false alarms: the total variation is below PROVED (1e-6, float32 rounding). With a
biased loop it is a thousand times larger.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from accept_head.acceptance import residual
from accept_head.inference import generate
from accept_head.inference.decode import loop, steps
from accept_head.inference.engine import cache
from accept_head.inference.engine.attention.kinds import AttentionKinds
from accept_head.inference.kernels import verify
from accept_head.inference.kernels.verify import Verified
from accept_head.inference.policies.max_prob import MeanMaxProbPolicy
from accept_head.randomness import DecodeStream
from tests.inference.support.enumerated_policies import (
    ALL_TOKENS,
    BIASED,
    HEADS,
    ONE,
    POLICIES,
    SAMPLINGS,
    SEED,
    THREE,
    TWO_TOKENS,
    distance,
    drafted_lengths,
    together,
)
from tests.inference.support.enumeration import (
    PROVED,
    emitted_distribution,
    random_head_policy,
    target_distribution,
    total_variation,
    uncertain_pair,
)
from tests.inference.support.toy import exact_distribution

# The pairs, the policies and the reference are such that the proofs below mean something.


def test_the_models_are_uncertain_and_disagree():
    p, q = (target_distribution(model, ONE[0], ALL_TOKENS, 3) for model in uncertain_pair(SEED, 3))
    assert len(p) == 27 and max(p.values()) < 0.4
    assert 0.3 < total_variation(p, q) < 0.9


@pytest.mark.parametrize("sampling", ["T=1", "k=2"])
@pytest.mark.parametrize("policy", [*HEADS, "confidence"])
def test_rows_stop_at_several_depths(policy, sampling):
    seen = Counter()
    together(POLICIES[policy], sampling=SAMPLINGS[sampling], watch=drafted_lengths(seen))
    assert sum(count > 20 for count in seen.values()) > 1


def test_the_reference_is_that_of_plain_forwards_over_whole_responses():
    target, _ = uncertain_pair(SEED, 3)
    for sampling in SAMPLINGS.values():
        expected = exact_distribution(target, ONE[0], 3, sampling)
        by_response = target_distribution(target, ONE[0], sampling, 3)
        found = [by_response.get((i // 9, i // 3 % 3, i % 3), 0.0) for i in range(27)]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=PROVED)


# Exactness.


def test_a_head_that_looks_ahead():
    """By two predictions of the drawn token, not by one."""
    seen = Counter()
    policy = partial(random_head_policy, 0.9, reads="before", predicts="both", std=0.2)
    assert policy().predicts_next
    assert together(policy, watch=drafted_lengths(seen)) < PROVED
    assert sum(count > 20 for count in seen.values()) > 1, "rows stop at several depths"


EVERYWHERE = ("fixed:3", "head drawn, lag 0", "confidence")  # one that never stops early, and two that do
A_FEW = [name if name in EVERYWHERE else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("policy", A_FEW)
def test_four_tokens(policy, sampling):
    assert together(POLICIES[policy], sampling=SAMPLINGS[sampling]) < PROVED


@pytest.mark.parametrize("policy", A_FEW)
def test_a_row_alone(policy):
    assert distance(POLICIES[policy]) < PROVED


@pytest.mark.parametrize("row", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rule_that_looks_at_the_whole_batch(row):
    """How many tokens a row drafts depends on the rows around it; what it emits must not."""
    seen = Counter()
    watch = drafted_lengths(seen)
    assert distance(lambda: MeanMaxProbPolicy(0.6), THREE, TWO_TOKENS, (4, 4, 4), row, watch=watch) < PROVED
    assert len(seen) > 1, "it must have stopped rounds at different lengths"


@pytest.mark.parametrize(
    "policy",
    # The two that stop early wait more often than the one that never does.
    [name if name in EVERYWHERE[1:] else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
def test_a_row_among_rows_that_end_sooner_and_later(policy):
    """It waits when it has stopped drafting and others have not, and moves to the place of the row that ends first."""
    waited = moved = 0

    def watch(round_):
        nonlocal waited, moved
        place = [request and request.index for request in round_.rows.requests].index(1)
        waited += int(round_.drafted.lengths[place]) < len(round_.drafted.ids)
        moved += place != 1

    assert distance(POLICIES[policy], THREE, TWO_TOKENS, (2, 4, 6), row=1, watch=watch) < PROVED
    assert moved > 10 and (waited > 10 or policy == "none")


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fixed:2", "head drawn, lag 0"])
def test_a_row_among_rows_that_take_each_others_places(policy, row):
    assert distance(POLICIES[policy], THREE, TWO_TOKENS, (2, 3, 3), row, batch_size=2) < PROVED


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_repetition_penalty(policy):
    assert together(POLICIES[policy], rules={"repetition_penalty": 1.3}) < PROVED
    assert together(POLICIES[policy], length=2, repetition_penalty=1.3) > BIASED  # the reference has none


@pytest.mark.parametrize("policy", ["fixed:3", "head drawn, lag 1"])
def test_with_an_end_token(policy):
    assert together(POLICIES[policy], rules={"end_token_ids": [2]}) < PROVED


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_pairs(policy):
    for seed in range(100, 106, 2):
        assert together(POLICIES[policy], vocab=4, seed=seed) < PROVED
        assert together(POLICIES[policy], length=5, sampling=SAMPLINGS["p=.8"], seed=seed) < PROVED


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_row_of_a_batch_without_filters(policy, row):
    assert distance(POLICIES[policy], THREE, ALL_TOKENS, (3, 3, 3), row) < PROVED
    assert distance(POLICIES[policy], THREE, ALL_TOKENS, (3, 2, 3), row, batch_size=2) < PROVED


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERYWHERE)
def test_four_tokens_of_a_row_alone(policy):
    assert distance(POLICIES[policy], length=4) < PROVED


# The same machinery sees a bias.


def draft_that(monkeypatch, change):
    """Let `change(run, drafted)` rewrite how many drafted tokens are submitted."""
    draft = loop.draft

    def changed(run):
        drafted = draft(run)
        if drafted.ids:
            drafted.submit(change(run, drafted))
        return drafted

    monkeypatch.setattr(loop, "draft", changed)


def until(drafted, kept):
    """Lengths cut before the first slot that is not kept. kept: (batch,) bool of each slot."""
    return torch.minimum(drafted.lengths, torch.stack(kept, dim=1).long().cumprod(-1).sum(-1))


def drop_unlikely(run, drafted):
    slots = zip(drafted.probabilities, drafted.ids, strict=True)
    return until(drafted, [q.gather(-1, ids[:, None])[:, 0] >= 0.5 for q, ids in slots])


def drop_uncertain(run, drafted):
    return until(drafted, [q.max(-1).values >= 0.5 for q in drafted.probabilities])


def drop_what_was_drawn_last_before_a_stop(run, drafted):
    room = (run.rows.max_lengths - run.rows.lengths - 1).clamp(max=run.drafting.max_draft_tokens)
    return drafted.lengths - (drafted.lengths < room).long()


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3"])
def test_dropping_a_token_by_its_own_probability_is_biased(monkeypatch, policy):
    draft_that(monkeypatch, drop_unlikely)
    assert together(POLICIES[policy], length=3) > BIASED
    assert distance(POLICIES[policy], THREE, TWO_TOKENS, row=1) > BIASED


@pytest.mark.parametrize("policy", ["head drawn, lag 0", "head before"])
def test_dropping_the_token_that_the_head_judged_is_biased(monkeypatch, policy):
    draft_that(monkeypatch, drop_what_was_drawn_last_before_a_stop)
    assert together(POLICIES[policy], length=3) > BIASED
    assert distance(POLICIES[policy], THREE, TWO_TOKENS, row=1) > BIASED


def test_dropping_a_token_that_nobody_looked_at_is_not(monkeypatch):
    """At lag 1 a stop is decided by the tokens before the last one drawn."""
    seen = Counter()
    draft_that(monkeypatch, drop_what_was_drawn_last_before_a_stop)
    assert together(HEADS["head drawn, lag 1"], watch=drafted_lengths(seen)) < PROVED
    assert seen[1] > 100  # of two


def test_dropping_a_token_by_what_it_was_drawn_from_is_not(monkeypatch):
    """max q is a function of the prefix, and says nothing of the token."""
    seen = Counter()
    draft_that(monkeypatch, drop_uncertain)
    assert together(POLICIES["fixed:3"], watch=drafted_lengths(seen)) < PROVED
    assert all(seen[length] > 100 for length in (1, 2, 3))


def test_redrawing_from_the_target_instead_of_the_residual_is_biased(monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, q: p)
    assert together(POLICIES["fixed:2"], length=3) > BIASED


@pytest.mark.parametrize("mistake", ["none", "bonus from the residual", "residual of another slot"])
def test_a_mistaken_next_token_is_biased(monkeypatch, mistake):
    def mistaken(p, q, draft_ids, drafted, accept_uniform, redraw_uniform):
        k = draft_ids.shape[1]
        if k == 0:
            return Verified(torch.zeros_like(drafted), verify.draw(p[:, 0], redraw_uniform))
        passed = accept_uniform < verify.acceptance_probability(p[:, :k], q, draft_ids)
        accepted = verify._leading(passed, drafted)
        row, slot = torch.arange(len(p)), accepted.clamp(max=k - 1)
        q_next = q[row, (slot - 1).clamp(min=0) if mistake == "residual of another slot" else slot]
        rejected = (accepted < drafted) | torch.tensor(mistake == "bonus from the residual")
        p_next = p[row, accepted]
        next_p = torch.where(rejected[:, None], residual(p_next, q_next), p_next)
        return Verified(accepted, verify.draw(next_p, redraw_uniform))

    monkeypatch.setattr(steps, "by_ratio", mistaken)
    # Where p and q differ by rounding alone, this residual is rounding, which packing lets depend on the other rows.
    monkeypatch.setattr(cache, "packs", lambda model: False)
    found = together(POLICIES["fixed:2"])
    assert found < PROVED if mistake == "none" else found > BIASED


def test_accepting_a_little_too_often_is_biased(monkeypatch):
    probability = verify.acceptance_probability
    monkeypatch.setattr(verify, "acceptance_probability", lambda *args: (1.05 * probability(*args)).clamp(max=1))
    assert together(POLICIES["fixed:2"]) > BIASED


def test_a_target_that_sees_the_next_draft_token_is_biased(monkeypatch):
    assert distance(POLICIES["fixed:2"], sampling=TWO_TOKENS) < PROVED  # a new model with such a mask would be refused
    masks = AttentionKinds.masks
    monkeypatch.setattr(AttentionKinds, "masks", lambda kinds, positions, extent: masks(kinds, positions + 1, extent))
    assert distance(POLICIES["fixed:2"], sampling=TWO_TOKENS) > BIASED


def test_a_random_number_that_decides_twice_is_found(monkeypatch):
    streams = {stream.name: stream for stream in DecodeStream}
    monkeypatch.setattr(steps, "DecodeStream", SimpleNamespace(**streams | {"ACCEPT": DecodeStream.DRAFT}))
    with pytest.raises(AssertionError, match="random number decides two choices"):
        together(POLICIES["fixed:2"])


def test_submitting_what_was_drawn_after_a_row_had_stopped_is_found(monkeypatch):
    draft_that(monkeypatch, lambda decoder, drafted: drafted.lengths.clamp(min=len(drafted.ids)))
    with pytest.raises(AssertionError, match="that its row did not draft"):
        together(POLICIES["confidence"])


def test_sampling_a_biased_loop_gives_the_distribution_that_was_enumerated(monkeypatch):
    """So the enumeration tells the truth about loops that are not lossless, too. False alarms: 1 in 10,000."""
    samples, prompt, policy = 20_000, ONE[0], POLICIES["fixed:3"]
    target, draft = uncertain_pair(SEED, 3)
    draft_that(monkeypatch, drop_unlikely)
    emitted = emitted_distribution(target, draft, [prompt], policy, ALL_TOKENS, 3, leaves_together=True)
    options = {"policy": policy(), "sampling": ALL_TOKENS, "max_new_tokens": 3, "end_token_ids": []}
    observed = Counter(map(tuple, generate(target, draft, [prompt] * samples, **options).tokens))
    assert observed.keys() <= emitted.keys()
    assert p_value(observed, emitted) > 1e-4
    assert p_value(observed, target_distribution(target, prompt, ALL_TOKENS, 3)) < 1e-4


def p_value(observed, probabilities):
    """Chi-square; responses too rare to test (expected below 5) are pooled. observed: response → how often."""
    samples = observed.total()
    expected = {response: samples * p for response, p in probabilities.items() if samples * p >= 5}
    counts = [observed[response] for response in expected]
    if len(expected) < len(probabilities):
        counts.append(samples - sum(counts))
        expected["rare"] = samples - sum(expected.values())
    scale = samples / sum(expected.values())
    return chisquare(counts, [scale * value for value in expected.values()]).pvalue
