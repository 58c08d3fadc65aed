"""Two verifiers (the ratio test and sampler match), policies that drop drawn tokens, and refused combinations."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from accept_head import InputError, Sampling
from accept_head.inference import RowPolicy, generate
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.decode.processing import Processing
from accept_head.inference.decode.stopping import Stopping
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policy import Signal
from tests.inference.support.enumerated_policies import (
    ALL_TOKENS,
    BIASED,
    ONE,
    POLICIES,
    SEED,
    THREE,
    TWO_TOKENS,
    distance,
    drafted_lengths,
    together,
)
from tests.inference.support.enumeration import PROVED, uncertain_pair
from tests.inference.support.toy import ragged_prompts


class Dropping(RowPolicy):
    """Drafts k tokens and drops all from the first one on whose `signal` is below 0.5."""

    def __init__(self, signal, k=3):
        self.needs, self.max_draft_tokens = frozenset({signal}), k
        if signal is Signal.LOGPROB:
            self.lossless = frozenset({"match"})

    def start_round(self, live):
        self.kept, self.going = torch.zeros(len(live), dtype=torch.long), torch.ones_like(live)
        return super().start_round(live)

    def keep_drafting(self, step):
        score = step.max_prob if step.logprob is None else step.logprob.exp()
        self.going = self.going & (score >= 0.5)
        self.kept = self.kept + self.going
        return step.active

    def trim(self, drafted):
        return torch.minimum(self.kept, drafted)


def unlikely():
    return Dropping(Signal.LOGPROB)


def uncertain():
    return Dropping(Signal.MAX_PROB)


# --- sampler match ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_sampler_match_is_exact_for_every_policy(policy):
    assert together(POLICIES[policy], length=3, verifier="match") < PROVED


@pytest.mark.parametrize("policy", ["fixed:2", "head drawn, lag 0", "adaedl"])
def test_sampler_match_is_exact_among_other_rows(policy):
    assert distance(POLICIES[policy], THREE, TWO_TOKENS, (2, 3, 4), row=1, verifier="match") < PROVED


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(top_k=0), marks=pytest.mark.slow),
        Sampling(temperature=0.7, top_k=3),
        pytest.param(Sampling(top_p=0.8), marks=pytest.mark.slow),
    ],
)
def test_with_sampler_match_a_prompt_gives_the_tokens_of_the_target_alone(sampling):
    """Its random numbers belong to places in the text: no policy, no batch changes a token."""
    target, draft = uncertain_pair(SEED, 5)
    prompts = ragged_prompts(6, vocab=5, longest=5)
    options = {"sampling": sampling, "max_new_tokens": 16, "end_token_ids": [], "verifier": "match"}
    alone = generate(target, draft, prompts, policy="none", **options).tokens
    assert len({tuple(row) for row in alone}) > 1
    for policy in (*POLICIES.values(), unlikely, uncertain):
        assert generate(target, draft, prompts, policy=policy(), batch_size=3, **options).tokens == alone
    assert generate(target, draft, prompts, policy="none", seed=1, **options).tokens != alone


def test_sampler_match_accepts_as_often_as_both_draw_the_same_token():
    """Σ p·q, where the ratio test accepts Σ min(p, q). 4 standard errors: false alarms 1 in 15,000."""
    target, draft = uncertain_pair(SEED, 3)
    prompt, rows = ONE[0], 4000
    with torch.no_grad():
        p, q = (model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1) for model in (target, draft))
    expected = {"match": float((p * q).sum()), "ratio": float(torch.minimum(p, q).sum())}
    assert expected["ratio"] - expected["match"] > 0.1
    for verifier, rate in expected.items():
        options = {"sampling": ALL_TOKENS, "max_new_tokens": 2, "end_token_ids": [], "verifier": verifier}
        _, stats = generate(target, draft, [prompt] * rows, policy="fixed:1", **options)
        accepted = sum(row.accepted for row in stats) / rows
        assert abs(accepted - rate) < 4 * math.sqrt(rate * (1 - rate) / rows)


# --- dropping drawn tokens -------------------------------------------------------------------------------------------


def test_dropping_by_the_prefix_is_exact_under_both():
    seen = Counter()
    assert together(uncertain, watch=drafted_lengths(seen)) < PROVED
    assert all(seen[length] > 100 for length in (1, 2, 3))


@pytest.mark.slow
def test_dropping_by_the_prefix_is_exact_with_sampler_match_and_among_other_rows():
    assert together(uncertain, verifier="match") < PROVED
    assert distance(uncertain, THREE, TWO_TOKENS, (2, 4, 3), row=1) < PROVED


def test_dropping_by_what_was_drawn_is_exact_only_with_sampler_match():
    assert together(unlikely, length=3, verifier="match") < PROVED
    assert together(unlikely, length=3, allow_lossy=True) > BIASED


def test_a_lossy_policy_is_refused_when_sampling_unless_wanted():
    target, draft = uncertain_pair(SEED, 3)
    options = {"sampling": ALL_TOKENS, "max_new_tokens": 4, "end_token_ids": []}
    with pytest.raises(InputError, match=r"Dropping drops drawn tokens .* under the ratio test; use verifier='match'"):
        generate(target, draft, ONE, policy=unlikely(), **options)
    for allowed in ({"verifier": "match"}, {"allow_lossy": True}, {"sampling": Sampling(temperature=0)}):
        assert len(generate(target, draft, ONE, policy=unlikely(), **options | allowed).tokens[0]) == 4


def test_an_unknown_verifier_is_refused():
    with pytest.raises(InputError, match=r"verifier is 'exact', expected one of \['match', 'ratio'\]"):
        generate(*uncertain_pair(SEED, 3), ONE, policy="none", verifier="exact", max_new_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dropped_tokens_are_drafted_and_discarded_but_not_verified(temperature):
    target, draft = uncertain_pair(SEED, 5)
    told, widths = [], []

    class Listening(Dropping):
        def observe(self, outcome):
            told.append((outcome.drafted.sum(), outcome.submitted.sum(), outcome.judged.max(), outcome.accepted.sum()))

    def watch(round_):
        widths.append((round_.logits.shape[1], int(round_.outcome.submitted.max()) + 1))

    sampling = Sampling(temperature=temperature, top_k=0)
    prompts = ragged_prompts(3, vocab=5, longest=5)
    options = {"max_new_tokens": 30, "sampling": sampling, "end_token_ids": [], "watch": watch}
    tokens, stats = generate(target, draft, prompts, policy=Listening(Signal.MAX_PROB), **options)
    drafted, submitted, _, accepted = (int(sum(column)) for column in zip(*told, strict=True))
    assert drafted == sum(row.drafted for row in stats) == sum(row.draft_forwards for row in stats)
    assert drafted > submitted == sum(row.submitted for row in stats)
    assert submitted > accepted == sum(row.accepted for row in stats)
    assert drafted - accepted == sum(row.discarded for row in stats)
    assert sum(len(row) for row in tokens) == accepted + sum(row.rounds for row in stats)
    assert all(width == most for width, most in widths) and len(set(widths)) > 1, "only what is verified costs"


def test_greedy_output_does_not_depend_on_what_is_dropped():
    target, draft = uncertain_pair(SEED, 5)
    prompts = ragged_prompts(5, vocab=5, longest=5)
    plain = generate(target, draft, prompts, policy="none", max_new_tokens=20, end_token_ids=[]).tokens
    for policy in (unlikely(), uncertain()):
        assert generate(target, draft, prompts, policy=policy, max_new_tokens=20, end_token_ids=[]).tokens == plain


def test_a_trim_of_another_form_is_refused():
    class Wrong(Dropping):
        def trim(self, drafted):
            return drafted.float()

    with pytest.raises(
        InputError, match=r"policy Wrong: trim returned torch.float32 \(1,\), expected a int64 tensor \(1,\)"
    ):
        generate(*uncertain_pair(SEED, 3), ONE, policy=Wrong(Signal.MAX_PROB), max_new_tokens=4)


# --- requests that arrive while others are decoded -------------------------------------------------------------------


@pytest.mark.parametrize("policy", [lambda: FixedPolicy(3), lambda: ConfidencePolicy(0.4), lambda: FixedPolicy(0)])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_requests_that_arrive_later_get_the_same_tokens(policy, every):
    """None is handed out `every` times before each request, also when nothing is being decoded."""
    target, draft = uncertain_pair(SEED, 5)
    prompts = ragged_prompts(7, vocab=5, longest=5)
    sampling = Sampling(top_k=0)
    options = {"sampling": sampling, "max_new_tokens": 9, "end_token_ids": []}
    expected = generate(target, draft, prompts, policy=policy(), **options).tokens
    requests = make_requests(prompts, 9)

    def arriving():
        for request in requests:
            yield from [None] * every
            yield request
        yield from [None] * every

    chosen = policy()
    decoder = make_decoder(target, draft, requests, chosen, batch_size=3, greedy=False)
    live = []
    finished = decoder.run(
        arriving(),
        policy=chosen,
        processing=Processing(sampling, 5),
        stopping=Stopping([], [], target.device),
        watch=lambda round_: live.append(int(round_.outcome.live.sum())),
    )
    tokens = {done.request.index: done.token_ids for done in finished}
    assert [tokens[index] for index in range(7)] == expected
    assert max(live) > 1
    assert (min(live[:2]) < 3) == (every > 0), "a batch that is not full is decoded all the same"
