"""Rollouts against plain forwards without a cache, one token at a time. Also their files."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from accept_head import InputError, Sampling
from accept_head.checksum import read_tensors
from accept_head.files import atomic_path
from accept_head.inference.replay import rollouts as module
from accept_head.inference.replay.coupled import load_coupled
from accept_head.inference.replay.rollouts import CONFIG_NAME, SIGNALS, roll_out_records
from accept_head.trace.shards import read_traces
from tests.inference.support.collected import GREEDY, MODELS, PROMPTS, SAMPLED, collected, state_after, written
from tests.inference.support.made_up import config_of
from tests.inference.support.toy import GROUPED, VOCAB, exact_distribution, llama, tiny
from tests.training.by_hand import processed, uniform_number

FALSE_ALARM = 1e-4
NAMES = ("position", "length", "ids", "logprob", "entropy", "max_prob", "hidden", "fed_hidden")


@pytest.fixture(scope="module")
def traces_of(tmp_path_factory):
    """Traces of a toy pair, made once: traces_of(name, sampling) → folder; ids 3 and 5 end a response."""
    made = {}

    def make(name, sampling):
        key = (name, sampling)
        if key not in made:
            folder = tmp_path_factory.mktemp("traces") / name
            made[key] = collected(
                MODELS[name], PROMPTS, folder, sampling=sampling, max_new_tokens=12, ends=(3, 5), seed=14
            )
        return made[key]

    return make


def records_in(folder):
    config, traces = read_traces(folder)
    return config, traces.with_format("numpy")[:], traces.to_list()


# --- one token at a time ---------------------------------------------------------------------------------------------


def draw_by_hand(logits, sampling, uniform):
    """→ id, log q, entropy, max q."""
    q = processed(logits[None].numpy(), Sampling(top_k=0) if sampling.greedy else sampling)[0]
    chosen = int(np.searchsorted(np.cumsum(q), uniform, side="right"))
    chosen = int(logits.argmax()) if sampling.greedy else chosen
    return chosen, math.log(q[chosen]), -sum(x * math.log(x) for x in q if x > 0), q.max()


@torch.no_grad()
def slow_rollouts(draft, records, config, k_max):
    """{position in the flat table: [(id, log q, entropy, max q, hidden state)]} and all states, (P, hidden)."""
    rollouts, fed = {}, []
    for record in records:
        for i, (rejected, kept) in enumerate(zip(record["draft_ids"], record["accepted"], strict=True)):
            prefix = [*record["prompt_ids"], *record["response_ids"][:i]]
            place = len(fed)
            fed.append(state_after(draft, prefix)[1])
            if kept or i >= config.max_new_tokens - 1:
                continue
            ids, tokens = [*prefix, rejected], []
            while (
                ids[-1] not in config.end_token_ids
                and len(tokens) < k_max - 1
                and i + 1 + len(tokens) < config.max_new_tokens - 1
            ):
                logits, hidden = state_after(draft, ids)
                uniform = uniform_number(config.seed, record["index"], i, 4, len(tokens))
                drawn = draw_by_hand(logits[: config.vocab_size], config.sampling, uniform)
                tokens.append((*drawn, hidden))
                ids.append(drawn[0])
            rollouts[place] = tokens
    return rollouts, torch.stack(fed)


def assert_equal_to_slow(tensors, slow, fed):
    assert tensors["position"].tolist() == list(slow)
    assert tensors["length"].tolist() == [len(tokens) for tokens in slow.values()]
    assert torch.allclose(tensors["fed_hidden"], fed, atol=1e-4)
    for row, tokens in enumerate(slow.values()):
        for slot, (token, *signals, hidden) in enumerate(tokens):
            assert tensors["ids"][row, slot] == token
            mine = [float(tensors[name.removeprefix("draft_")][row, slot]) for name in SIGNALS]
            assert mine == pytest.approx(signals, abs=1e-4)
            assert torch.allclose(tensors["hidden"][row, slot], hidden, atol=1e-4)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", MODELS)
def test_rollouts_are_what_plain_forwards_draw(traces_of, name, sampling):
    folder, draft = traces_of(name, sampling), MODELS[name][1]
    config, table, records = records_in(folder)
    slow, fed = slow_rollouts(draft, records, config, 6)
    lengths = {len(tokens) for tokens in slow.values()}
    assert len(slow) >= 5 and {0, 5} <= lengths, "nothing was cut short"
    assert_equal_to_slow(roll_out_records(draft, table, config, 6), slow, fed)


def test_rollouts_of_the_trained_draft_are_what_plain_forwards_draw(embedded_pair, embedded_pair_folder, tmp_path):
    models = (embedded_pair.target, embedded_pair.draft)
    prompts = [embedded_pair.tokenizer(text)["input_ids"] for text in ("The king said", "def add(a, b):\n", "12 + 7 =")]
    for sampling in (Sampling(), GREEDY):
        folder = tmp_path / str(sampling.greedy)
        collected(models, prompts, folder, sampling=sampling, max_new_tokens=8, ends=(203,))
        config, table, records = records_in(folder)
        slow, fed = slow_rollouts(embedded_pair.draft, records, config, 5)
        assert_equal_to_slow(roll_out_records(embedded_pair.draft, table, config, 5), slow, fed)


def same(one, other, rows=slice(None)):
    """Equal rollouts as far as they go. rows: of the second, in the order of the first."""
    if not torch.equal(one["length"], other["length"][rows]):
        return False
    inside = torch.arange(one["ids"].shape[1]) < one["length"][:, None]
    for name in ("ids", "logprob", "entropy", "max_prob", "hidden"):
        mine, its = one[name][inside].float(), other[name][rows][inside].float()
        if not torch.allclose(mine, its, atol=2e-5):
            return False
    return True


@pytest.mark.parametrize(("responses", "rollouts"), [(1, 1), (3, 2), (4, 128), (16, 5)])
def test_what_is_fed_together_does_not_matter(traces_of, monkeypatch, responses, rollouts):
    config, table, _ = records_in(traces_of("llama", SAMPLED))
    draft = MODELS["llama"][1]
    whole = roll_out_records(draft, table, config, 6)
    monkeypatch.setattr(module, "RESPONSES", responses)
    monkeypatch.setattr(module, "ROLLOUTS", rollouts)
    other = roll_out_records(draft, table, config, 6)
    assert torch.equal(whole["position"], other["position"])
    assert torch.allclose(whole["fed_hidden"], other["fed_hidden"], atol=2e-5)
    assert same(whole, other)


def test_the_order_of_the_records_does_not_matter_but_their_index_does(traces_of):
    config, table, _ = records_in(traces_of("llama", SAMPLED))
    draft = MODELS["llama"][1]
    whole = roll_out_records(draft, table, config, 6)
    backwards = roll_out_records(draft, {name: values[::-1].copy() for name, values in table.items()}, config, 6)
    lengths = [len(ids) for ids in table["response_ids"]]
    record_of = np.repeat(np.arange(len(lengths)), lengths)[whole["position"]]
    order = [row for record in range(len(lengths))[::-1] for row in np.flatnonzero(record_of == record)]
    assert same(backwards, whole, torch.tensor(order))
    assert not same(whole, roll_out_records(draft, {**table, "index": table["index"] + 1}, config, 6))
    assert not same(whole, roll_out_records(draft, table, replace(config, seed=1), 6))


@pytest.mark.parametrize("shard_size", [1, 3, 10])
def test_the_division_into_shards_does_not_matter(traces_of, tmp_path, shard_size):
    folder, draft = traces_of("llama", SAMPLED), MODELS["llama"][1]
    config, table, records = records_in(folder)
    whole = roll_out_records(draft, table, config, 6)
    written(tmp_path / "traces", replace(config, shard_size=shard_size), records)
    traces = load_coupled(tmp_path / "traces", draft, "draft", k_max=6)
    assert torch.equal(traces.rejected, whole["position"])
    parts = list(traces.hidden())
    assert len(parts) == -(-10 // shard_size)
    ids = traces.ids[traces.positions :].view(-1, 5)
    signals = {n: getattr(traces, n)[traces.positions :].view(-1, 5) for n in ("logprob", "entropy", "max_prob")}
    hidden = torch.cat([hidden for *_, hidden in parts])
    assert same({"length": traces.rollout_lengths, "ids": ids, "hidden": hidden, **signals}, whole)


def test_longer_rollouts_begin_as_shorter_ones(traces_of):
    config, table, _ = records_in(traces_of("llama", SAMPLED))
    draft = MODELS["llama"][1]
    short, long = (roll_out_records(draft, table, config, k_max) for k_max in (3, 8))
    cut = {name: long[name][:, :2] for name in ("ids", "logprob", "entropy", "max_prob", "hidden")}
    assert same(short, {**cut, "length": long["length"].clamp(max=2)})


def test_traces_without_any_rejection_have_no_rollouts(tmp_path):
    draft = MODELS["llama"][1]
    folder = collected((draft, draft), PROMPTS[:3], tmp_path / "traces", sampling=SAMPLED, max_new_tokens=5)
    traces = load_coupled(folder, draft, "draft", k_max=6)
    assert len(traces.rejected) == 0 and len(traces.ids) == traces.positions == 15
    assert traces.drafts.tolist() == [4, 3, 2, 1, 0] * 3


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_the_shortest_budgets_leave_rollouts_of_the_rest(tmp_path, tokens):
    models = MODELS["llama"]
    folder = collected(models, PROMPTS, tmp_path / "traces", sampling=SAMPLED, max_new_tokens=tokens)
    traces = load_coupled(folder, models[1], "draft", k_max=4)
    assert traces.rollout_lengths.tolist() == [max(0, tokens - 2 - int(i) % tokens) for i in traces.rejected]
    assert traces.drafts.tolist() == list(range(tokens))[::-1] * 10


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prompt_and_response_may_fill_the_drafts_context(tmp_path, name):
    target, _ = MODELS[name]
    draft = tiny(type(target), type(target.config), layers=1, seed=5, **GROUPED if name == "llama" else {})
    prompts = [list(range(1, 25)), [4, 5, 6]]
    folder = collected((target, draft), prompts, tmp_path / "traces", sampling=SAMPLED, max_new_tokens=40)
    config, table, records = records_in(folder)
    slow, fed = slow_rollouts(draft, records, config, 20)
    assert {0, 19} < {len(tokens) for tokens in slow.values()}
    assert_equal_to_slow(roll_out_records(draft, table, config, 20), slow, fed)


# --- their distribution ----------------------------------------------------------------------------------------------


def test_rollouts_are_drawn_from_the_draft(monkeypatch):
    """Two tokens after one rejected token, many times, against exact probabilities."""
    count, draft, sampling = 4000, llama(1, sharpness=3.0), Sampling(temperature=3.0, top_k=0)
    monkeypatch.setattr(module, "RESPONSES", count)
    monkeypatch.setattr(module, "ROLLOUTS", count)
    record = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 1, 2, 4],
        "draft_ids": [0, 1, 2, 4],
        "accepted": [False, True, True, True],
    }
    table = {name: np.array([values] * count) for name, values in record.items()}
    config = config_of(count, max_new_tokens=4, vocab_size=5, end_token_ids=(), sampling=sampling)
    rolled = roll_out_records(draft, {**table, "index": np.arange(count)}, config, 3)
    assert (rolled["length"] == 2).all()
    first, second = rolled["ids"].long().unbind(1)
    found = torch.bincount(5 * first + second, minlength=25)

    def p_value(after):
        expected = exact_distribution(draft, after, 2, sampling) * count
        often = expected >= 5
        cells = (found, expected)
        if not often.all():  # rare ones share a cell
            cells = tuple(torch.cat([n[often], n[~often].sum()[None]]) for n in cells)
        return chisquare(cells[0], cells[1] * (count / cells[1].sum())).pvalue

    assert p_value([1, 2, 0]) > FALSE_ALARM
    assert p_value([1, 2, 3]) < FALSE_ALARM, "a rollout from the target's token must be told apart"


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(traces_of, tmp_path, monkeypatch):
    """Traces with rollouts for 6 tokens: .load(…) reads them, .shards are those that were rolled out since."""
    config, _, records = records_in(traces_of("llama", SAMPLED))
    folder = written(tmp_path / "traces", config, records)
    shards = []

    def counting(draft, table, *arguments):
        shards.append(int(table["index"][0]) // config.shard_size)
        return roll_out_records(draft, table, *arguments)

    monkeypatch.setattr(module, "roll_out_records", counting)
    draft = MODELS["llama"][1]

    def load(k_max=6, draft=draft, fingerprint="draft", **options):
        shards.clear()
        return load_coupled(folder, draft, fingerprint, k_max=k_max, **options)

    return SimpleNamespace(folder=folder, place=folder / "rollouts", load=load, shards=shards, config=config)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_rollouts_are_made_once(made):
    first = made.load()
    assert made.shards == [0, 1, 2]
    before = contents(made.place)
    assert sorted(before) == [CONFIG_NAME, *(f"shard-0000{i}.safetensors" for i in range(3))]
    again = made.load()
    assert made.shards == [] and contents(made.place) == before
    for name in ("path", "drafts", "leading", "ids", "logprob"):
        assert torch.equal(getattr(first, name), getattr(again, name))


def test_a_shorter_round_takes_longer_rollouts_and_a_longer_one_has_them_made_anew(made):
    made.load(k_max=6)
    shorter = made.load(k_max=3)
    assert made.shards == [] and shorter.k_max == 3 and shorter.path.shape[1] == 3
    longer = made.load(k_max=9)
    assert made.shards == [0, 1, 2] and longer.k_max == 9
    assert json.loads((made.place / CONFIG_NAME).read_text())["k_max"] == 9


def test_a_killed_run_is_resumed_and_leaves_the_same_files(made):
    made.load()
    before = contents(made.place)
    (made.place / "shard-00001.safetensors").unlink()
    (made.place / ".shard-00001.safetensors.0badcafe.partial").write_bytes(b"half of it")
    made.load()
    assert made.shards == [1]
    after = contents(made.place)
    assert {name: after[name] for name in before} == before


def test_a_run_killed_in_the_middle_of_a_shard_leaves_no_file_of_it(made, monkeypatch):
    def killed(tensors, path, **_):
        Path(path).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_tensors", killed)
        with pytest.raises(KeyboardInterrupt):
            made.load()
    assert [path.name for path in made.place.iterdir()] == [CONFIG_NAME]
    made.load()
    assert made.shards == [0, 1, 2]


@pytest.mark.parametrize("changes", [{"seed": 3}, {"max_new_tokens": 13}, {"sampling": Sampling()}])
def test_rollouts_of_other_traces_are_made_anew(made, changes):
    made.load()
    replace(made.config, **changes).save(made.folder)
    made.load()
    assert made.shards == [0, 1, 2]


def test_rollouts_stay_when_only_a_models_name_changes(made):
    made.load()
    replace(made.config, draft="moved/draft").save(made.folder)
    made.load()
    assert made.shards == []


def test_rollouts_in_another_precision_are_made_anew(made):
    made.load()
    draft = llama(1, vocab=VOCAB).to(torch.bfloat16)
    made.load(draft=draft)
    assert made.shards == [0, 1, 2]


def test_a_damaged_config_is_refused_by_name(made):
    made.load()
    (made.place / CONFIG_NAME).write_text('{"version":')
    with pytest.raises(InputError, match=rf"{CONFIG_NAME}: not readable as JSON"):
        made.load()


@pytest.mark.parametrize("change", [{"version": 0}, {"traces": "others"}, {"k_max": "6"}, {"k_max": None}, None])
def test_under_another_config_the_rollouts_are_made_anew(made, change):
    made.load()
    path = made.place / CONFIG_NAME
    path.write_text(json.dumps({"k_max": 6} if change is None else {**json.loads(path.read_text()), **change}))
    made.load()
    assert made.shards == [0, 1, 2]


def test_another_draft_is_refused_by_name_and_nothing_is_made(made):
    with pytest.raises(InputError, match=r"another pair .*--draft"):
        made.load(fingerprint="other")
    assert not made.place.exists()


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "other tensors"])
def test_a_damaged_shard_is_refused_by_name(made, damage):
    from safetensors.torch import save_file

    made.load()
    path = made.place / "shard-00002.safetensors"
    if damage == "other tensors":
        save_file({"weights": torch.zeros(3)}, path)
    else:
        data = path.read_bytes()
        path.write_bytes({"cut": data[: len(data) // 2], "garbage": b"\0" * 64, "empty": b""}[damage])
    with pytest.raises(InputError, match=r"shard-00002\.safetensors: damaged.*remove it") as caught:
        made.load()
    assert "\n" not in str(caught.value)
    path.unlink()
    made.load()
    assert made.shards == [2]


def test_the_first_prompts_need_their_shards_only(made):
    some = made.load(max_prompts=5)
    assert made.shards == [0, 1]
    assert len(some.lengths) == 5 and len(some.domains) == 5
    assert not (made.place / "shard-00002.safetensors").exists()
    (made.place / "shard-00001.safetensors").write_bytes(b"damaged")
    assert len(made.load(max_prompts=4).lengths) == 4
    assert made.shards == []


@pytest.mark.parametrize("k_max", [-1, 0, 1])
def test_a_longest_round_below_2_is_refused(made, k_max):
    with pytest.raises(InputError, match=f"k_max is {k_max}"):
        made.load(k_max=k_max)


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_option(made, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("accept_head.files.tempfile.TemporaryFile", read_only)
    with pytest.raises(InputError, match=r"--traces .*rollouts: cannot be written to \(Read-only file system\)"):
        made.load()


def test_a_file_in_the_place_of_the_folder_is_refused(made):
    made.place.write_text("not yours")
    with pytest.raises(InputError, match=r"--traces .*rollouts"):
        made.load()
    assert made.place.read_text() == "not yours"


def test_finished_rollouts_can_be_read_from_a_folder_that_cannot_be_written_to(made, monkeypatch):
    made.load()

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("accept_head.files.tempfile.TemporaryFile", read_only)
    made.load()


def test_tensors_are_read_by_name(made):
    made.load()
    tensors = read_tensors(made.place / "shard-00000.safetensors", NAMES)
    assert tuple(tensors) == NAMES
    slots = {tensors[name].shape[1] for name in ("ids", "logprob", "entropy", "max_prob", "hidden")}
    assert slots == {5} and len({len(tensors[name]) for name in NAMES[:-1]}) == 1


def test_nothing_half_written_is_ever_under_a_shards_name(made):
    with pytest.raises(RuntimeError), atomic_path(made.folder / "shard") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert not (made.folder / "shard").exists()
