"""The decode loop with an EAGLE-3 drafter: the text is the target's, the drafts are those of a plain recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accept_head.inference import generate
from accept_head.inference.decode import drafter as drafters
from accept_head.inference.decode.drafter import Eagle3
from accept_head.inference.engine import cache, memory
from accept_head.inference.policies.fixed import FixedPolicy
from accept_head.pair import load_pair
from accept_head.prompts import load_prompts
from accept_head.sampling import Sampling
from tests.examples import make_eagle3
from tests.inference.support.replayed import standing_in

PROMPT_FILE = Path(__file__).parents[3] / "checkpoints" / "tiny" / "prompts" / "test.jsonl"
PROMPTS = [[1, 7, 8, 9, 30, 31], [1, 9], [4], [1, 40, 41, 42, 43, 44, 45, 46, 47, 48]]


class Hesitant(FixedPolicy):
    """Drafts in every third round, say, by a number of the host's."""

    capture = None
    rounds = 0

    def __init__(self, k, every=3):
        super().__init__(k)
        self.every = every

    def start_round(self, live):
        self.rounds += 1
        return super().start_round(live) * (self.rounds % self.every == 0)


@pytest.fixture(scope="module")
def target(random_llama):
    return random_llama(1, layers=4)


@pytest.fixture(scope="module")
def drafter(target):
    return make_eagle3(target)


def alone(target, count, **options):
    return generate(target, target, PROMPTS, policy="none", max_new_tokens=count, **options).tokens


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize(
    "policy", ["fixed:3", "confidence:0.02,k_max=5", "adaedl", "online-signals:0.5", Hesitant(3), Hesitant(3, 11)]
)
def test_greedy_text_is_the_targets(target, drafter, policy, batch_size):
    found = generate(target, drafter, PROMPTS, policy=policy, max_new_tokens=20, batch_size=batch_size)
    assert found.tokens == alone(target, 20)


@pytest.mark.parametrize("policy", ["fixed:3", "confidence:0.02,k_max=5", Hesitant(3)])
def test_text_drawn_by_the_targets_own_numbers_is_the_targets(target, drafter, policy):
    """Under the verifier `match` a prompt's tokens depend on no draft. A candidate that is tested against the wrong
    position shows, as it does greedily."""
    options = {"sampling": Sampling(temperature=1.0, top_k=0), "verifier": "match", "seed": 3}
    found = generate(target, drafter, PROMPTS, policy=policy, max_new_tokens=20, batch_size=3, **options)
    assert found.tokens == alone(target, 20, **options)


@torch.no_grad()
def drafts_of(target, drafter, tokens, count):
    """Greedy drafts after these tokens, by forwards over all of them without a cache."""
    streams = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    states = drafter.project(torch.cat([streams[number][0, :-1] for number in drafter.layers_read], dim=-1))
    ids, drafted = torch.tensor(tokens[1:]), []
    for _ in range(count):
        output = drafter(ids[None], states[None], torch.arange(len(ids))[None])
        drafted.append(int(drafter.spread(output.logits[0, -1]).argmax()))
        ids, states = torch.cat([ids, torch.tensor(drafted[-1:])]), torch.cat([states, output.own[0, -1:]])
    return drafted


def drafts_that_differ(target, drafter, policy, batch_size, count=16, **options):
    """(drafts that are not those of drafts_of, all drafts)"""
    differ = seen = 0

    def watch(done):
        nonlocal differ, seen
        for row in done.rows.live_rows:
            known = int(done.rows.lengths[row]) - int(done.outcome.accepted[row]) - 1
            tokens = done.rows.tokens[row, :known].tolist()
            mine = [int(ids[row]) for ids in done.drafted.ids[: int(done.drafted.lengths[row])]]
            if known > 1:  # a first token has no state before it
                differ += mine != drafts_of(target, drafter, tokens, len(mine))
                seen += bool(mine)

    options |= {"max_new_tokens": count, "batch_size": batch_size, "watch": watch}
    generate(target, drafter, PROMPTS, policy=policy, **options)
    return differ, seen


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["fixed:3", "confidence:0.02,k_max=5", Hesitant(3), Hesitant(3, 11)])
def test_drafts_are_those_of_a_plain_recomputation(target, drafter, policy, batch_size):
    differ, seen = drafts_that_differ(target, drafter, policy, batch_size)
    assert differ == 0 and seen > (3 if getattr(policy, "every", 3) > 3 else 10)


@pytest.mark.parametrize("limit", ["FILL_TOKENS", "WAITING_STATES"])
def test_few_tokens_are_fed_at_once_or_wait(target, drafter, limit, monkeypatch):
    """Nor do drafts differ if ten tokens are fed five at a time, or are not all kept."""
    monkeypatch.setattr(drafters, limit, 15 if limit == "FILL_TOKENS" else 0)
    differ, seen = drafts_that_differ(target, drafter, Hesitant(3, 11), 3, count=60)
    assert differ == 0 and seen > 15


@pytest.mark.parametrize(("every", "room", "in_vain"), [(3, 0, 0), (6, 0, 0), (11, 0, 3), (1000, 0, 3), (1000, 99, 0)])
def test_tokens_wait_for_a_drafter_that_drafts_nothing(target, drafter, every, room, in_vain, monkeypatch):
    """It is fed when it drafts, and else when as many wait as have room, or eight. room: in kilobytes."""
    fed = []
    for name in ("begin", "_fill"):
        feed = getattr(Eagle3, name)
        monkeypatch.setattr(
            Eagle3, name, lambda self, *width, feed=feed: (fed.append(policy.rounds), feed(self, *width))[1]
        )
    monkeypatch.setattr(drafters, "WAITING_STATES", room * 1000)
    policy = Hesitant(3, every)
    generate(target, drafter, PROMPTS[:1], policy=policy, max_new_tokens=30)
    drafted = set(range(every, policy.rounds + 1, every))
    assert len(set(fed) - drafted) == in_vain, fed


def test_states_that_wait_take_what_the_plan_allows(target, drafter, monkeypatch):
    sizes, hear = [], Eagle3.hear
    monkeypatch.setattr(Eagle3, "hear", lambda self, states: (hear(self, states), sizes.append(self.states.nbytes)))
    for limit in (20_000, memory.WAITING_STATES):
        monkeypatch.setattr(drafters, "WAITING_STATES", limit)
        sizes.clear()
        generate(target, drafter, PROMPTS[:3], policy=Hesitant(3, 1000), max_new_tokens=60, batch_size=3)
        assert 0.5 * min(limit, 60 * sizes[0]) < max(sizes) <= min(limit, 128 * sizes[0])
    sized = {"batch": 3, "max_length": 70, "vocab_size": 64, "greedy": True}
    plans = [memory.plan_memory(target, drafter, max_draft_tokens=k, **sized) for k in (0, 3)]
    assert [plan.waiting for plan in plans] == [0, memory.WAITING_STATES] and "waiting states 67.1 MB" in str(plans[1])


@pytest.mark.parametrize("wrong", ["another row's states", "states one position late"])
def test_wrong_states_change_drafts_and_no_text(target, drafter, wrong, monkeypatch):
    right = Eagle3.hear

    def hear(self, states):
        right(self, states.roll(1, dims=0 if wrong == "another row's states" else 1))

    monkeypatch.setattr(Eagle3, "hear", hear)
    assert generate(target, drafter, PROMPTS, policy="fixed:3", max_new_tokens=20).tokens == alone(target, 20)
    differ, _ = drafts_that_differ(target, drafter, "fixed:3", 4)
    assert differ > 5


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1.0, top_k=0)], ids=str)
@pytest.mark.parametrize("policy", ["fixed:3", "fixed:2", "confidence:0.02,k_max=5", "adaedl", Hesitant(3)])
def test_captured_it_drafts_and_says_the_same(target, drafter, policy, sampling, monkeypatch):
    """Rows of several lengths that come and go; forwards of widths that are padded, and of one that is not."""
    monkeypatch.setattr(cache, "LEAST_EXTENT", 8)

    def decoded(compile):
        if isinstance(policy, Hesitant):
            policy.rounds = 0
        options = {"sampling": sampling, "max_new_tokens": 20, "batch_size": 3, "seed": 3, "compile": compile}
        made = generate(target, drafter, PROMPTS, policy=policy, **options)
        return made.tokens, [replace(stats, seconds=0.0) for stats in made.stats]

    plain = decoded("none")
    with standing_in() as backend:
        assert decoded("graphs") == plain
        assert backend.replays > backend.captures > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_it_accepts_the_same(temperature, embedded_pair_folder):
    """With a trained drafter, of whose tokens many are accepted; in float32, where widths round alike."""
    folders = embedded_pair_folder / "target", embedded_pair_folder / "eagle3"
    pair = load_pair(*folders, device="cpu", dtype="float32")
    prompts = [prompt.ids for prompt in load_prompts(str(PROMPT_FILE), pair.tokenizer, max_prompts=3)]
    options = {
        "policy": "fixed:3",
        "max_new_tokens": 24,
        "batch_size": 2,
        "sampling": Sampling(temperature=temperature),
    }
    plain = generate(pair.target, pair.draft, prompts, **options)
    with standing_in():
        captured = generate(pair.target, pair.draft, prompts, compile="graphs", **options)
    assert captured.tokens == plain.tokens
    accepted = [stats.generated - stats.rounds for stats in captured.stats]
    assert accepted == [stats.generated - stats.rounds for stats in plain.stats] and sum(accepted) > 10


def test_captured_drafts_are_those_of_a_plain_recomputation(target, drafter):
    with standing_in():
        differ, seen = drafts_that_differ(target, drafter, "fixed:3", 3, compile="graphs")
    assert differ == 0 and seen > 10


# One for each of the signals, of the draws that learning reads, and of the logits that a divergence is of.
READERS = ["fixed:3", "confidence:0.02,k_max=5", "adaedl", "svip", "online-signals:0.5", "dsde"]


@pytest.mark.parametrize("policy", READERS)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1.0, top_k=0), Sampling(temperature=0.8, top_p=0.9)],
    ids=str,
)  # fmt: skip
def test_draws_and_signals_are_those_over_the_targets_whole_vocabulary(target, drafter, policy, sampling):
    """A logits processor sees all tokens, so q is spread before it and not after."""
    options = {"policy": policy, "sampling": sampling, "max_new_tokens": 24, "batch_size": 3, "seed": 3}
    narrow = generate(target, drafter, PROMPTS, **options)
    whole = generate(target, drafter, PROMPTS, logits_processor=[lambda ids, scores: scores], **options)
    assert narrow.tokens == whole.tokens
    timeless = [[replace(stats, seconds=0.0) for stats in made.stats] for made in (narrow, whole)]
    assert timeless[0] == timeless[1]


def test_a_drafter_of_all_the_targets_tokens_needs_no_spreading(target, monkeypatch):
    whole = make_eagle3(target, draft_vocabulary=261)
    monkeypatch.setattr(type(whole), "spread", lambda *_: pytest.fail("spread"))
    found = generate(target, whole, PROMPTS, policy="fixed:3", max_new_tokens=20, batch_size=3)
    assert found.tokens == alone(target, 20)
