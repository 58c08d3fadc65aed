"""Text sampled under one setting and scored under another: labels and proposals against slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accept_head import InputError, Pair, Sampling
from accept_head.acceptance import couple_with_target
from accept_head.trace.shards import read_traces
from accept_head.training.collect.score import score
from accept_head.training.respond.stored import StoredResponses
from tests.training.by_hand import (
    Z_LIMIT,
    FixedLogits,
    distributions,
    likely_responses,
    p_value,
    response_logits,
    signal_rows,
)

SAID = Sampling(temperature=1.0, top_k=50)
GREEDY = Sampling(temperature=0)


@pytest.fixture
def said(related_pair, sequences):
    """Prompts, and responses drawn from the target at temperature 1."""
    prompts, _ = sequences
    return prompts, likely_responses(related_pair, prompts, SAID, 12)


def scored(pair, said, sampling, **options):
    prompts, responses = said
    indices = list(range(len(prompts)))
    return score(pair, prompts, responses, sampling, seed=5, indices=indices, **options)


def test_greedy_columns_of_sampled_text_are_those_of_two_argmaxes(related_pair, said):
    agreed, followed = [], []
    for prompt, response, columns in zip(*said, scored(related_pair, said, GREEDY, drawn_with=SAID), strict=True):
        target, draft = (response_logits(m, prompt, response, 261) for m in (related_pair.target, related_pair.draft))
        agree = (target.argmax(-1) == draft.argmax(-1)).astype(float)
        assert columns["draft_ids"] == draft.argmax(-1).tolist()
        assert columns["acceptance"] == columns["overlap"] == agree.tolist()
        assert columns["accepted"] == (draft.argmax(-1) == np.array(response)).tolist()
        assert np.isfinite(columns["target_logprob"]).all() and max(columns["target_logprob"]) == 0
        plain = signal_rows(draft, GREEDY)
        np.testing.assert_allclose(columns["draft_max_prob"], plain.max(-1), rtol=1e-4)
        agreed += agree.tolist()
        followed += (target.argmax(-1) == np.array(response)).tolist()
    assert 0 < np.mean(agreed) < 1, "the pair shows nothing"
    assert 0 < np.mean(followed) < 1, "the text is greedy text"


def test_text_said_under_the_same_settings_is_an_ordinary_trace(related_pair, said):
    assert scored(related_pair, said, SAID, drawn_with=SAID) == scored(related_pair, said, SAID)


def test_labels_are_those_of_the_proposal_under_these_settings(related_pair, said):
    cold = Sampling(temperature=0.6, top_k=20)
    for prompt, response, columns in zip(*said, scored(related_pair, said, cold, drawn_with=SAID), strict=True):
        p, q = (distributions(m, prompt, response, cold, 261) for m in (related_pair.target, related_pair.draft))
        at = np.arange(len(response)), np.array(columns["draft_ids"])
        assert (q[at] > 0).all()
        np.testing.assert_allclose(columns["acceptance"], np.minimum(1, p[at] / q[at]), atol=1e-3)
        np.testing.assert_allclose(columns["overlap"], np.minimum(p, q).sum(-1), atol=1e-3)
        assert columns["accepted"] == (at[1] == np.array(response)).tolist()


def test_proposals_have_the_drafts_distribution_whatever_the_text_was_drawn_with(random_pair):
    """Chi-square over 6,000 couplings of one position with X drawn hotter than scored; right ones fail with p = 1e-4.

    Coupling with the scored distribution instead, as if X were drawn from it, fails."""
    prompt, draws = [1, 90, 91, 92], 6000
    cold, hot = Sampling(temperature=1.0, top_k=0), Sampling(temperature=2.0, top_k=0)
    q = distributions(random_pair.draft, prompt, [5], cold, 261)[0]
    p = (q + np.random.default_rng(0).dirichlet(np.full(261, 0.2))) / 2
    p_of_x = np.sqrt(p) / np.sqrt(p).sum()
    pair = Pair(FixedLogits(torch.from_numpy(np.log(p)).float()), random_pair.draft, random_pair.tokenizer, 261)
    x = torch.multinomial(torch.from_numpy(p_of_x), draws, replacement=True, generator=torch.Generator().manual_seed(0))

    def drafted(drawn_with):
        rows = score(pair, [prompt] * draws, x.unsqueeze(-1).tolist(), cold, seed=1, indices=list(range(draws)), drawn_with=drawn_with)  # noqa: E501  # fmt: skip
        return rows, np.bincount([row["draft_ids"][0] for row in rows], minlength=261)

    rows, right = drafted(hot)
    assert p_value(right, q * draws) > 1e-4
    assert p_value(drafted(cold)[1], q * draws) < 1e-4, "the test has no power"
    same = np.mean([row["accepted"][0] for row in rows])
    beta = np.minimum(p_of_x, q).sum()
    assert abs(same - beta) < Z_LIMIT * np.sqrt(beta * (1 - beta) / draws)


def test_greedy_proposals_are_the_argmax_whatever_the_text():
    """Every case of the coupling with a one-hot q: X = argmax q, another token, and one outside X's distribution."""
    p_of_x = torch.tensor([[0.5, 0.3, 0.2, 0.0]] * 4 + [[0.0, 1.0, 0.0, 0.0]])
    q = torch.eye(4)[[1, 1, 0, 2, 1]]
    x = torch.tensor([1, 0, 3, 3, 0])
    uniform = torch.full((5,), 0.999)
    coupled = couple_with_target(p_of_x, q, x, uniform, uniform)
    assert coupled.draft_ids.tolist() == q.argmax(-1).tolist()
    assert coupled.accepted.tolist() == [True, False, False, False, False]


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(random_traces_folder):
    config, _ = read_traces(random_traces_folder)
    return StoredResponses.of(random_traces_folder, config.target_fingerprint, config.draft_fingerprint)


def test_prompts_and_responses_are_those_of_the_folder(stored, random_traces_folder):
    config, traces = read_traces(random_traces_folder)
    prompts = stored.prompts()
    assert [prompt.index for prompt in prompts] == list(range(24))
    assert [list(prompt.ids) for prompt in prompts] == list(traces["prompt_ids"])
    assert [(prompt.id, prompt.domain) for prompt in prompts] == list(zip(traces["id"], traces["domain"], strict=True))
    assert stored.prompts(6) == prompts[:6] and stored.prompts(100) == prompts
    said = [response for shard in range(config.num_shards) for response in stored.responses(shard)]
    assert said == list(traces["response_ids"])


def test_settings_that_the_responses_have_cannot_be_changed(stored):
    assert stored.setting("max_new_tokens", None) == stored.setting("max_new_tokens", 12) == 12
    with pytest.raises(InputError, match=r"max_new_tokens is 8, but --responses .* with 12"):
        stored.setting("max_new_tokens", 8)
    with pytest.raises(InputError, match="max_prompts is 0"):
        stored.prompts(0)


def test_another_pair_is_refused(random_traces_folder, stored):
    target, draft = stored.config.target_fingerprint, stored.config.draft_fingerprint
    with pytest.raises(InputError, match="--target"):
        StoredResponses.of(random_traces_folder, "another", draft)
    with pytest.raises(InputError, match="--draft"):
        StoredResponses.of(random_traces_folder, target, "another")
