"""The policy shown in docs/policies.md runs unchanged in the loop, the enumeration, replay and another draft loop.

tests/integration/vllm/test_own_policy.py runs it in vLLM.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from accept_head import Sampling
from accept_head.inference import generate
from accept_head.inference.adapters.vllm.host import Verdict
from accept_head.inference.policies.drafting import Drafting
from accept_head.inference.policy import BOTH
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.lossless import PROVED, Shape, enumerate_rounds
from tests.inference.support.foreign import Engine, host_of
from tests.inference.support.made_up import make_sample, walk


class Mine:
    """It in scalars."""

    def __init__(self):
        self.share = 0.5

    def drafts(self, probabilities):
        """Of one row, which may draft as many tokens as there are probabilities."""
        for n, q in enumerate(probabilities[:8], 1):
            if q < self.share * np.mean(probabilities[:n]):
                return n
        return min(8, len(probabilities))

    def verified(self, rounds):
        """(drafted, accepted) of each row that took part."""
        self.share = 0.3 + 0.4 * sum(accepted < drafted for drafted, accepted in rounds) / max(1, len(rounds))


def test_it_decodes_what_the_target_would_say(my_policy, embedded_pair):
    prompts = embedded_pair.tokenizer(["Once upon a time", "def main():", "2 + 2 ="])["input_ids"]
    models = (embedded_pair.target, embedded_pair.draft)
    plain, _ = generate(*models, prompts, policy="none", max_new_tokens=24)
    tokens, stats = generate(*models, prompts, policy=my_policy(), max_new_tokens=24)
    for expected, found in zip(plain, tokens, strict=True):
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found))
    assert sum(each.accepted for each in stats) > 0
    most = my_policy.max_draft_tokens
    assert any(0 < each.drafted < most * each.rounds for each in stats), "it must have stopped by itself"
    sampled, _ = generate(*models, prompts, policy=my_policy(), sampling=Sampling(temperature=1.0), max_new_tokens=24)
    assert len(sampled) == 3


def test_it_is_lossless_under_both_verifiers(my_policy):
    found = enumerate_rounds(my_policy, pairs=40, shape=Shape(vocab=3, depth=3, rows=2))
    assert Drafting(my_policy()).lossless == BOTH
    assert found.ratio.max() < PROVED and found.match.max() < PROVED
    assert np.count_nonzero(found.submitted) > 1, "it must have stopped at several lengths"


@pytest.mark.parametrize("seed", range(3))
def test_it_is_replayed_as_a_walk_by_hand_counts(my_policy, tmp_path, seed):
    """One response after the other, as its share is of the round before, whoever's that was."""
    sample, mine = make_sample(seed, responses=12, max_new_tokens=30, k_max=8, ends=0.02), Mine()

    def decide(tokens):
        drafted = mine.drafts([math.exp(token.logprob) for token in tokens])
        accepted = [token.accepted for token in tokens[:drafted]]
        mine.verified([(drafted, int(np.cumprod(accepted).sum()))])
        return drafted, 0

    found, walked = replay(sample.couple(tmp_path), my_policy(), "mine", batch=1), walk(sample, decide, 8)
    assert np.array_equal(found.counts, walked.counts)
    assert np.count_nonzero(found.draft_lengths) > 3, "it must have stopped at several lengths"


def test_a_draft_loop_that_is_not_ours_drafts_as_it_says(my_policy):
    """Requests come and go; one that is alone leaves before its verdict is known."""
    mine, host, random, before, verdict, seen = Mine(), host_of(my_policy()), np.random.default_rng(0), {}, None, set()
    for number in range(80):
        requests = [f"request-{number // 4 + offset}" for offset in range(1 + number // 4 % 3)]
        if before:
            known = {name: int(random.integers(0, n + 1)) for name, n in before.items() if name in requests}
            verdict = Verdict(*([of.get(name, 0) for name in requests] for of in (before, known)))
            mine.verified([(before[name], known[name]) for name in known])
        engine = Engine(len(requests), 8, number)
        lengths, _ = engine.round(host, requests, verdict=verdict)
        q = engine.q.gather(-1, engine.ids[..., None])[:8, :, 0]
        assert lengths == [mine.drafts(q[:, row].tolist()) for row in range(len(requests))]
        before = dict(zip(requests, lengths, strict=True))
        seen |= {(round(mine.share, 3), length) for length in lengths}
    assert len({share for share, _ in seen}) > 3 and len({length for _, length in seen}) > 3
