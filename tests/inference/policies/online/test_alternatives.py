"""Alternatives: they are drawn from q with the right acceptance, hosts report them, and all hosts learn alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from trace_alternatives import alternatives_of

from accept_head import InputError, Sampling
from accept_head.alternatives import DRAWS, Alternatives, draw_alternatives
from accept_head.inference import generate
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.inference.policies.online.recalibrated import RecalibratedHeadPolicy
from accept_head.inference.policies.online.training import OnlineTraining
from accept_head.inference.policy import Signal
from accept_head.inference.replay.asking import replay
from accept_head.prompts import load_prompts
from accept_head.randomness import DecodeStream, uniforms
from tests.inference.support.held_out import PERIOD, Z_LIMIT, Held
from tests.inference.support.made_up import make_sample
from tests.inference.support.online_heads import correction, linear_head
from tests.inference.support.rounds import outcome
from tests.inference.support.toy import random_head, toy_pair


def distributions(shape, vocab, seed, kept):
    """p and q, of which only the `kept` most likely tokens have any probability."""
    torch.manual_seed(seed)
    for _ in range(2):
        logits = 2 * torch.randn(*shape, vocab)
        least = logits.topk(kept, dim=-1).values[..., -1:]
        yield torch.where(logits < least, -torch.inf, logits).softmax(-1)


# --- the draws -------------------------------------------------------------------------------------------------------


def test_they_are_drawn_from_q_and_never_where_it_is_zero():
    p, q = distributions((3,), 12, seed=0, kept=7)
    uniform = torch.rand(3, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draw_alternatives(p, q, uniform)
    for place in range(3):
        counts = np.bincount(drawn.token_ids[place], minlength=12)
        some = q[place].numpy() > 0
        assert counts[~some].sum() == 0
        expected = q[place].double().numpy()[some]
        assert chisquare(counts[some], 20_000 * expected / expected.sum()).pvalue > 1e-4
        assert chisquare(counts[some], np.full(7, 20_000 / 7)).pvalue < 1e-4  # it can fail


def test_what_is_said_of_them_is_the_ratio_tests():
    p, q = distributions((2, 3), 12, seed=2, kept=7)
    drawn = draw_alternatives(p, q, torch.rand(2, 3, DRAWS, dtype=torch.float64))
    for place in np.ndindex(2, 3, DRAWS):
        y, (p_y, q_y) = int(drawn.token_ids[place]), (float(each[place[:2]][drawn.token_ids[place]]) for each in (p, q))
        assert float(drawn.acceptance[place]) == pytest.approx(min(1.0, p_y / q_y), abs=1e-6), y
        assert float(drawn.logprob[place]) == pytest.approx(np.log(q_y), abs=1e-5)
    assert (drawn.acceptance < 1).any() and (drawn.acceptance == 0).any()


# --- the decode loop -------------------------------------------------------------------------------------------------


class Watching(FixedPolicy):
    needs = frozenset({Signal.ALTERNATIVES})

    def __init__(self):
        super().__init__(3)
        self.seen = []

    def observe(self, outcome):
        self.seen.append(outcome)


def decode(policy, *, batch_size=2, temperature=1.0, watch=None, **options):
    pair, prompts = toy_pair(), [[1, 2], [3, 4, 0], [2], [4, 1, 1]]
    sampling = Sampling(temperature=temperature)
    return generate(pair.target, pair.draft, prompts, policy=policy, max_new_tokens=20, end_token_ids=(), seed=5,
                    sampling=sampling, batch_size=batch_size, watch=watch, **options)[0]  # fmt: skip


def test_the_decode_loop_tells_them_of_each_slot():
    """Against p and q of the models themselves, of the rows that took part."""
    policy, rounds = Watching(), []

    def watch(made):
        q = torch.stack(made.drafted.probabilities, 1) if made.drafted.slots else None
        rounds.append((made.scores.softmax(-1), q, made.rows.keys.clone(), made.rows.rounds.clone()))

    decode(policy, watch=watch)
    compared = 0
    for each, (p, q, keys, counts) in zip(policy.seen, rounds, strict=True):
        if q is None:
            assert each.alternatives is None
            continue
        assert each.alternatives.token_ids.shape == (*q.shape[:2], DRAWS)
        for row, slot in np.ndindex(*q.shape[:2]):
            if not each.live[row] or slot >= int(each.drafted[row]):
                continue
            # `watch` is called after the round was counted.
            random = uniforms(5, keys[row], counts[row] - 1, slot, DecodeStream.ALTERNATIVES, torch.arange(DRAWS))
            expected = draw_alternatives(p[row, slot], q[row, slot], random)
            for told, known in zip(each.alternatives, expected, strict=True):
                torch.testing.assert_close(told[row, slot], known, atol=1e-5, rtol=1e-4)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"verifier": "match"}], ids=str)
def test_where_there_is_no_ratio_test_it_tells_none(options):
    policy = Watching()
    decode(policy, **options)
    assert policy.seen and all(each.alternatives is None for each in policy.seen)


def test_text_is_the_same_whether_they_are_asked_for_or_not():
    assert decode(Watching()) == decode("fixed:3")


def test_they_belong_to_a_row_and_its_round_not_to_the_batch():
    def told(batch_size):
        policy, rounds, found = Watching(), [], {}
        decode(
            policy, batch_size=batch_size, watch=lambda r: rounds.append((r.rows.keys.clone(), r.rows.rounds.clone()))
        )
        for each, (keys, counts) in zip(policy.seen, rounds, strict=True):
            for row in torch.where(each.live)[0].tolist():
                drafted = int(each.drafted[row])
                ids = each.alternatives.token_ids[row, :drafted].tolist() if drafted else []
                found[int(keys[row]), int(counts[row])] = ids
        return found

    assert told(1) == told(4)


# --- traces and replay -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out(embedded_pair, embedded_pair_folder, tmp_path_factory):
    """held_out(sampling) → 20 held-out prompts, 32 tokens."""
    path = str(embedded_pair_folder / "prompts" / "test.jsonl")
    prompts = [list(prompt.ids[:32]) for prompt in load_prompts(path, embedded_pair.tokenizer, max_prompts=20)]

    def make(sampling):
        return Held(embedded_pair, prompts, tmp_path_factory.mktemp("held-out") / "t", sampling, [PERIOD], 32).traces

    return make


def test_of_traces_they_are_those_of_both_models_at_each_position(held_out, embedded_pair):
    """E[a(Y')] is the overlap that the traces hold, at each position; not that of the one before."""
    traces = held_out(Sampling(top_k=0))
    table = alternatives_of(traces, embedded_pair.target, embedded_pair.draft)
    assert table.token_ids.shape == (traces.positions, DRAWS) and traces.positions > 300
    overlap = torch.from_numpy(np.concatenate(traces.traces.with_format("numpy")["overlap"][:])).double()
    means = table.acceptance.double().mean(-1)
    for weight in (torch.ones_like(overlap), overlap - overlap.mean()):
        apart = weight * (means - overlap)
        assert abs(float(apart.sum() / apart.square().sum().sqrt())) < Z_LIMIT
    wrong = (overlap - overlap.mean()) * (means.roll(1) - overlap)
    assert abs(float(wrong.sum() / wrong.square().sum().sqrt())) > Z_LIMIT


def test_another_pair_and_greedy_traces_are_refused(held_out, embedded_pair):
    with pytest.raises(InputError, match="not the pair of theirs"):
        alternatives_of(held_out(Sampling(top_k=0)), embedded_pair.draft, embedded_pair.draft)
    with pytest.raises(InputError, match="are greedy, expected sampled ones"):
        alternatives_of(held_out(Sampling(temperature=0)), embedded_pair.target, embedded_pair.draft)


def test_replay_tells_them_of_the_positions_a_round_submits(folder):
    traces, policy = make_sample(3, responses=5, max_new_tokens=20).couple(folder), Watching()
    numbers = torch.arange(traces.positions)[:, None].expand(-1, DRAWS)
    replay(traces, policy, "watching", batch=2, alternatives=Alternatives(numbers, -numbers.float(), numbers / 1e4))
    told = [each for each in policy.seen if int(each.drafted.max())]
    assert told
    for each in told:
        first = each.alternatives.token_ids[:, 0, 0]
        for slot in range(each.alternatives.token_ids.shape[1]):
            expected = (first + slot).clamp(max=traces.positions - 1)
            assert torch.equal(each.alternatives.token_ids[:, slot], expected[:, None].expand(-1, DRAWS))
    starts = [int(place) for each in told for place in each.alternatives.token_ids[each.live, 0, 0]]
    assert len(set(starts)) == len(starts) and set(traces.starts.tolist()) <= set(starts)
    replay(traces, (blind := Watching()), "watching", batch=2)
    assert all(each.alternatives is None for each in blind.seen)


# --- what is learnt from them ----------------------------------------------------------------------------------------


def others(label):
    """(batch, depths, DRAWS), told by number."""
    numbers = torch.arange(label.numel()).view(label.shape)
    return Alternatives(numbers, -numbers.float(), label)


def test_those_of_judged_tokens_are_learnt_from_with_their_own_logprob():
    train = OnlineTraining(random_head(8, reads="before", signals=True))
    train.start_round()
    for depth in range(2):
        signals = torch.tensor([[-0.5, 10.0 + depth, 0.3], [-0.6, 20.0 + depth, 0.4]])
        train.score(torch.randn(2, 8), signals, torch.tensor([901, 902]))
    # Of row 0 both tokens are judged; of row 1 the first alone.
    label = torch.rand(2, 2, DRAWS)
    verdict = outcome([2, 2], [1, 0], acceptance=torch.tensor([[0.9, 0.1], [0.4, 0.6]]))
    object.__setattr__(verdict, "alternatives", others(label))
    train.observe(verdict, correction())
    sample = train._sample(3000)
    drawn = {
        (round(float(s[1])), int(i), round(float(s[0]), 3), round(float(a), 5))
        for s, i, a in zip(sample.signals, sample.token_ids, sample.label, strict=True)
    }
    own = {(10, 901, -0.5, 0.9), (11, 901, -0.5, 0.1), (20, 902, -0.6, 0.4)}
    places = [(10, 0, 0), (11, 0, 1), (20, 1, 0)]
    told = {
        (entropy, n := (row * 2 + depth) * DRAWS + draw, -float(n), round(float(label[row, depth, draw]), 5))
        for entropy, row, depth in places
        for draw in range(DRAWS)
    }
    assert drawn == own | told


def test_a_place_that_is_taken_again_has_no_alternatives_of_old(monkeypatch):
    monkeypatch.setattr(OnlineTraining, "SLOTS", 2)
    train = OnlineTraining(linear_head())
    for told in (True, False):
        train.start_round()
        train.score(torch.zeros(2, 8))
        verdict = outcome([1, 1], [1, 1], acceptance=torch.tensor([[0.5], [0.5]]))
        if told:
            object.__setattr__(verdict, "alternatives", others(torch.full((2, 1, DRAWS), 0.25)))
        train.observe(verdict, correction())
        assert (0.25 in train._sample(400).label) == told


def test_a_head_of_the_state_at_a_token_is_told_none():
    for reads in ("drawn", "before"):
        policy = RecalibratedHeadPolicy(random_head(16, reads=reads), 0.6, online=True, train=True)
        assert (Signal.ALTERNATIVES in policy.needs) == (reads == "before")
        plain = RecalibratedHeadPolicy(random_head(16, reads=reads), 0.6, online=True)
        assert Signal.ALTERNATIVES not in plain.needs


@pytest.mark.parametrize("right", [True, False], ids=["right", "shuffled"])
def test_a_head_learns_sooner_with_them(right):
    """A token's chance is a function of log q(Y), whose slope is to be found; with chances shuffled it is not."""
    random = np.random.default_rng(0)

    def error(told, rounds=150):
        train = OnlineTraining(random_head(8, reads="before", signals=True), lr=0.01)
        train.INTERVAL, train.FEWEST = 2, 1
        for _ in range(rounds):
            logprob = torch.from_numpy(random.normal(-2, 1, size=(1, 1 + DRAWS))).float()
            chance = (2 * (logprob + 2)).sigmoid()
            train.start_round()
            train.score(torch.randn(1, 8), torch.tensor([[float(logprob[0, 0]), 1.0, 0.5]]), torch.zeros(1, dtype=int))
            verdict = outcome([1], [1], acceptance=chance[:, :1])
            if told:
                shown = chance[:, 1:] if right else chance[:, 1:].flip(-1)
                parts = (torch.zeros(1, 1, DRAWS, dtype=int), logprob[:, None, 1:], shown[:, None])
                object.__setattr__(verdict, "alternatives", Alternatives(*parts))
            train.observe(verdict, correction())
        logprob = torch.linspace(-4, 0, 200)
        signals = torch.stack([logprob, torch.ones(200), torch.full((200,), 0.5)], -1)
        torch.manual_seed(1)
        found = train.served.probability(torch.randn(200, 8), signals=signals)
        return float((found - (2 * (logprob + 2)).sigmoid()).abs().mean())

    torch.manual_seed(0)
    alone, with_them = error(False), error(True)
    assert (with_them < 0.8 * alone) == right, (alone, with_them)
