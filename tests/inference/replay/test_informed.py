"""The informed bound against a walk token by token, and its tables against plain forwards and against E[a] = β.

Also against the decode loop with a policy that asks the target. Statistics: |z| > 3.89 fails, a false alarm in 10,000.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accept_head import InputError, Sampling
from accept_head.acceptance import acceptance_probability, overlap
from accept_head.checksum import read_tensors, save_tensors
from accept_head.cost import ForwardCosts
from accept_head.inference import RowPolicy, generate
from accept_head.inference.engine.cache import CachedModel
from accept_head.inference.replay import informed as module
from accept_head.inference.replay import truth as truth_module
from accept_head.inference.replay.coupled import load_coupled
from accept_head.inference.replay.informed import expected_gain, myopic_lengths, replay_informed
from accept_head.inference.replay.truth import CONFIG_NAME, InformedTables, ask_records, check_target, informed_tables
from accept_head.inference.replay.walk import replay_fixed, replayed_of, walk_rounds
from accept_head.prompts import load_prompts
from accept_head.trace.shards import read_traces
from tests.inference.support.collected import GREEDY, MODELS, PROMPTS, SAMPLED, collected, state_after
from tests.inference.support.held_out import K_MAX, PERIOD, Held, z_scores
from tests.inference.support.made_up import make_sample, samples, walk
from tests.inference.support.rules_by_hand import assert_same
from tests.inference.support.toy import VOCAB, llama
from tests.training.by_hand import processed

Z_LIMIT = 3.89
FEW = settings(derandomize=True, deadline=None, max_examples=10)


# --- replay ----------------------------------------------------------------------------------------------------------


def truth(token):
    """(a, β) of a made-up token: any numbers in [0, 1] that a replay can look up, too."""
    return token.max_prob**0.3, token.entropy**0.5


def tables_of(traces):
    return InformedTables(acceptance=traces.max_prob.double() ** 0.3, overlap=traces.entropy.double() ** 0.5)


def myopic(price):
    """Token by token: go on while C_k·β_{k+1} > price."""

    def decide(tokens):
        survival = 1.0
        for k, token in enumerate(tokens):
            acceptance, beta = truth(token)
            if k and survival * beta <= price:
                return k, 0
            survival *= acceptance
        return len(tokens), 0

    return decide


def speed(counts, costs):
    generated, _, verified, drafts = counts.sum(0)
    return generated / (costs.t_draft * drafts + costs.t_target * verified)


def slow_replay(sample, costs, k_max):
    """The fastest walk on the way to the price that is its own throughput's."""
    rate, seen = 1 / costs.t_target, {}
    for _ in range(20):
        walked = walk(sample, myopic(rate * costs.t_draft), k_max)
        reached = speed(walked.counts, costs)
        if reached in seen or abs(reached / rate - 1) < 1e-4:
            seen[reached] = walked
            break
        seen[reached], rate = walked, reached
    return seen[max(seen)]


@FEW
@given(sample=samples(k_max=7), ratio=st.floats(0.02, 0.6))
def test_it_replays_as_a_walk_token_by_token(folder, sample, ratio):
    traces, costs = sample.couple(folder), ForwardCosts(t_draft=ratio, t_target=1.0)
    fast = replay_informed(traces, tables_of(traces), costs)
    assert_same(fast, slow_replay(sample, costs, 7))
    assert (fast.name, fast.params) == ("informed", {"least": 1})


@FEW
@given(sample=samples(k_max=9, max_new_tokens=9), ratio=st.floats(0.01, 0.3))
def test_where_nothing_is_left_to_chance_it_is_the_oracle_but_for_its_one_token(folder, sample, ratio):
    """Greedy: a and β are 0 or 1. No round is longer than k_max here."""
    traces = sample.couple(folder)
    flags = [float(kept) for record in sample.records for kept in record["accepted"]]
    sure = torch.cat([torch.tensor(flags), torch.zeros(len(traces.ids) - len(flags))])
    costs = ForwardCosts(t_draft=ratio, t_target=1.0)
    found = replay_informed(traces, InformedTables(acceptance=sure, overlap=sure), costs)
    known = torch.minimum(traces.drafts, traces.leading.clamp(min=1))
    assert_same(found, replayed_of(walk_rounds(traces, known[:, None]), 0, "informed", {"least": 1}))


def test_it_needs_few_steps(folder, monkeypatch):
    traces = make_sample(5, responses=40).couple(folder)
    walks = []
    monkeypatch.setattr(module, "walk_rounds", lambda *arguments: walks.append(1) or walk_rounds(*arguments))
    replay_informed(traces, tables_of(traces), ForwardCosts(t_draft=0.1, t_target=1.0))
    assert len(walks) <= 8


# --- tables: against plain forwards ----------------------------------------------------------------------------------


def distribution(model, ids, sampling):
    return processed(state_after(model, ids)[0][None].numpy(), sampling)[0]


@torch.no_grad()
def slow_tables(models, records, rollouts, config):
    """[(a, β)] of each rollout's tokens, one forward of each model a token."""
    places = [(r, i) for r, record in enumerate(records) for i in range(len(record["response_ids"]))]
    tables = []
    for number, position in enumerate(rollouts["position"].tolist()):
        record, i = records[places[position][0]], places[position][1]
        if record["acceptance"][i] == 0:
            tables.append(None)
            continue
        text = [*record["prompt_ids"], *record["response_ids"][:i], record["draft_ids"][i]]
        values = []
        for token in rollouts["ids"][number, : rollouts["length"][number]].tolist():
            p, q = (distribution(model, text, config.sampling) for model in models)
            values.append((min(1.0, p[token] / q[token]), np.minimum(p, q).sum()))
            text = [*text, token]
        tables.append(values)
    return tables


def agrees(tables, slow):
    for number, values in enumerate(slow):
        mine = torch.stack([tables["acceptance"][number], tables["overlap"][number]], dim=-1)
        if values is None and mine.any():
            return False
        if values and not np.allclose(mine[: len(values)], values, atol=2e-4):
            return False
    return True


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """toy(name, sampling) → traces of a toy pair with rollouts of 6, made once: folder, models, config, records."""
    made = {}

    def make(name, sampling):
        if (name, sampling) not in made:
            place = tmp_path_factory.mktemp("informed") / name
            models = MODELS[name]
            collected(models, PROMPTS, place, sampling=sampling, max_new_tokens=12, ends=(3, 5), seed=14)
            load_coupled(place, models[1], "draft", k_max=6)
            config, traces = read_traces(place)
            parts = [read_tensors(path, ("position", "length", "ids")) for path in sorted(place.glob("rollouts/*.s*"))]
            lengths = [len(ids) for ids in traces["response_ids"]]
            for shard, part in enumerate(parts):
                part["position"] += sum(lengths[: shard * config.shard_size])
            rollouts = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            table, records = traces.with_format("numpy")[:], traces.to_list()
            made[name, sampling] = SimpleNamespace(
                place=place, models=models, config=config, table=table, records=records, rollouts=rollouts
            )
        return made[name, sampling]

    return make


@pytest.mark.parametrize(("name", "sampling"), [("llama", SAMPLED), ("gpt2", SAMPLED), ("llama", GREEDY)])
def test_tables_hold_what_plain_forwards_say(toy, name, sampling):
    made = toy(name, sampling)
    tables = ask_records(*made.models, made.table, made.rollouts, made.config)
    slow = slow_tables(made.models, made.records, made.rollouts, made.config)
    assert agrees(tables, slow)
    asked = [values for values in slow if values]
    if sampling is GREEDY:
        assert not asked and not tables["overlap"].any()
    else:
        assert len(asked) > 10 and any(a == 1 for values in asked for a, _ in values)
        assert any(a < 0.9 for values in asked for a, _ in values)
        # On the response's own token in place of the rejected one, all would be another's.
        other = {**made.table, "draft_ids": made.table["response_ids"]}
        assert not agrees(ask_records(*made.models, other, made.rollouts, made.config), slow)
        assert not agrees(ask_records(*made.models[::-1], made.table, made.rollouts, made.config), slow)


def test_what_is_fed_together_does_not_matter(toy, monkeypatch):
    made = toy("llama", SAMPLED)
    slow = slow_tables(made.models, made.records, made.rollouts, made.config)
    for responses, rollouts, elements in ((1, 1, 1 << 24), (3, 4, 1 << 24), (16, 128, 2 * 5 * VOCAB)):
        monkeypatch.setattr(truth_module, "RESPONSES", responses)
        monkeypatch.setattr(truth_module, "ROLLOUTS", rollouts)
        monkeypatch.setattr(truth_module, "CHUNK_ELEMENTS", elements)
        assert agrees(ask_records(*made.models, made.table, made.rollouts, made.config), slow)


# --- tables: files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def files(toy, tmp_path, monkeypatch):
    """A copy of the toy traces: .tables(…) reads the tables, .asked counts the shards that were asked of the target."""
    import shutil

    made, place = toy("llama", SAMPLED), tmp_path / "traces"
    shutil.copytree(made.place, place)
    asked, target_loads = [], []

    def counting(target, draft, records, rollouts, config):
        asked.append(int(records["index"][0]) // config.shard_size)
        return ask_records(target, draft, records, rollouts, config)

    def load_target():
        target_loads.append(1)
        return made.models[0]

    monkeypatch.setattr(truth_module, "ask_records", counting)

    def tables(target=True, k_max=6, **options):
        asked.clear()
        target_loads.clear()
        traces = load_coupled(place, made.models[1], "draft", k_max=k_max, **options)
        return informed_tables(traces, made.models[1], load_target if target else None)

    return SimpleNamespace(
        place=place / "informed", traces=place, tables=tables, asked=asked, loads=target_loads, toy=made
    )


def test_the_target_is_asked_once_and_then_not_even_loaded(files):
    assert files.tables(target=False) is None and not files.place.exists()
    first = files.tables()
    assert files.asked == [0, 1, 2] and files.loads == [1]
    for target in (True, False):
        again = files.tables(target=target)
        assert files.asked == files.loads == []
        assert torch.equal(first.acceptance, again.acceptance) and torch.equal(first.overlap, again.overlap)
    config = json.loads((files.place / CONFIG_NAME).read_text())
    assert config["k_max"] == 6 and {"traces", "target_fingerprint", "draft_fingerprint"} < set(config)


def test_tables_are_in_the_order_of_the_tokens(files):
    tables = files.tables()
    made = files.toy
    whole = ask_records(*made.models, made.table, made.rollouts, made.config)
    on = torch.tensor([a for record in made.records for a in record["acceptance"]])
    inside = torch.arange(5) < made.rollouts["length"][:, None]
    for name, first in (("acceptance", on), ("overlap", None)):
        values = getattr(tables, name)
        assert first is None or torch.equal(values[: len(first)], first)
        off = values[len(on) :].view(-1, 5)
        assert torch.allclose(off, torch.where(inside, whole[name], 0.0), atol=1e-5)


def test_shorter_rounds_and_fewer_prompts_take_what_is_there(files):
    whole = files.tables()
    short = files.tables(target=False, k_max=3)
    positions = sum(len(record["response_ids"]) for record in files.toy.records)
    assert files.asked == []
    for name in ("acceptance", "overlap"):
        off = getattr(whole, name)[positions:].view(-1, 5)[:, :2]
        assert torch.equal(getattr(short, name)[positions:].view(-1, 2), off)
    first = files.tables(target=False, max_prompts=5)
    lengths = [len(record["response_ids"]) for record in files.toy.records[:5]]
    assert torch.equal(first.overlap[: sum(lengths)], whole.overlap[: sum(lengths)])


def test_longer_rollouts_and_other_tokens_are_asked_anew(files):
    files.tables()
    assert files.tables(target=False, k_max=8) is None
    files.tables(k_max=8)
    assert files.asked == [0, 1, 2]
    path = files.traces / "rollouts" / "shard-00001.safetensors"
    tensors = read_tensors(
        path, ("position", "length", "ids", "logprob", "entropy", "max_prob", "hidden", "fed_hidden")
    )
    tensors["ids"][0, 0] = (tensors["ids"][0, 0] + 1) % 3
    save_tensors(tensors, path)
    files.tables(k_max=8)
    assert files.asked == [1]


def test_a_killed_run_is_resumed(files):
    files.tables()
    (files.place / "shard-00001.safetensors").unlink()
    assert files.tables(target=False) is None
    files.tables()
    assert files.asked == [1]


@pytest.mark.parametrize("text", ['{"version": 0}', '{"k_max": 6}'])
def test_tables_of_another_version_are_made_anew(files, text):
    files.tables()
    (files.place / CONFIG_NAME).write_text(text)
    assert files.tables(target=False) is None
    files.tables()
    assert files.asked == [0, 1, 2]


def test_a_damaged_shard_is_refused_by_name(files):
    files.tables()
    (files.place / "shard-00002.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"informed/shard-00002\.safetensors: damaged.*remove it"):
        files.tables()


def test_another_target_is_refused_by_name(files):
    config = files.toy.config
    check_target(config, files.traces, config.target_fingerprint)
    with pytest.raises(InputError, match=r"another pair .*--target"):
        check_target(config, files.traces, "other")


def test_traces_without_any_rejection_have_tables_too(tmp_path):
    draft = llama(1, vocab=VOCAB)
    collected((draft, draft), PROMPTS[:3], tmp_path / "traces", sampling=Sampling(), max_new_tokens=5)
    traces = load_coupled(tmp_path / "traces", draft, "draft", k_max=6)
    tables = informed_tables(traces, draft, lambda: draft)
    assert tables.acceptance.tolist() == pytest.approx([1.0] * 15, abs=1e-5)  # p as it was decoded, q as it is scored
    costs = ForwardCosts(t_draft=0.1, t_target=1.0)
    found = replay_informed(traces, tables, costs)
    assert np.array_equal(found.counts, replay_fixed(traces, [6])[0].counts)


# --- the embedded pair -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out(embedded_pair, embedded_pair_folder, tmp_path_factory):
    """held_out(sampling) → 40 held-out prompts, 32 tokens, with their tables; a period ends a response."""
    path = str(embedded_pair_folder / "prompts" / "test.jsonl")
    made = {}

    def make(sampling):
        if sampling not in made:
            prompts = [list(p.ids[:32]) for p in load_prompts(path, embedded_pair.tokenizer, max_prompts=40)]
            place = tmp_path_factory.mktemp("held-out") / "traces"
            held = Held(embedded_pair, prompts, place, sampling, [PERIOD], 32)
            tables = informed_tables(held.traces, embedded_pair.draft, lambda: embedded_pair.target)
            made[sampling] = held, tables
        return made[sampling]

    return make


REAL = {"greedy": Sampling(temperature=0), "sampled": Sampling(top_k=0)}


def martingale_z(traces, tables):
    """Of martingales over the rollouts' tokens, which Y ∼ q makes of a(Y) − β: plain, weighted by C and by β, which are
    known before Y is drawn. z is the sum over the root of the sum of squares."""
    steps = traces.k_max - 1
    acceptance, beta = (
        values[traces.positions :].view(-1, steps).double() for values in (tables.acceptance, tables.overlap)
    )
    survival = torch.cat([torch.ones(len(acceptance), 1).double(), acceptance.cumprod(-1)[:, :-1]], dim=-1)
    differences = [weight * (acceptance - beta) for weight in (torch.ones_like(beta), survival, beta)]
    return [float(each.sum() / each.square().sum().sqrt()) for each in differences]


def test_off_path_the_mean_of_a_is_beta(held_out):
    """E_{Y∼q}[a(Y)] = β at every token of every rollout; not so if β is the next token's, or a the one's before."""
    held, tables = held_out(REAL["sampled"])
    assert int((tables.overlap[held.traces.positions :] > 0).sum()) > 1000
    assert max(map(abs, martingale_z(held.traces, tables))) < Z_LIMIT
    for name, step in (("overlap", -1), ("acceptance", 1)):
        wrong = replace(tables, **{name: getattr(tables, name).roll(step)})
        assert max(map(abs, martingale_z(held.traces, wrong))) > Z_LIMIT


class Asking(RowPolicy):
    """Asks the target, which no real policy can: both models read the whole text before each round, then each drafted
    token. It learns the text from `see`, the decode loop's watcher."""

    max_draft_tokens = K_MAX

    def __init__(self, pair, prompts, sampling, price):
        self.models, self.sampling, self.price = (pair.target, pair.draft), sampling, price
        self.vocab = min(model.config.vocab_size for model in self.models)
        width = max(map(len, prompts)) + 64
        self.tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in prompts])
        self.lengths = torch.tensor([len(ids) for ids in prompts])

    def see(self, one):
        self.tokens, self.lengths = one.rows.tokens.clone(), one.rows.lengths.clone()

    def select(self, rows):
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]

    def start_round(self, live):
        longest = int(self.lengths.max())
        self.caches = [CachedModel(model, len(live), longest + K_MAX + 1) for model in self.models]
        self._ask(self.tokens[:, :longest], torch.zeros_like(self.lengths), 0, self.lengths - 1)
        self.survival = torch.ones(len(live))
        return torch.full((len(live),), K_MAX)

    def keep_drafting(self, step):
        self.survival = self.survival * acceptance_probability(self.p, self.q, step.token_ids)
        starts = self.lengths + step.depth - 1
        self._ask(step.token_ids[:, None], starts, int(starts.max()), torch.zeros_like(starts))
        return step.active & (self._gain() > self.price)

    def _gain(self):
        return self.survival * overlap(self.p, self.q)

    def _ask(self, ids, starts, longest, at):
        row = torch.arange(len(ids))
        logits = [cache.forward(ids, starts, longest).logits[row, at, : self.vocab] for cache in self.caches]
        self.p, self.q = (self.sampling.probabilities(part) for part in logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_decoding_with_a_policy_that_asks_the_target_costs_what_replay_says(held_out, name):
    held, tables = held_out(REAL[name])
    gain = expected_gain(held.traces, tables)

    def counts_at(price):
        return walk_rounds(held.traces, myopic_lengths(held.traces, gain, price)[:, None]).counts[:, 0]

    mine = counts_at(0.25)
    policy = Asking(held.pair, held.prompts, REAL[name], 0.25)
    result = generate(
        held.pair.target, held.pair.draft, held.prompts, policy=policy, sampling=REAL[name], max_new_tokens=32,
        end_token_ids=[PERIOD], seed=3, watch=policy.see,
    )  # fmt: skip
    counts = np.array([[s.generated, s.discarded, s.rounds, s.draft_forwards] for s in result.stats], dtype=float)
    if name == "greedy":
        assert result.tokens == held.responses and np.array_equal(mine, counts)
        return
    assert max(map(abs, z_scores(mine, counts))) < 1.96, z_scores(mine, counts)
    assert max(map(abs, z_scores(counts_at(0.05), counts))) > Z_LIMIT, "another price must be told apart"
