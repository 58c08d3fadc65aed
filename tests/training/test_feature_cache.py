"""The feature cache: it holds the states of ordinary forwards, any process may write it, and files are checked."""

from __future__ import annotations

import pickle
import random
import shutil
from collections import namedtuple
from dataclasses import fields, replace
from pathlib import Path

import lightning as L
import pytest
import torch

from accept_head import AcceptanceHead, HeadConfig, InputError, Sampling
from accept_head.signals import SIGNALS
from accept_head.training.learn.batches import StateBatch
from accept_head.training.learn.candidates import Candidate
from accept_head.training.learn.data import TraceData
from accept_head.training.learn.feature_cache import FeatureCache
from accept_head.training.learn.module import HeadTraining
from accept_head.training.learn.splits import read_splits
from tests.examples import TRACES, write_traces

CONFIG = replace(TRACES, vocab_size=261, num_prompts=10, sampling=Sampling(), seed=0, batch_size=30, shard_size=4)
LENGTHS = [(3, 9), (6, 2), (2, 14), (4, 5), (1, 8), (5, 1), (7, 6), (2, 3), (4, 4), (1, 7)]  # 3 shards of 4, 4 and 2
NAMES = [field.name for field in fields(StateBatch)]


@pytest.fixture(scope="module")
def draft(random_llama):
    return random_llama(2, hidden=16, layers=2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, make_traces):
    """Makes a folder of traces. records: seed of what is in it, under whatever config."""
    place = tmp_path_factory.mktemp("traces")

    def make(name, *, seed=0, records=None, alternatives=0):
        config = replace(CONFIG, seed=seed, alternatives=alternatives or None)
        made = make_traces(LENGTHS, seed=seed if records is None else records, alternatives=alternatives)
        return write_traces(place / name, config, made)

    return make


@pytest.fixture(scope="module")
def splits(folder_of):
    """Two folders to train on, and one to judge on."""
    return read_splits(
        [folder_of("a"), folder_of("b", seed=1)], folder_of("dev", seed=2), draft_fingerprint="b2", seed=0
    )


def new_head(kind="token", depth=2):
    """kind: as in HeadConfig.predicts; or, from the state before the token, `before` it, or both and so `ahead`."""
    torch.manual_seed(0)
    more = {}
    if kind in ("before", "ahead"):
        more = {"signals": SIGNALS, "signal_mean": (-0.5, 0.4, 0.6), "signal_std": (0.3, 0.2, 0.25), "reads": "before"}
    predicts = {"before": "token", "ahead": "both"}.get(kind, kind)
    return AcceptanceHead(HeadConfig(hidden_size=16, depth=depth, predicts=predicts, **more))


def packing_of(kind):
    return "prefix" if kind in ("before", "ahead") else "exact"


def module_of(draft, kind="before"):
    options = {"lr": 1e-2, "total_steps": 10, "steps_per_epoch": 5, "warmup_share": 0.0, "w_acc": 1.0}
    return HeadTraining([Candidate("", new_head(kind), 3.0)], draft, **options)


def cache_of(splits, where, draft, kind="before", **changes):
    options = {"packing": packing_of(kind), "axes": module_of(draft, kind).axes, "precision": "fp32", **changes}
    return FeatureCache(splits.parts, where, draft, **options)


def contents(where):
    return {str(path.relative_to(where)): path.read_bytes() for path in sorted(where.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def all_features(splits, draft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    cache_of(splits, folder, draft).complete(module_of(draft).read, traces_at_once=3)
    return folder


@pytest.fixture
def filled(all_features, tmp_path):
    """A folder with all features of `splits` in it, and nothing else."""
    return Path(shutil.copytree(all_features, tmp_path / "filled"))


# --- what is in it --------------------------------------------------------------------------------------------------


def state_after(draft, ids):
    return draft(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1]


@pytest.mark.parametrize("kind", ["token", "next", "both", "before", "ahead"])
def test_features_are_those_of_one_ordinary_forward_a_position(splits, draft, tmp_path, kind):
    cache = cache_of(splits, tmp_path / "cache", draft, kind)
    cache.complete(module_of(draft, kind).read, traces_at_once=3)
    for place, part in enumerate(splits.parts):
        for trace in list(part.traces)[::3]:
            found = cache.folders[place].trace(trace["index"])
            count = len(trace["draft_ids"])
            before = [trace["prompt_ids"] + trace["response_ids"][:i] for i in range(count)]
            drawn = [[*ids, trace["draft_ids"][i]] for i, ids in enumerate(before)]
            asked = {"token": drawn, "next": before, "both": before + drawn}.get(kind, before)
            states = torch.stack([state_after(draft, ids) for ids in asked])
            torch.testing.assert_close(found.hidden, states, rtol=1e-4, atol=1e-5)
            assert found.counts.tolist() == [len(asked)] and found.indices.tolist() == [trace["index"]]
            if kind != "next":
                assert found.weights[-count:, 0].all() and found.drawn_ids[-count:].tolist() == trace["draft_ids"]
                assert found.labels[-count:, 0].tolist() == trace["acceptance"]
                signals = torch.tensor([trace[name] for name in SIGNALS]).T
                assert torch.equal(found.signals[-count:], signals)
            if kind in ("next", "both"):
                assert found.weights[:count, 1].all() and found.labels[:count, 1].tolist() == trace["overlap"]


Fitted = namedtuple("Fitted", "weights dev forwards trainer")


def fit(draft, splits, cache, kind="before", workers=0, alternatives=0):
    """forwards: of the draft. dev: binary KLs."""
    module = module_of(draft, kind)
    forwards = []
    handle = draft.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
    options = {"packing": packing_of(kind), "r": 0.5, "epochs": 2, "batch_size": 4, "micro_batch_size": 2, "seed": 0}
    data = TraceData(splits.train, splits.dev, **options, alternatives=alternatives, workers=workers, cache=cache)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=10, accumulate_grad_batches=2, use_distributed_sampler=False, **quiet
    )
    trainer.fit(module, data)
    handle.remove()
    dev = [quality.binary_kl for quality in module.dev_quality[0].values()]
    return Fitted(torch.cat([p.detach().flatten() for p in module.heads.parameters()]), dev, len(forwards), trainer)


@pytest.mark.parametrize("kind", ["both", "ahead"])
def test_a_head_trained_from_the_cache_is_the_same_up_to_rounding_and_needs_no_draft(splits, draft, tmp_path, kind):
    plain = fit(draft, splits, None, kind)
    first = fit(draft, splits, cache_of(splits, tmp_path / "cache", draft, kind), kind)
    again = fit(draft, splits, cache_of(splits, tmp_path / "cache", draft, kind), kind)
    torch.testing.assert_close(first.weights, plain.weights, rtol=1e-3, atol=1e-5)
    assert first.dev == pytest.approx(plain.dev, abs=1e-5)
    assert torch.equal(first.weights, again.weights) and first.dev == again.dev
    assert (first.forwards, again.forwards) == (3 * (2 + 2 + 1), 0) and plain.forwards > 20


def test_alternatives_come_from_the_cache_as_from_the_traces(folder_of, draft, tmp_path):
    """The folder of dev traces has none; of those that there are, a run may take fewer, and has features of its own."""
    folders = [folder_of("a3", alternatives=3), folder_of("b3", seed=1, alternatives=3)]
    splits = read_splits(folders, folder_of("dev0", seed=2), draft_fingerprint="b2", seed=0)
    plain = {count: fit(draft, splits, None, alternatives=count) for count in (0, 2, 3)}
    for count, without in plain.items():
        cache = cache_of(splits, tmp_path / "cache", draft, alternatives=count)
        cached = fit(draft, splits, cache, alternatives=count)
        torch.testing.assert_close(cached.weights, without.weights, rtol=1e-3, atol=1e-5)
        assert cached.dev == pytest.approx(without.dev, abs=1e-5)
        for folder in cache.folders:
            found, said = (sum(sizes) for sizes in zip(
                *((folder.file(shard).stat().st_size, folder.size(shard)) for shard in range(folder.count)),
                strict=True,
            ))  # fmt: skip
            assert said < found < said + 2000 * folder.count, "the room that is asked for is not what is written"
    assert (plain[3].weights - plain[2].weights).abs().max() > 1e-3
    assert (plain[2].weights - plain[0].weights).abs().max() > 1e-3
    assert len(list((tmp_path / "cache").iterdir())) == 3 * 2 + 1  # dev features are the same in all three


def test_worker_processes_read_the_same_and_a_spawned_one_gets_no_copy(splits, draft, filled):
    assert torch.equal(
        fit(draft, splits, cache_of(splits, filled, draft), workers=2).weights,
        fit(draft, splits, cache_of(splits, filled, draft)).weights,
    )
    cache = cache_of(splits, filled, draft)
    before = len(pickle.dumps(cache))
    wanted = [cache.folders[1].trace(index) for index in range(len(LENGTHS))]
    assert len(pickle.dumps(cache)) == before
    for index, one in enumerate(wanted):
        other = pickle.loads(pickle.dumps(cache)).folders[1].trace(index)
        assert all(torch.equal(vars(one)[name], vars(other)[name]) for name in NAMES)


def test_shards_are_mapped_and_not_read_into_memory(splits, draft, filled):
    cache = cache_of(splits, filled, draft)
    kept = cache.folders[0].trace(5)
    mapped = Path("/proc/self/maps").read_text()
    assert str(cache.folders[0].file(1)) in mapped and str(cache.folders[0].file(0)) not in mapped
    assert len(kept.hidden) == LENGTHS[5][1]


# --- who writes it, and when ----------------------------------------------------------------------------------------


def test_ranks_divide_the_shards_and_leave_the_same_files(splits, draft, filled, tmp_path):
    where, seen = tmp_path / "ranks", set()
    for rank in range(3):
        cache_of(splits, where, draft).complete(module_of(draft).read, traces_at_once=3, rank=rank, world=3)
        now = set(where.rglob("*.safetensors"))
        assert len(now - seen) == 3, "nine shards, three ranks"
        seen = now
    assert contents(where) == contents(filled)


@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_after_an_interruption_only_the_rest_is_written_and_the_files_are_the_same(
    splits, draft, filled, tmp_path, stop
):
    read, fed = module_of(draft).read, []

    def interrupted(batch):
        if len(fed) == 2 * stop + 1:  # in the second batch of a shard, or the first
            raise KeyboardInterrupt
        fed.append(batch.indices)
        return read(batch)

    where = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        cache_of(splits, where, draft).complete(interrupted, traces_at_once=3)
    there = {path: path.stat().st_mtime_ns for path in where.rglob("*.safetensors")}
    assert 0 <= len(there) < 9 and (stop == 0) == (not there)
    cache_of(splits, where, draft).complete(read, traces_at_once=3)
    assert all(path.stat().st_mtime_ns == written for path, written in there.items())
    assert contents(where) == contents(filled)


def test_what_decides_the_states_decides_where_they_are(splits, draft, tmp_path, random_llama):
    """Nothing is shared by mistake: each change is another folder."""
    folders = [cache_of(splits, tmp_path, draft).folders[0].path]
    for changes in ({"packing": "exact"}, {"axes": [1]}, {"precision": "bf16"}):
        folders.append(cache_of(splits, tmp_path, draft, **changes).folders[0].path)
    folders.append(cache_of(splits, tmp_path, random_llama(2, hidden=16).bfloat16()).folders[0].path)
    folders += [folder.path for folder in cache_of(splits, tmp_path, draft).folders[1:]]
    other = replace(splits.parts[0], config=replace(splits.parts[0].config, draft_fingerprint="z9"))
    folders.append(cache_of(replace(splits, parts=(other,)), tmp_path, draft).folders[0].path)
    assert len(set(folders)) == len(folders)
    assert cache_of(splits, None, draft).folders[0].path.parent == splits.parts[0].folder / "features"


def test_token_mixing_is_refused(splits, draft, tmp_path):
    with pytest.raises(InputError, match="--cache: token mixing draws its masks anew"):
        cache_of(splits, tmp_path, draft, packing="mixing")


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["token", "both", "before"])
def test_the_size_is_known_before(splits, draft, tmp_path, kind, capsys):
    cache = cache_of(splits, tmp_path / "cache", draft, kind)
    cache.complete(module_of(draft, kind).read, traces_at_once=3)
    for folder in cache.folders:
        for shard in range(folder.count):
            header = folder.file(shard).stat().st_size - folder.size(shard)
            assert 0 < header < 2500
    positions = 3 * sum(response for _, response in LENGTHS)
    size = sum(folder.size(shard) for folder in cache.folders for shard in range(3))
    assert f"draft states of {positions} positions, {size / 1000:.3g} kB, go to {tmp_path}" in capsys.readouterr().out


def test_too_little_room_is_refused_before_anything_is_written(splits, draft, tmp_path, monkeypatch):
    size = sum(folder.size(shard) for folder in cache_of(splits, tmp_path, draft).folders for shard in range(3))
    for free, enough in ((size - 1, False), (size, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        cache = cache_of(splits, tmp_path / "cache" / "deep", draft)
        if enough:
            cache.complete(module_of(draft).read, traces_at_once=3)
            continue
        with pytest.raises(InputError, match=rf"^--cache {tmp_path}/cache/deep.*kB of draft states.*kB are free") as e:
            cache.complete(module_of(draft).read, traces_at_once=3)
        assert "\n" not in str(e.value) and not (tmp_path / "cache").exists()


def test_a_place_that_is_no_folder_is_refused(splits, draft, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=rf"^--cache {tmp_path}/file"):
        cache_of(splits, tmp_path / "file", draft).complete(module_of(draft).read, traces_at_once=3)


# --- damage ---------------------------------------------------------------------------------------------------------


def assert_refused(cache, path, message="damaged"):
    """By name, and with what to do about it."""
    folder = next(folder for folder in cache.folders if folder.path == path.parent)
    folder.mapped.clear()
    with pytest.raises(InputError, match=rf"^{path}: {message}.*remove it to have it made again") as caught:
        folder.map(int(path.stem[-5:]))
    assert "\n" not in str(caught.value)


def test_any_flipped_bit_is_found_and_its_shard_named(splits, draft, filled):
    pick, cache = random.Random(0), cache_of(splits, filled, draft)
    for path in sorted(filled.rglob("*.safetensors"))[::4]:
        good = path.read_bytes()
        header = 8 + int.from_bytes(good[:8], "little")
        for place in [pick.randrange(end) for end in [header] * 25 + [len(good)] * 25]:
            bad = bytearray(good)
            bad[place] ^= 1 << pick.randrange(8)
            path.write_bytes(bad)
            assert_refused(cache, path)
        for length in (0, 7, header - 1, header, len(good) - 1):
            path.write_bytes(good[:length])
            assert_refused(cache, path)
        path.write_bytes(good)
    cache.complete(None, traces_at_once=3)


def test_a_damaged_shard_is_found_before_the_draft_runs(splits, draft, filled):
    shards = sorted(filled.rglob("*.safetensors"))
    shards[0].unlink()
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1])
    with pytest.raises(InputError, match=str(shards[-1])):
        cache_of(splits, filled, draft).complete(None, traces_at_once=3)
    assert not shards[0].exists()


def test_features_of_other_traces_under_the_same_settings_are_refused(splits, draft, filled, folder_of):
    """As when the same prompts were collected anew on another machine."""
    other = read_splits([folder_of("other", records=9)], splits.parts[2].folder, draft_fingerprint="b2", seed=0)
    shard = cache_of(other, filled, draft).folders[0].file(0)
    assert_refused(cache_of(other, filled, draft), shard, "made from other traces than those in .*other")


def test_a_shard_that_was_removed_is_written_again(splits, draft, filled):
    before = contents(filled)
    gone = sorted(filled.rglob("*.safetensors"))[4]
    gone.unlink()
    cache_of(splits, filled, draft).complete(module_of(draft).read, traces_at_once=3)
    assert contents(filled) == before
