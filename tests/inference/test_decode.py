"""Bookkeeping of the decode loop: counts, row independence, limits, and input it must refuse."""

from __future__ import annotations

import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig, InputError, Sampling
from accept_head.cost import DecodeCounts
from accept_head.inference import generate
from accept_head.inference.policies import FixedPolicy, HeadPolicy
from accept_head.signals import SIGNALS
from tests.inference.toy import llama, pair_of, toy_pair

SAMPLED = Sampling(top_k=0)


def decode(pair, prompts, policy, **options):
    options = {"sampling": SAMPLED, "max_new_tokens": 24, **options}
    return generate(pair, prompts, policy=policy, **options)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_forwards_and_tokens_add_up(k):
    """Each round emits its accepted tokens and one more: N = accepted + rounds, and N_draft = N + N_disc − N_target."""
    for result in decode(toy_pair(), [[1], [2, 3], [4, 0, 1]], FixedPolicy(k)):
        assert len(result.token_ids) == 24 == result.accepted + result.rounds
        counts = result.counts
        assert counts.draft_forwards == counts.generated + counts.discarded - counts.target_forwards
        assert result.drafted <= k * result.rounds


def test_draft_equal_to_target_is_always_accepted_and_disjoint_ones_never():
    same = llama(0, sharpness=6.0)
    for result in decode(pair_of(same, same), [[1], [2, 2]], FixedPolicy(3)):
        assert result.drafted == result.accepted
    target, draft = llama(0), llama(0)
    for model, forbidden in ((target, [0, 1]), (draft, [2, 3, 4])):
        head = torch.nn.Linear(16, 5)
        head.weight.data.zero_()
        head.bias.data = torch.where(torch.isin(torch.arange(5), torch.tensor(forbidden)), -1e9, 0.0)
        model.set_output_embeddings(head)
    for result in decode(pair_of(target, draft), [[1]], FixedPolicy(3)):
        assert result.accepted == 0 and set(result.token_ids) <= {2, 3, 4}


def test_a_row_does_not_depend_on_the_batch_around_it():
    pair, prompts = toy_pair(), [[1], [2, 3, 4, 0], [4, 4], [0, 1, 2]]
    together = decode(pair, prompts, FixedPolicy(3), seed=7)
    for row, prompt in enumerate(prompts):
        alone = decode(pair, [prompt], FixedPolicy(3), seed=7, row_ids=[row])
        assert alone[0] == together[row]
    swapped = decode(pair, prompts[::-1], FixedPolicy(3), seed=7, row_ids=[3, 2, 1, 0])
    assert swapped[::-1] == together
    assert decode(pair, prompts, FixedPolicy(3), seed=8) != together


def test_an_end_token_inside_a_round_cuts_the_row_there():
    pair = toy_pair()
    free = decode(pair, [[1], [2, 3]], FixedPolicy(6), seed=3)
    for end in range(5):
        cut = decode(pair, [[1], [2, 3]], FixedPolicy(6), seed=3, end_ids=[end])
        for row, result in enumerate(cut):
            whole = free[row].token_ids
            expected = whole[: whole.index(end) + 1] if end in whole else whole
            assert result.token_ids == expected
            assert 0 <= result.accepted <= result.drafted


@pytest.mark.parametrize(("signals", "reads"), [(False, "drawn"), (True, "drawn"), (True, "before")])
@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=0)], ids=["sampled", "greedy"])
def test_the_head_policy_follows_the_product_rule(signals, reads, sampling):
    """1 − Π P̂, over all drafted tokens, or, read late, all but the last, against a loop over plain forwards."""
    target, draft = llama(0, layers=2, sharpness=6.0), llama(1, sharpness=6.0)
    torch.manual_seed(2)
    statistics = {"signals": SIGNALS, "signal_mean": (-1.0, 1.0, 0.5), "signal_std": (1.0, 0.5, 0.2)} if signals else {}
    head = AcceptanceHead(HeadConfig(hidden_size=16, depth=2, reads=reads, **statistics))
    torch.nn.init.normal_(head.output.weight, std=1.0)
    k_max, seen = 9, set()

    class Spy(HeadPolicy):
        def keep_drafting(self, step):
            drawn.append(int(step.token_ids))
            self.decisions = super().keep_drafting(step)
            return self.decisions

        def observe(self, outcome):
            rounds.append((list(drawn), int(outcome.drafted), int(outcome.accepted)))
            drawn.clear()

    for threshold in (0.2, 0.5, 0.7, 0.9, 0.99):
        drawn: list[int] = []
        rounds: list[tuple[list[int], int, int]] = []
        pair = pair_of(target, draft)
        result = decode(pair, [[1, 2, 3]], Spy(head, threshold, k_max=k_max), max_new_tokens=48, sampling=sampling)[0]
        emitted = 0
        for proposed, drafted, accepted in rounds:
            text = [1, 2, 3, *result.token_ids[:emitted]]
            budget = min(k_max, 48 - emitted - 1)
            assert drafted == expected_length(head, draft, text, proposed, threshold, budget, sampling)
            emitted += accepted + 1
            seen.add(drafted)
    assert len(seen) > 3  # short and long rounds both occur


@torch.no_grad()
def expected_length(head, draft, text, proposed, threshold, budget, sampling):
    """After how many tokens the rule stops. The token judged is the last one, or, read late, the one before it."""
    late = head.config.reads == "drawn"
    survival = 1.0
    for length in range(1 + late, budget + 1):
        judged = length - late
        token, before = proposed[judged - 1], [*text, *proposed[: judged - 1]]
        states = draft(torch.tensor([[*before, token]]), output_hidden_states=True)
        logits = states.logits[0, -2]  # what the judged token was drawn from
        q = logits.softmax(-1) if sampling.greedy else sampling.probabilities(logits)
        signals = torch.stack([q[token].log(), -(q * q.log()).sum(), q.max()])
        state = states.hidden_states[-1][0, -1 if late else -2]
        survival *= float(head.probability(state, signals=signals))
        if 1 - survival > threshold:
            return length
    return budget


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 64}, "context"),
        ({"prompts": [[]]}, "empty prompt"),
        ({"prompts": []}, "empty prompt"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(options, words):
    options = dict(options)
    prompts = options.pop("prompts", [[1, 2]])
    with pytest.raises(InputError, match=words):
        decode(toy_pair(), prompts, FixedPolicy(2), **options)


def test_policies_refuse_values_that_make_no_sense():
    head = AcceptanceHead(HeadConfig(hidden_size=16, depth=0))
    only_next = AcceptanceHead(HeadConfig(hidden_size=16, depth=0, predicts="next"))
    for build in (
        lambda: FixedPolicy(-1),
        lambda: HeadPolicy(head, 1.5),
        lambda: HeadPolicy(head, float("nan")),
        lambda: HeadPolicy(head, 0.5, k_min=5, k_max=2),
        lambda: HeadPolicy(only_next, 0.5),
    ):
        with pytest.raises(InputError):
            build()


def test_counts_add_up_over_prompts():
    results = decode(toy_pair(), [[1], [2]], FixedPolicy(2))
    total = DecodeCounts.total(result.counts for result in results)
    assert total.generated == 48
    assert total.block_efficiency == 48 / sum(result.rounds for result in results)
