"""`accept-head train` on a random pair's traces gives the same head when killed, resumed or divided over processes."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from accept_head.base import base_functions
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import write_shard
from accept_head.training.learn.progress import EpochProgress
from accept_head.training.learn.recipe import DECAYS, RECIPES
from tests.runs import start_and_kill

TRACES = 24  # of which split_dev keeps some for evaluation


@pytest.fixture(scope="module")
def arguments(random_traces_folder, random_pair_folder):
    def make(out, *more):
        draft = random_pair_folder / "draft"
        # keep: on so little text of a random pair a residual does not pay, and dev traces would leave the base alone.
        settings = ["--lr", 0.01, "--keep", "last"]
        return ["train", "--traces", random_traces_folder, "--draft", draft, "--out", out, *settings, *more]

    return make


@pytest.fixture(scope="module")
def train(arguments, run_warm):
    """Trains in one process and returns the head's folder."""

    def run(out, *more):
        done = run_warm(*arguments(out, *more))
        assert done.returncode == 0, done.stderr
        return out

    return run


def weights(head):
    return load_file(head / "model.safetensors")


def metrics(head):
    return json.loads((head / "metrics.json").read_text())


def run_folder(head):
    return head.with_name(f"{head.name}-run")


def are_close(one, other, rtol=1e-4, atol=1e-5):
    assert set(one) == set(other)
    return all(torch.allclose(one[name], other[name], rtol=rtol, atol=atol) for name in one)


# --- what a run leaves behind ---------------------------------------------------------------------------------------

SHORT = ("--batch_size", 8, "--micro_batch_size", 4, "--epochs", 4)


@pytest.fixture(scope="module")
def head(train, tmp_path_factory):
    """A head trained by one process."""
    return train(tmp_path_factory.mktemp("train") / "head", *SHORT, "--checkpoint_every", 2)


def test_head_folder_holds_weights_config_metrics_settings_and_a_card(head, random_traces_folder, random_pair_folder):
    assert {path.name for path in head.iterdir()} == {
        "README.md",
        "config.json",
        "metrics.json",
        "model.safetensors",
        "trace_config.json",
        "training_config.json",
    }
    config = json.loads((head / "config.json").read_text())
    assert (config["hidden_size"], config["depth"], config["predicts"]) == (16, RECIPES["default"].depth, "token")
    assert config["signals"] == ["draft_logprob", "draft_entropy", "draft_max_prob"]
    assert (head / "trace_config.json").read_bytes() == (random_traces_folder / "trace_config.json").read_bytes()
    settings = json.loads((head / "training_config.json").read_text())
    assert (settings["recipe"], settings["lr"], settings["seed"]) == ("default", 0.01, 0)
    assert settings["packing"] == RECIPES["default"].packing != "mixing"
    assert settings["alternatives"] == 4, "all that the traces have"
    assert str(random_pair_folder / "draft") in (head / "README.md").read_text()
    measured = metrics(head)
    assert measured["train_traces"] + measured["dev_traces"] == TRACES
    assert measured["steps"] == 4 * (measured["train_traces"] // 8)
    names = {"count", "binary_kl", "constant_kl", "brier", "ece", "auroc", "mean_predicted", "mean_observed"}
    assert set(measured["dev"]) == {"token"} and set(measured["dev"]["token"]) == names
    assert set(measured["train"]) == {"token"} and set(measured["train"]["token"]) == {"count", "binary_kl"}


def test_alternatives_are_learnt_of_beside_the_drawn_tokens_unless_told_not_to(head, train, tmp_path):
    plain = train(tmp_path / "plain", *SHORT, "--alternatives", 0)
    drawn = metrics(plain)["train"]["token"]["count"]
    assert metrics(head)["train"]["token"]["count"] == 5 * drawn
    assert metrics(head)["dev"]["token"]["count"] == metrics(plain)["dev"]["token"]["count"], "dev judges drawn tokens"
    assert not are_close(weights(head), weights(plain), rtol=1e-2, atol=1e-3)


def test_a_folder_without_alternatives_is_named_when_others_go_unused(
    collect, run_warm, random_traces_folder, random_pair_folder, tmp_path
):
    bare = collect(
        random_pair_folder, tmp_path / "bare", max_new_tokens=12, batch_size=4, shard_size=4, seed=1, alternatives=0
    )
    words = ["train", "--draft", random_pair_folder / "draft", *SHORT, "--lr", 0.01]
    both = run_warm(*words, "--traces", f"[{random_traces_folder},{bare}]", "--out", tmp_path / "head")
    assert both.returncode == 0, both.stderr
    assert f"{bare} has 0 alternatives to each token, so of the other traces no more are used" in both.stdout
    assert json.loads((tmp_path / "head" / "training_config.json").read_text())["alternatives"] == 0
    for more in (("--traces", bare), ("--traces", random_traces_folder), ("--traces", bare, "--recipe", "specdecpp")):
        quiet = run_warm(*words, *more, "--out", tmp_path / f"{len(more)}-{more[1].name}")
        assert quiet.returncode == 0 and "alternatives" not in quiet.stdout, quiet.stderr


def test_weights_are_float32_and_learned(head):
    learned = weights(head)
    assert {tensor.dtype for tensor in learned.values()} == {torch.float32}
    assert all(tensor.abs().max() > 0 for tensor in learned.values())  # blocks start at zero


def test_checkpoint_holds_the_head_and_not_the_draft(head, random_pair_folder):
    path = run_folder(head) / "last.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    assert state.pop("train_sums").shape == (1, 2)
    assert {name: tensor.shape for name, tensor in state.items()} == {
        f"heads.0.{name}": tensor.shape for name, tensor in weights(head).items()
    }
    values = sum(tensor.numel() for tensor in state.values())
    draft = sum(t.numel() for t in load_file(random_pair_folder / "draft" / "model.safetensors").values())
    # Weights and Adam's two moments, and some bookkeeping: no room for the draft.
    assert path.stat().st_size < 3 * 4 * values + 20_000 < 4 * draft


def test_csv_and_tensorboard_logs_exist(head):
    with (run_folder(head) / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    kls = [row["dev_token_binary_kl"] for row in rows if row["dev_token_binary_kl"]]
    assert len(kls) >= 4, "dev quality is logged each epoch"
    assert float(kls[-1]) == pytest.approx(metrics(head)["dev"]["token"]["binary_kl"], rel=1e-6)
    assert any(path.stat().st_size for path in (run_folder(head) / "tensorboard").glob("events.out.tfevents.*"))


def test_a_log_names_the_epochs_of_the_run(arguments, run_warm, tmp_path):
    done = run_warm(*arguments(tmp_path / "head", *SHORT))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("train: ")]
    assert lines[0].startswith("train: epoch 1/4, 0/") and lines[-1].startswith("train: epoch 4/4, ")
    assert " 00:00 left" in lines[-1]


@pytest.mark.parametrize(("step", "epoch"), [(0, "1/4"), (9, "1/4"), (10, "2/4"), (39, "4/4"), (40, "4/4")])
def test_the_bar_names_the_epochs_of_the_run(step, epoch):
    bar = EpochProgress(steps_per_epoch=10, epochs=4)
    bar._trainer = SimpleNamespace(global_step=step)
    assert bar._get_train_description(0).split() == ["Epoch", epoch]


def test_training_loss_is_logged(train, tmp_path):
    """Every tenth step, so a run of more steps than that."""
    head = train(tmp_path / "head", "--batch_size", 4, "--micro_batch_size", 4, "--epochs", 24)
    with (run_folder(head) / "csv" / "version_0" / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    half = len(losses) // 2
    assert half >= 3
    assert sum(losses[-half:]) < sum(losses[:half])


def test_signals_are_normalised_by_the_training_traces_alone(head, train, random_traces_folder, tmp_path):
    """Their functions, that is, which the base reads."""
    all_of_them = ("--dev_traces", random_traces_folder, "--alternatives", 0)
    of_all = train(tmp_path / "all", *SHORT[:4], "--epochs", 1, *all_of_them)
    config, of_some = (json.loads((folder / "config.json").read_text()) for folder in (of_all, head))
    rows = [row for path in random_traces_folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    signals = np.stack([np.concatenate([row[name] for row in rows]) for name in config["signals"]], axis=-1)
    functions = base_functions(torch.from_numpy(signals)).numpy()
    np.testing.assert_allclose(config["signal_mean"], functions.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(config["signal_std"], functions.std(0), rtol=1e-4, atol=1e-5)
    assert config["signal_mean"] != of_some["signal_mean"], "held-out traces were counted too"


# --- base and residual ----------------------------------------------------------------------------------------------


def test_a_residual_that_does_not_pay_is_left_out(arguments, run_warm, tmp_path):
    """Steps that are too large learn nothing of use: the base is what remains, as the recipe `signals` fits it."""
    words = arguments(tmp_path / "head", *SHORT, "--keep", "best")
    done = run_warm(*words, "--lr", 10)
    assert done.returncode == 0, done.stderr
    assert "the base alone" in done.stdout
    folder = tmp_path / "alone"
    where = words[: words.index("--out")]
    signals = run_warm(*where, "--out", folder, "--recipe", "signals")
    assert signals.returncode == 0, signals.stderr
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "head" / "model.safetensors").read_bytes()
    assert metrics(folder)["dev"] == metrics(folder)["base"] == metrics(tmp_path / "head")["dev"]
    assert not run_folder(folder).exists(), "there is nothing to go on with"


def test_a_residual_that_pays_is_that_of_its_best_epoch(arguments, run_warm, random_traces_folder, tmp_path):
    """Judged on what it learns from, it pays."""
    more = ("--keep", "best", "--dev_traces", random_traces_folder, "--lr", 0.03)
    done = run_warm(*arguments(tmp_path / "head", *SHORT[:4], "--epochs", 12, *more))
    assert done.returncode == 0, done.stderr
    found = metrics(tmp_path / "head")
    assert "base and residual" in done.stdout and "output.weight" in weights(tmp_path / "head")
    assert found["dev"]["token"]["binary_kl"] < found["base"]["token"]["binary_kl"]
    with (run_folder(tmp_path / "head") / "csv" / "version_0" / "metrics.csv").open() as file:
        of_all = [row for row in csv.DictReader(file)]
    names = [name for name in of_all[0] if name.startswith("dev_token_binary_kl")]
    of = {name: min(float(row[name]) for row in of_all if row[name]) for name in names}
    strong, weak = (of[f"dev_token_binary_kl/decay{decay:g}"] for decay in DECAYS)
    assert found["dev"]["token"]["binary_kl"] == pytest.approx(weak if weak < 0.99 * strong else strong, rel=1e-6)
    taken = json.loads((tmp_path / "head" / "training_config.json").read_text())["decay"]
    assert taken == DECAYS[weak < 0.99 * strong]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--depth", 2), "depth is 2"),
        (("--epochs", 3), "epochs is 3"),
        (("--predicts", "next"), "predicts is 'next'"),
        (("--signals", "false"), "signals is False"),
    ],
)
def test_what_a_base_alone_does_not_have_is_refused(arguments, run_warm, tmp_path, words, named):
    where = arguments(tmp_path / "head")
    done = run_warm(*where[: where.index("--lr")], "--recipe", "signals", *words)
    assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "head").exists()


# --- more processes -------------------------------------------------------------------------------------------------


def test_two_processes_under_accelerate_launch_train_the_same_head(head, arguments, run_launched, tmp_path):
    done = run_launched(*arguments(tmp_path / "two", *SHORT))
    assert done.returncode == 0, done.stderr
    assert are_close(weights(tmp_path / "two"), weights(head))
    one, two = metrics(head), metrics(tmp_path / "two")
    assert two["dev"]["token"] == pytest.approx(one["dev"]["token"], rel=1e-3, abs=1e-4)
    assert two["train"]["token"] == pytest.approx(one["train"]["token"], rel=1e-3)
    counts = ("train_traces", "dev_traces", "steps")
    assert [two[name] for name in counts] == [one[name] for name in counts]


def test_micro_batches_do_not_change_the_head(head, train, tmp_path):
    assert are_close(weights(train(tmp_path / "head", *SHORT[:2], "--micro_batch_size", 1, *SHORT[4:])), weights(head))


# --- kill and resume ------------------------------------------------------------------------------------------------

LONG = ("--batch_size", 4, "--micro_batch_size", 2, "--epochs", 30, "--checkpoint_every", 7)


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("train") / "undisturbed", *LONG)


@pytest.fixture(scope="module")
def killed(arguments, console_script, cli_environment, tmp_path_factory):
    """The run folder of a run that was killed with SIGKILL after its first checkpoint."""
    out = tmp_path_factory.mktemp("train") / "killed"
    checkpoint = run_folder(out) / "last.ckpt"
    start_and_kill([console_script, *arguments(out, *LONG)], cli_environment, checkpoint.exists)
    assert not out.exists(), "it was killed too late to prove anything"
    return run_folder(out)


@pytest.fixture
def interrupted(killed, tmp_path):
    """A head's folder-to-be with a copy of the killed run beside it."""
    shutil.copytree(killed, tmp_path / "head-run")
    return tmp_path / "head"


def step_of(checkpoint: Path) -> int:
    return torch.load(checkpoint, weights_only=True)["global_step"]


def test_a_rerun_after_kill_9_gives_the_undisturbed_runs_very_bits(interrupted, undisturbed, train):
    step = step_of(run_folder(interrupted) / "last.ckpt")
    assert 0 < step < metrics(undisturbed)["steps"] and step % 7 == 0
    resumed = train(interrupted, *LONG)
    assert (resumed / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert metrics(resumed) == metrics(undisturbed)


@pytest.mark.slow
def test_a_run_killed_twice_gives_the_undisturbed_runs_very_bits(
    undisturbed, arguments, console_script, cli_environment, train, tmp_path
):
    """The second kill comes as soon as the continued run has written a checkpoint of its own."""
    out = tmp_path / "head"
    checkpoint = run_folder(out) / "last.ckpt"
    command = [console_script, *arguments(out, *LONG)]
    start_and_kill(command, cli_environment, checkpoint.exists)
    before = checkpoint.stat().st_mtime_ns
    start_and_kill(command, cli_environment, lambda: checkpoint.stat().st_mtime_ns > before)
    assert not out.exists(), "it was killed too late to prove anything"
    assert (train(out, *LONG) / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_continued_run_replaces_its_last_checkpoint_even_in_a_moved_folder(interrupted, undisturbed, train):
    train(interrupted, *LONG)
    for head in (undisturbed, interrupted):
        assert [path.name for path in run_folder(head).glob("*.ckpt")] == ["last.ckpt"]
    one, other = (step_of(run_folder(head) / "last.ckpt") for head in (undisturbed, interrupted))
    assert one == other >= metrics(undisturbed)["steps"] - 7


def test_a_rerun_of_a_finished_run_gives_the_same_head(undisturbed, train, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "head")
    shutil.copytree(run_folder(undisturbed), tmp_path / "head-run")
    again = train(tmp_path / "head", *LONG)
    assert (again / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert metrics(again) == metrics(undisturbed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [(("--lr", 0.02), "lr"), (("--depth", 1), "depth"), (("--seed", 3), "seed"), (("--epochs", 5), "epochs")],
)
def test_an_interrupted_run_is_not_continued_with_another_setting(interrupted, arguments, run_warm, changed, named):
    done = run_warm(*arguments(interrupted, *LONG, *changed))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(interrupted) in done.stderr and named in done.stderr
    assert not interrupted.exists()


def test_an_interrupted_run_is_not_continued_on_other_traces_of_the_same_prompts(
    interrupted, random_pair_folder, collect, run_warm, tmp_path
):
    options = {"max_new_tokens": 12, "batch_size": 4, "shard_size": 4}
    other = collect(random_pair_folder, tmp_path / "traces", temperature=0.5, **options)
    out = ("--draft", random_pair_folder / "draft", "--out", interrupted)
    done = run_warm("train", "--traces", other, *out, "--lr", 0.01, *LONG)
    assert done.returncode == 2, "weights learned from other traces were taken over"
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("micro_batch_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rerun_with_other_micro_batches_gives_the_same_head_or_is_refused(
    interrupted, undisturbed, arguments, run_warm, micro_batch_size
):
    done = run_warm(*arguments(interrupted, *LONG, "--micro_batch_size", micro_batch_size))
    assert done.returncode in (0, 2), done.stderr
    if done.returncode == 0:
        assert metrics(interrupted)["steps"] == metrics(undisturbed)["steps"]
        assert are_close(weights(interrupted), weights(undisturbed), rtol=1e-3, atol=1e-3)


# --- several folders ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory, random_pair_folder, collect):
    """Two folders of the same prompts with other responses, and one that holds the records of both."""
    place = tmp_path_factory.mktemp("folders")
    options = {"max_new_tokens": 12, "batch_size": 4, "shard_size": 8}
    parts = [collect(random_pair_folder, place / name, seed=seed, **options) for seed, name in enumerate("ab")]
    rows = [row for part in parts for path in sorted(part.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    config = replace(TraceConfig.load(parts[0]), num_prompts=len(rows))
    (place / "both").mkdir()
    config.save(place / "both")
    for shard in range(config.num_shards):
        first = shard * config.shard_size
        records = [{**rows[row], "index": row} for row in range(first, first + config.shard_rows(shard))]
        write_shard(place / "both", shard, records)
    return (*parts, place / "both")


@pytest.fixture(scope="module")
def train_on(two_folders, random_pair_folder, run_warm):
    """Trains on these folders; the head's folder, or the one line that refuses."""

    def run(out, *folders, dev=two_folders[0], more=()):
        draft = ("--draft", random_pair_folder / "draft", "--out", out, "--lr", 0.01, *SHORT)
        more = (*more, "--dev_traces", dev) if dev else more
        done = run_warm("train", "--traces", *folders, *draft, *more)
        if done.returncode:
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            return done.stderr
        return out

    return run


def test_a_list_of_one_folder_trains_the_same_bits(head, arguments, run_warm, random_traces_folder, tmp_path):
    command = [
        "--traces",
        f"[{random_traces_folder}]",
        *arguments(tmp_path / "head", *SHORT, "--checkpoint_every", 2)[3:],
    ]
    done = run_warm("train", *command)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "config.json", "metrics.json", "trace_config.json", "training_config.json"):
        assert (tmp_path / "head" / name).read_bytes() == (head / name).read_bytes(), name
    recorded = [(folder / "run.json").read_bytes() for folder in (tmp_path / "head-run", run_folder(head))]
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("packing", [pytest.param("prefix", marks=pytest.mark.slow), "exact"])
def test_two_folders_train_the_head_of_one_folder_that_holds_both(two_folders, train_on, tmp_path, packing):
    a, b, both = two_folders
    more = ("--packing", packing, "--keep", "last")  # with its residual: the order of traces is nothing to a base
    heads = [train_on(tmp_path / str(n), *given, more=more) for n, given in enumerate(([a, b], [both], [a], [b, a]))]
    bits = [(head / "model.safetensors").read_bytes() for head in heads]
    assert bits[0] == bits[1]
    assert bits[0] not in bits[2:], "the comparison sees nothing"
    assert metrics(heads[0]) == metrics(heads[1])
    assert metrics(heads[0])["train_traces"] == 2 * TRACES


def test_what_was_used_is_recorded(two_folders, train_on, tmp_path):
    a, b, _ = two_folders
    head = train_on(tmp_path / "head", a, b, dev=None)
    assert (head / "trace_config.json").read_bytes() == (a / "trace_config.json").read_bytes()
    used = json.loads((head / "training_config.json").read_text())["traces"]
    assert [(part["folder"], part["seed"], part["num_prompts"]) for part in used] == [(str(a), 0, 24), (str(b), 1, 24)]
    assert len({part["fingerprint"] for part in used}) == 2 and len({part["prompts_fingerprint"] for part in used}) == 1
    assert [part["seed"] for part in json.loads((run_folder(head) / "run.json").read_text())["traces"]] == [0, 1]
    counts = metrics(head)
    assert counts["train_traces"] + counts["dev_traces"] == 2 * TRACES
    assert counts["dev_traces"] % 2 == 0, "the same prompts are held out of both"


def test_a_run_on_several_folders_is_not_continued_on_others(two_folders, train_on, tmp_path):
    a, b, both = two_folders
    head = train_on(tmp_path / "head", a, b)
    weights_before = (head / "model.safetensors").read_bytes()
    for folders in ([a], [b, a], [a, both], [both]):
        line = train_on(tmp_path / "head", *folders)
        assert isinstance(line, str) and "another traces" in line and str(head) in line, line
    assert train_on(tmp_path / "head", a, b) == head
    assert (head / "model.safetensors").read_bytes() == weights_before
    one = train_on(tmp_path / "one", a)
    assert "another traces" in str(train_on(one, a, b))


def test_folders_that_do_not_go_together_are_refused(two_folders, train_on, collect, random_pair_folder, tmp_path):
    a, b, _ = two_folders
    cold = collect(random_pair_folder, tmp_path / "cold", temperature=0.5, max_new_tokens=12, max_prompts=4)
    for folders, named in (
        ([a, a], [f"--traces {a}", "once"]),
        ([a, b, cold], [f"--traces {cold}", "temperature=0.5"]),
        ([a, tmp_path / "nowhere"], ["nowhere"]),
        (["[]"], ["--traces", "empty"]),
    ):
        line = train_on(tmp_path / "head", *folders, dev=None)
        assert all(words in str(line) for words in named), line
        assert not (tmp_path / "head").exists() and not (tmp_path / "head-run").exists()


# --- other ways to train --------------------------------------------------------------------------------------------


def test_bf16_runs_and_differs_a_little_from_fp32(head, train, tmp_path):
    rounded = train(tmp_path / "head", *SHORT, "--precision", "bf16")
    assert {tensor.dtype for tensor in weights(rounded).values()} == {torch.float32}
    assert not are_close(weights(rounded), weights(head), rtol=0, atol=0)
    kl, rounded_kl = (metrics(folder)["dev"]["token"]["binary_kl"] for folder in (head, rounded))
    assert rounded_kl == pytest.approx(kl, rel=0.2)


def test_specdecpp_recipe_with_both_predictions_and_dev_traces(
    random_traces_folder, arguments, train, run_warm, tmp_path
):
    options = ("--recipe", "specdecpp", "--predicts", "both", "--dev_traces", random_traces_folder, "--workers", 1)
    head = train(tmp_path / "head", *SHORT, *options)
    measured = metrics(head)
    assert set(measured["dev"]) == {"token", "next"}
    assert (measured["train_traces"], measured["dev_traces"]) == (TRACES, TRACES)
    assert weights(head)["output.weight"].shape == (2, 16)
    assert json.loads((head / "training_config.json").read_text())["w_rej"] == 6
