"""The command `accept-head train --cache` on a random pair's traces."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import start_and_kill

# The last epoch's residual, although it does not pay on a random pair.
SHORT = ("--batch_size", 8, "--micro_batch_size", 4, "--epochs", 4, "--keep", "last")


@pytest.fixture(scope="module")
def arguments(random_traces_folder, random_pair_folder):
    def make(out, *more, traces=random_traces_folder):
        draft = random_pair_folder / "draft"
        return ["train", "--traces", traces, "--draft", draft, "--out", out, "--lr", 0.01, *SHORT, *more]

    return make


@pytest.fixture(scope="module")
def train(arguments, run_warm):
    def run(out, *more, **changes):
        done = run_warm(*arguments(out, *more, **changes))
        assert done.returncode == 0, done.stderr
        return out

    return run


@pytest.fixture(scope="module")
def cached(train, random_traces_folder, tmp_path_factory):
    """A head trained with its features beside its own copy of the traces, which is the folder `traces`."""
    folder = tmp_path_factory.mktemp("cached")
    shutil.copytree(random_traces_folder, folder / "traces")
    return train(folder / "head", "--cache", "true", traces=folder / "traces")


def weights(head):
    return load_file(head / "model.safetensors")


def dev_kl(head):
    return json.loads((head / "metrics.json").read_text())["dev"]["token"]["binary_kl"]


def features(where):
    return {path.name: path.read_bytes() for path in sorted(where.rglob("*")) if path.is_file()}


def test_a_head_from_the_cache_is_the_head_without_it_up_to_rounding(cached, train, tmp_path):
    plain = train(tmp_path / "head")
    assert dev_kl(cached) == pytest.approx(dev_kl(plain), abs=1e-4)
    one, other = weights(cached), weights(plain)
    assert all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-4) for name in other)
    shards = [name for name in features(cached.parent / "traces" / "features") if name.endswith(".safetensors")]
    assert len(shards) == 6, "one a trace shard"


def test_a_sweep_takes_what_is_there_and_each_head_has_the_bits_of_the_head_alone(cached, train, tmp_path):
    before = features(cached.parent / "traces" / "features")
    where = tmp_path / "elsewhere"
    shutil.copytree(cached.parent / "traces" / "features", where)
    stamps = {path: path.stat().st_mtime_ns for path in where.rglob("*")}
    sweep = train(tmp_path / "sweep", "--cache", where, "--depth", "[0,2]", "--w_rej", "[1,6]", "--workers", 1)
    assert features(where) == before and {path: path.stat().st_mtime_ns for path in where.rglob("*")} == stamps
    depth = json.loads((cached / "config.json").read_text())["depth"]
    alone, among = weights(cached), weights(sweep / f"depth{depth}-w_rej1")
    assert set(alone) == set(among) and all(torch.equal(alone[name], among[name]) for name in alone)
    assert not torch.equal(among["output.weight"], weights(sweep / f"depth{depth}-w_rej6")["output.weight"])


def test_token_mixing_has_nothing_to_cache(arguments, run_warm, tmp_path):
    done = run_warm(*arguments(tmp_path / "head", "--cache", tmp_path / "cache", "--packing", "mixing"))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--cache: token mixing draws its masks anew each epoch" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_write_the_same_features_and_train_the_same_head(cached, arguments, run_launched, tmp_path):
    done = run_launched(*arguments(tmp_path / "head", "--cache", tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert features(tmp_path / "cache") == features(cached.parent / "traces" / "features")
    one, other = weights(cached), weights(tmp_path / "head")
    assert all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in one)


@pytest.mark.slow
def test_a_run_killed_in_the_cache_and_in_training_gives_the_undisturbed_runs_very_bits(
    arguments, console_script, cli_environment, train, tmp_path
):
    where, out = tmp_path / "cache", tmp_path / "head"
    long = ("--epochs", 60, "--checkpoint_every", 7)
    undisturbed = train(tmp_path / "undisturbed", "--cache", tmp_path / "other", *long)
    for ready in (
        lambda: len(list(where.rglob("*.safetensors"))) >= 1,
        lambda: len(list(where.rglob("*.safetensors"))) >= 4,
        lambda: (tmp_path / "head-run" / "last.ckpt").exists(),
    ):
        start_and_kill([console_script, *arguments(out, "--cache", where, *long)], cli_environment, ready)
        assert not out.exists(), "it was killed too late to prove anything"
    train(out, "--cache", where, *long)
    assert features(where) == features(tmp_path / "other")
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
