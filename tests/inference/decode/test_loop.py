"""Bookkeeping of the decode loop: counts, independence of rows, limits, and input that it must refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from accept_head import InputError, Sampling
from accept_head.cost import DecodeCounts
from accept_head.inference import RowPolicy, generate
from accept_head.inference.engine import cache
from accept_head.inference.policies.confidence import ConfidencePolicy
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.head import HeadPolicy
from accept_head.pair import input_embeddings
from tests.inference.support.scalar_rules import product_rule
from tests.inference.support.toy import (
    TOKENS,
    architectures,
    llama,
    ragged_prompts,
    random_head,
    toy_pair,
    transformers_greedy,
)

SAMPLED, GREEDY = Sampling(temperature=3.0, top_k=0), Sampling(temperature=0)
TOY = toy_pair()
LLAMA = architectures()["llama"]
MORE_PROMPTS = [[1], [2, 3, 4, 0], [4, 4], [0, 1, 2], [3], [1, 1, 0, 4, 2, 3]]


def decode(prompts, policy, models=(TOY.target, TOY.draft), **options):
    options = {"sampling": SAMPLED, "max_new_tokens": 24, "end_token_ids": [], **options}
    return generate(*models, prompts, policy=policy, **options)


def counts(result):
    """Tokens and statistics, but for the clock."""
    return [(tokens, replace(stats, seconds=0.0)) for tokens, stats in zip(result.tokens, result.stats, strict=True)]


def head_policy(reads="drawn", threshold=0.6, hidden=16, **options):
    return HeadPolicy(random_head(hidden, reads=reads, signals=True), threshold, **{"k_max": 6, **options})


POLICIES = {
    "none": lambda: FixedPolicy(0),
    "fixed:3": lambda: FixedPolicy(3),
    "confidence": lambda: ConfidencePolicy(0.5, k_max=6),
    "head lag 1": head_policy,
    "head lag 0": lambda: head_policy(lag=0),
    "head before": lambda: head_policy("before"),
}


# Counts


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_forwards_and_tokens_add_up(k):
    """Each round emits its accepted tokens and one more: N = accepted + rounds, and N_draft = N + N_disc − N_target."""
    for row in decode([[1], [2, 3], [4, 0, 1]], FixedPolicy(k)).stats:
        assert row.generated == 24 == row.accepted + row.rounds
        assert row.draft_forwards == row.drafted == row.counts.draft_forwards <= k * row.rounds
        assert row.counts.draft_forwards == row.generated + row.counts.discarded - row.counts.target_forwards
        assert row.forwards == row.rounds + row.draft_forwards
        assert row.seconds > 0


@pytest.mark.parametrize("name", ["confidence", "head lag 1", "head before"])
def test_a_policy_that_stops_early_costs_one_draft_forward_a_token(name):
    for row in decode(MORE_PROMPTS, POLICIES[name]()).stats:
        assert row.draft_forwards == row.drafted
        assert row.accepted + row.rounds == 24


def test_a_head_read_at_lag_0_costs_one_more_draft_forward_each_time_it_stops_a_round():
    """Alone in its batch a row is fed what it drew, unless the round ends there anyway."""
    lengths = []
    for prompt in MORE_PROMPTS:
        rounds = []
        result = decode([prompt], head_policy(lag=0), watch=lambda round, rounds=rounds: rounds.append(watched(round)))
        emitted, stopped = 0, 0
        for (_, _, drafted, accepted), *_ in rounds:
            stopped += len(drafted) < min(6, 24 - emitted - 1)
            emitted += accepted + 1
            lengths.append(len(drafted))
        (row,) = result.stats
        assert row.draft_forwards == row.drafted + stopped
    assert {1, 2} < set(lengths)


def test_counts_add_up_over_prompts():
    stats = decode([[1], [2]], FixedPolicy(2)).stats
    total = DecodeCounts.total(row.counts for row in stats)
    assert total.generated == 48
    assert total.block_efficiency == 48 / sum(row.rounds for row in stats)


def test_a_draft_equal_to_its_target_is_always_accepted_and_disjoint_ones_never():
    same = llama(0, sharpness=6.0)
    for row in decode([[1], [2, 2]], FixedPolicy(3), (same, same)).stats:
        assert row.drafted == row.accepted
    target, draft = llama(0), llama(0)
    for model, forbidden in ((target, [0, 1]), (draft, [2, 3, 4])):
        head = torch.nn.Linear(16, TOKENS)
        head.weight.data.zero_()
        head.bias.data = torch.where(torch.isin(torch.arange(TOKENS), torch.tensor(forbidden)), -1e9, 0.0)
        model.set_output_embeddings(head)
    result = decode([[1]], FixedPolicy(3), (target, draft))
    assert result.stats[0].accepted == 0 and set(result.tokens[0]) <= {2, 3, 4}


# Rows keep to themselves


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_does_not_depend_on_the_rows_around_it(name):
    """Alone, in a batch, in another order, with more prompts than rows: the same tokens, at the same cost."""
    make = POLICIES[name]
    options = {"seed": 7, "max_new_tokens": 16}
    alone = [counts(decode([prompt], make(), **options))[0] for prompt in MORE_PROMPTS]
    assert counts(decode(MORE_PROMPTS, make(), **options)) == alone
    assert counts(decode(MORE_PROMPTS[::-1], make(), **options))[::-1] == alone
    for batch_size in (2, 4):
        assert counts(decode(MORE_PROMPTS, make(), **options, batch_size=batch_size)) == alone


def test_row_ids_name_the_random_numbers():
    prompts = [[1], [2, 3], [1]]
    first = decode(prompts, "fixed:3", row_ids=[10, 11, 12]).tokens
    assert decode([[1], [1], [2, 3]], "fixed:3", row_ids=[12, 10, 11]).tokens == [first[2], first[0], first[1]]
    assert decode(prompts, "fixed:3", row_ids=[10, 11, 10]).tokens == [first[0], first[1], first[0]]


def test_equal_prompts_get_different_samples_and_other_seeds_other_ones():
    one = decode([[1, 2]] * 4, "fixed:3", seed=1).tokens
    assert len({tuple(row) for row in one}) == 4
    assert decode([[1, 2]] * 4, "fixed:3", seed=1).tokens == one
    assert decode([[1, 2]] * 2, "fixed:3", seed=1, batch_size=1).tokens == one[:2]
    other = decode([[1, 2]] * 4, "fixed:3", seed=2).tokens
    assert not {tuple(row) for row in one} & {tuple(row) for row in other}


def test_padding_of_a_tensor_is_no_part_of_a_prompt():
    ids = torch.tensor([[0, 0, 3], [1, 2, 3], [4, 0, 0]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 0, 0]])  # on the left, none, on the right
    expected = decode([[0, 3], [1, 2, 3], [4]], "fixed:3")
    assert counts(decode(ids, "fixed:3", attention_mask=mask)) == counts(expected)
    assert counts(decode(ids, "fixed:3")) == counts(decode(ids.tolist(), "fixed:3"))


class GrowsByRound(RowPolicy):
    """A row's budget is the number of rounds it has had, up to 5: state that must follow the row it belongs to."""

    max_draft_tokens = 5

    def start(self, batch, device):
        self.rounds = torch.full((batch,), 3)  # nothing is known of any: `admit` says where rows begin

    def admit(self, rows, lengths):
        self.rounds[rows] = 0

    def select(self, rows):
        self.rounds = self.rounds[rows]

    def start_round(self, live):
        return self.rounds.clamp(max=self.max_draft_tokens)

    def observe(self, outcome):
        self.rounds = self.rounds + outcome.live


class NeverForgets(GrowsByRound):
    def admit(self, rows, lengths):
        pass


class LosesItsPlace(GrowsByRound):
    def select(self, rows):
        self.rounds = self.rounds[: len(rows)]


def grown(policy, prompts, batch_size=1):
    options = {"models": LLAMA, "end_token_ids": [7, 14, 20], "batch_size": batch_size}
    return counts(decode(prompts, policy, **options))


@pytest.mark.parametrize("batch_size", [2, 4, 9])
def test_a_policys_state_follows_its_row(batch_size):
    """Rows end at different times, make room for others, and are moved together when nobody waits."""
    prompts = ragged_prompts(9)
    alone = [grown(GrowsByRound(), [prompt])[0] for prompt in prompts]
    assert len({stats.rounds for _, stats in alone}) > 3
    assert grown(GrowsByRound(), prompts, batch_size) == alone
    assert grown(NeverForgets(), prompts, batch_size) != alone  # what loses track of its rows would show
    if batch_size > 2:
        assert grown(LosesItsPlace(), prompts, batch_size) != alone


# Rounds without drafting


class Pauses(RowPolicy):
    """Each row drafts 4 tokens in one round of `period`; rows are out of step."""

    max_draft_tokens = 4

    def __init__(self, period):
        self.period, self.round = period, 0

    def start_round(self, live):
        self.round += 1
        row = torch.arange(len(live))
        return torch.where((self.round + row) % self.period == 0, 4, 0)


def watched(round):
    """(prompt's index, tokens before the round, tokens drafted, number accepted) of each live row."""
    rows, seen = round.rows, []
    for row in rows.live_rows:
        text = rows.tokens[row, : rows.host_lengths[row]].tolist()
        drafted = [int(ids[row]) for ids in round.drafted.ids[: int(round.drafted.lengths[row])]]
        seen.append((rows.requests[row].index, text, drafted, int(round.outcome.accepted[row])))
    return seen


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("period", [2, 4, 7])
def test_drafts_after_rounds_without_are_the_drafts_own_greedy_tokens(period, batch_size):
    """Whatever rows did not draft, the draft has been fed it when they resume, and the output is the target's."""
    target, draft = LLAMA
    prompts, seen = ragged_prompts(6), []
    options = {"sampling": GREEDY, "batch_size": batch_size, "watch": lambda round: seen.extend(watched(round))}
    result = decode(prompts, Pauses(period), LLAMA, **options)
    assert result.tokens == [transformers_greedy(target, prompt, 24) for prompt in prompts]
    drafts = [(text, drafted) for _, text, drafted, _ in seen if drafted]
    assert len(drafts) > 10 and sum(not drafted for _, _, drafted, _ in seen) > len(drafts) / 2
    for text, drafted in drafts:
        assert drafted == transformers_greedy(draft, text, len(drafted))


def test_drafts_are_sampled_from_the_drafts_own_distribution_given_the_prefix():
    """The stack of q that verification sees is that of a plain forward, in every round of every row."""
    target, draft = LLAMA
    sampling = Sampling(temperature=1.5, top_k=20)

    def check(round):
        for row, (_, text, drafted, _) in zip(round.rows.live_rows, watched(round), strict=True):
            ids = torch.tensor([text + drafted])
            p = sampling.probabilities(target(ids).logits[0, len(text) - 1 :])
            torch.testing.assert_close(sampling.probabilities(round.scores[row, : len(p)]), p, rtol=1e-3, atol=1e-4)
            if drafted:
                q = sampling.probabilities(draft(ids).logits[0, len(text) - 1 : -1])
                seen = torch.stack([slot[row] for slot in round.drafted.probabilities[: len(q)]])
                torch.testing.assert_close(seen, q, rtol=1e-3, atol=1e-4)
                assert bool((seen.gather(1, torch.tensor(drafted)[:, None]) > 0).all())

    options = {"sampling": sampling, "batch_size": 3, "watch": check}
    for policy in (Pauses(3), ConfidencePolicy(0.5, k_max=4), head_policy(hidden=32, lag=0)):
        decode(ragged_prompts(6), policy, LLAMA, **options)


# The head's product rule


HEADS = {
    "drawn, lag 0": ("drawn", 0),
    "drawn, default lag": ("drawn", None),
    "before": ("before", None),
}


@pytest.mark.parametrize(("signals", "k_min"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_the_head_policy_follows_the_product_rule(kind, signals, sampling, k_min):
    """1 − Π P̂ over the judged tokens, against a loop over plain forwards."""
    target, draft = llama(0, layers=2, sharpness=6.0), llama(1, sharpness=6.0)
    reads, lag = HEADS[kind]
    head, k_max, lengths = random_head(16, depth=2, reads=reads, signals=signals), 9, set()
    late = reads == "drawn" and lag != 0
    for threshold in (0.4, 0.8, 0.98):
        seen = []
        policy = HeadPolicy(head, threshold, k_min=k_min, k_max=k_max, lag=lag)
        watch = {"watch": lambda round, seen=seen: seen.extend(watched(round))}
        decode([[1, 2, 3]], policy, (target, draft), max_new_tokens=24, sampling=sampling, **watch)
        for _, text, drafted, _ in seen:
            budget = min(k_max, 3 + 24 - len(text) - 1)
            expected = rule(head, draft, text, drafted, threshold, budget, sampling, k_min, late)
            assert len(drafted) == expected
            lengths.add(expected)
    assert len(lengths) > 3  # short and long rounds both occur


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "another draft's embeddings"])
def test_a_head_reads_the_embedding_of_the_token_that_it_judges(kind, wrong):
    target, draft = llama(0, layers=2, sharpness=6.0), llama(1, sharpness=6.0)
    reads, lag = HEADS[kind]
    table = input_embeddings(draft)
    reference = random_head(16, depth=2, reads=reads, signals=True, embeddings=table, width=24)
    head = random_head(16, depth=2, reads=reads, signals=True, embeddings=table, width=24)
    head.attach(table.flip(0) if wrong else table)
    late, seen, same = reads == "drawn" and lag != 0, [], []
    for threshold in (0.4, 0.8):
        policy = HeadPolicy(head, threshold, k_max=9, lag=lag)
        watch = {"watch": lambda round: seen.extend(watched(round))}
        decode([[1, 2, 3]], policy, (target, draft), max_new_tokens=24, sampling=SAMPLED, **watch)
        same += [
            len(drafted) == rule(reference, draft, text, drafted, threshold, min(9, 26 - len(text)), SAMPLED, 1, late)
            for _, text, drafted, _ in seen
        ]
        seen.clear()
    assert all(same) != wrong


@torch.no_grad()
def rule(head, draft, text, drafted, threshold, budget, sampling, k_min, late):
    """After how many tokens the rule stops. The token judged is the last one, or, late, the one before it."""
    output, probabilities = draft(torch.tensor([text + drafted]), output_hidden_states=True), [1.0] * budget
    for place, token in enumerate(drafted[:budget]):
        drawn_from = len(text) + place - 1
        logits = output.logits[0, drawn_from]
        q = logits.softmax(-1) if sampling.greedy else sampling.probabilities(logits)
        signals = torch.stack([q[token].log(), -(q * q.log()).sum(), q.max()])
        state = output.hidden_states[-1][0, drawn_from + (head.config.reads == "drawn")]
        probabilities[place] = float(head.probability(state, signals=signals, token_ids=torch.tensor(token)))
    return product_rule(probabilities, threshold, budget, k_min=k_min, lag=int(late))


def test_a_head_by_its_spec_is_the_policy_of_its_folder(tmp_path):
    random_head(16).save_pretrained(tmp_path)
    for spec, options in ((f"head:{tmp_path}:0.4,k_max=5,lag=0", {"k_max": 5, "lag": 0}), (f"head:{tmp_path}:0.4", {})):
        named = decode(MORE_PROMPTS, spec)
        assert counts(named) == counts(decode(MORE_PROMPTS, HeadPolicy(random_head(16), 0.4, **options)))


# Host syncs


class Syncs(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        for name in ("tolist", "item", "numpy", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, method):
        def call(*arguments, **options):
            self.count += 1
            return method(*arguments, **options)

        return call

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function in self.WAITS
        return function(*arguments, **(options or {}))


def syncs_a_round(policy, monkeypatch, sampling, **options):
    """How often the host waits in each round between the first and the last, where it does not pack tokens."""
    marks = []
    monkeypatch.setattr(cache, "packs", lambda model: False)
    with Syncs(monkeypatch) as syncs:
        options |= {"watch": lambda round: marks.append(syncs.count), "sampling": sampling, "max_new_tokens": 24}
        decode([[1, 2], [3]], policy, **options)
    return {later - earlier for earlier, later in pairwise(marks[:-3])}


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_fixed_drafts_wait_for_the_device_as_often_as_no_drafts_at_all(sampling, monkeypatch):
    few = {k: syncs_a_round(FixedPolicy(k), monkeypatch, sampling) for k in (1, 4, 8)}
    assert few[1] == few[4] == few[8] == {1}


def test_a_policy_that_may_stop_early_waits_once_a_token(monkeypatch):
    """Which also shows that waiting is counted."""
    never_stops = ConfidencePolicy(0.0, k_max=6)
    assert max(syncs_a_round(never_stops, monkeypatch, SAMPLED)) == 1 + 5


class DrawsTwo(RowPolicy):
    """Stops before the third draw."""

    max_draft_tokens = 5

    def draw_next(self, step):
        return step.active & torch.tensor(step.depth < 3)


def test_a_slot_that_no_row_drew_is_not_verified():
    widths = []
    watch = lambda seen: widths.append((seen.logits.shape[1], int(seen.drafted.lengths.max())))  # noqa: E731
    decode([[1, 2], [3]], DrawsTwo(), watch=watch, max_new_tokens=12)
    assert all(width == drafted + 1 for width, drafted in widths) and (3, 2) in widths


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": torch.tensor([1, 2])}, r"input_ids has shape \(2,\)"),
        ({"prompts": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}, r"attention_mask has shape \(1, 3\)"),
        ({"prompts": torch.tensor([[1, 2]]), "attention_mask": torch.zeros(1, 2)}, "prompt 0 is empty"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"row_ids": [1, 2]}, "2 row_ids and 1 prompts"),
        ({"row_ids": []}, "0 row_ids and 1 prompts"),
        ({"policy": "sometimes"}, "policy 'sometimes': unknown, expected one of .*none"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(options, words):
    options = {"prompts": [[1, 2]], "policy": "fixed:2", **options}
    with pytest.raises(InputError, match=words) as caught:
        decode(options.pop("prompts"), options.pop("policy"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_what_does_not_fit_a_models_context_is_refused_and_the_model_named(role):
    longer = llama(0)
    longer.config.max_position_embeddings = 128
    models = (llama(0), longer) if role == "target" else (longer, llama(0))
    assert len(decode([[1] * 40], "fixed:1", models, max_new_tokens=24).tokens[0]) == 24
    with pytest.raises(InputError, match=rf"prompt 1 has 41 tokens, 65 with its response, but the {role}'s .* 64"):
        decode([[1] * 40, [1] * 41], "fixed:1", models, max_new_tokens=24)
    if role == "draft":  # which is not needed without drafting
        assert len(decode([[1] * 41], "none", models, max_new_tokens=24).tokens[0]) == 24


def test_a_draft_of_another_dtype_or_on_another_device_is_refused():
    target = llama(0)
    with pytest.raises(InputError, match=r"torch.bfloat16 .* torch.float32"):
        decode([[1]], "fixed:1", (target, llama(1).bfloat16()))
    with pytest.raises(InputError, match=r"meta and .* cpu"):
        decode([[1]], "fixed:1", (target, llama(1).to("meta")))


def answering(method, answer):
    policy = type("Answers", (RowPolicy,), {"max_draft_tokens": 3, method: lambda self, *_: answer})
    return policy()


@pytest.mark.parametrize(
    ("method", "answer", "got"),
    [
        ("start_round", torch.tensor([2.0, 2.0]), r"torch.float32 \(2,\)"),
        ("start_round", torch.tensor([2]), r"torch.int64 \(1,\)"),
        ("start_round", torch.tensor([[2, 2]]), r"torch.int64 \(1, 2\)"),
        ("start_round", torch.tensor([2, 2], dtype=torch.int32), "torch.int32"),
        ("start_round", 2, "int"),
        ("start_round", None, "NoneType"),
        ("keep_drafting", torch.tensor([1, 1]), "torch.int64"),
        ("keep_drafting", torch.tensor([True]), r"torch.bool \(1,\)"),
        ("keep_drafting", True, "bool"),
        ("keep_drafting", None, "NoneType"),
    ],
)
def test_a_policys_answer_of_the_wrong_kind_is_refused_and_the_policy_named(method, answer, got):
    with pytest.raises(InputError, match=f"policy Answers: {method} returned {got}.*expected"):
        decode([[1], [2]], answering(method, answer))


@pytest.mark.parametrize("budget", [-5, 100])
def test_a_budget_below_0_is_0_and_one_beyond_the_end_of_a_response_is_cut(budget):
    result = decode([[1], [2]], answering("start_round", torch.full((2,), budget)), sampling=GREEDY)
    assert result.tokens == [transformers_greedy(TOY.target, prompt, 24) for prompt in ([1], [2])]
    assert all(row.accepted + row.rounds == 24 for row in result.stats)
    assert (sum(row.drafted for row in result.stats) == 0) == (budget < 0)


def test_the_vocabulary_is_what_both_models_score():
    """Outputs of the larger model beyond it are padding of an embedding matrix, and are never drawn."""
    small, large = llama(0, sharpness=6.0), llama(1, vocab=TOKENS + 3, sharpness=6.0)
    large.get_output_embeddings().weight.data[TOKENS:] *= 5
    assert isinstance(small.config, LlamaConfig)
    for models in ((small, large), (large, small)):
        for sampling in (SAMPLED, GREEDY):
            tokens = decode(MORE_PROMPTS, "fixed:3", models, sampling=sampling).tokens
            assert max(max(row) for row in tokens) < TOKENS
