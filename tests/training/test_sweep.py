"""`accept-head train` with lists: one run, a folder for each head, each equal to the bit to the head trained alone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import start_and_kill

DEPTHS, WEIGHTS = "[0,2,4]", "[1,6]"
NAMES = {f"depth{depth}-w_rej{weight}" for depth in (0, 2, 4) for weight in (1, 6)}
SOME = [(0, 6), (2, 1), (4, 6)]
# The last epoch's residuals, although they do not pay on a random pair.
SHORT = ("--batch_size", 8, "--micro_batch_size", 4, "--epochs", 3, "--keep", "last")
SWEEP = ("--depth", DEPTHS, "--w_rej", WEIGHTS)


@pytest.fixture(scope="module")
def arguments(random_traces_folder, random_pair_folder):
    def make(out, *more):
        draft = random_pair_folder / "draft"
        return ["train", "--traces", random_traces_folder, "--draft", draft, "--out", out, "--lr", 0.01, *more]

    return make


@pytest.fixture(scope="module")
def train(arguments, run_warm):
    def run(out, *more):
        done = run_warm(*arguments(out, *more))
        assert done.returncode == 0, done.stderr
        return out

    return run


@pytest.fixture(scope="module")
def sweep(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("sweep") / "heads", *SHORT, *SWEEP)


def name_of(depth, weight):
    return f"depth{depth}-w_rej{weight}"


def run_folder(out):
    return out.with_name(f"{out.name}-run")


def read(folder, name):
    return json.loads((folder / name).read_text())


def bits(head):
    return (head / "model.safetensors").read_bytes()


def assert_same_head(one, other):
    """Every file, to the last digit; in the card, too, there is nothing of where a head was trained."""
    assert bits(one) == bits(other)
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        if path.suffix == ".json":
            assert read(one, path.name) == read(other, path.name), path.name


def test_a_sweep_is_a_folder_of_heads_with_a_printed_line_each(sweep, arguments, run_warm):
    assert {path.name for path in sweep.iterdir()} == NAMES
    done = run_warm(*arguments(sweep, *SHORT, *SWEEP))  # again: nothing to do but to print
    assert done.returncode == 0, done.stderr
    assert all(sum(name in line for line in done.stdout.splitlines()) == 1 for name in NAMES)
    for depth, weight in SOME:
        head = sweep / name_of(depth, weight)
        assert read(head, "config.json")["depth"] == depth
        settings = read(head, "training_config.json")
        assert (settings["depth"], settings["w_rej"]) == (depth, weight)


@pytest.mark.parametrize(("depth", "weight"), SOME)
def test_each_head_is_the_one_trained_alone(sweep, train, tmp_path, depth, weight):
    """Two micro-batches a step."""
    alone = train(tmp_path / "head", *SHORT, "--depth", depth, "--w_rej", weight)
    assert_same_head(sweep / name_of(depth, weight), alone)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--recipe", "specdecpp", "--predicts", "both"), id="mixing, both predictions"),
        pytest.param(("--precision", "bf16"), id="bf16", marks=pytest.mark.slow),
        pytest.param(("--packing", "exact", "--workers", 1), id="exact, a worker", marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_train_sweep_as_well(train, tmp_path, options):
    heads = train(tmp_path / "heads", *SHORT, *options, "--depth", "[1,3]", "--w_rej", 3)
    assert {path.name for path in heads.iterdir()} == {"depth1-w_rej3", "depth3-w_rej3"}
    assert_same_head(heads / "depth3-w_rej3", train(tmp_path / "head", *SHORT, *options, "--depth", 3, "--w_rej", 3))


@pytest.mark.slow  # two processes are in test_train.py as well
def test_two_processes_train_the_same_sweep(sweep, arguments, run_launched, tmp_path):
    done = run_launched(*arguments(tmp_path / "heads", *SHORT, *SWEEP))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "heads").iterdir()} == NAMES
    for name in NAMES:
        one, two = (load_file(folder / name / "model.safetensors") for folder in (sweep, tmp_path / "heads"))
        assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-5) for key in one)
        kls = [read(folder / name, "metrics.json")["train"]["token"] for folder in (sweep, tmp_path / "heads")]
        assert kls[0] == pytest.approx(kls[1], rel=1e-3)


# --- kill and resume ------------------------------------------------------------------------------------------------

LONG = ("--batch_size", 4, "--micro_batch_size", 2, "--epochs", 30, "--checkpoint_every", 7, *SWEEP)


@pytest.fixture(scope="module")
def killed(arguments, console_script, cli_environment, tmp_path_factory):
    """The run folder of a sweep that was killed with SIGKILL after its first checkpoint."""
    out = tmp_path_factory.mktemp("sweep") / "heads"
    start_and_kill([console_script, *arguments(out, *LONG)], cli_environment, (run_folder(out) / "last.ckpt").exists)
    assert not out.exists(), "it was killed too late to prove anything"
    return run_folder(out)


@pytest.fixture
def interrupted(killed, tmp_path):
    shutil.copytree(killed, tmp_path / "heads-run")
    return tmp_path / "heads"


@pytest.mark.slow
def test_a_rerun_after_kill_9_gives_the_undisturbed_sweep_and_the_heads_trained_alone(interrupted, train, tmp_path):
    undisturbed = train(tmp_path / "undisturbed", *LONG)
    resumed = train(interrupted, *LONG)
    for name in NAMES:
        assert_same_head(resumed / name, undisturbed / name)
    alone = train(tmp_path / "alone", *LONG[:-4], "--depth", 2, "--w_rej", 6)
    assert_same_head(resumed / name_of(2, 6), alone)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--depth", "[0,2]", *SWEEP[2:]), "depth"),
        (("--depth", "[2,0,4]", *SWEEP[2:]), "depth"),
        (("--depth", 2, "--w_rej", 6), "depth"),
        ((*SWEEP[:2], "--w_rej", "[1,7]"), "w_rej"),
    ],
)
def test_an_interrupted_sweep_is_not_continued_with_other_heads(interrupted, arguments, run_warm, changed, named):
    done = run_warm(*arguments(interrupted, *LONG[:-4], *changed))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(interrupted) in done.stderr and f"another {named}" in done.stderr
    assert not interrupted.exists()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--depth", "[]"), ["--depth", "empty"]),
        (("--w_rej", "[]"), ["--w_rej", "empty"]),
        (("--depth", "[1,2,1]"), ["--depth", "1 twice"]),
        (("--w_rej", "[3,3.0]"), ["--w_rej", "3.0 twice"]),
        (("--depth", "[1,5]"), ["depth is 5"]),
        (("--w_rej", "[1,-1]"), ["w_rej is -1"]),
        (("--depth", "[1,deep]"), ["depth"]),
    ],
)
def test_a_list_that_is_no_sweep_leaves_one_line_and_nothing_else(arguments, run_warm, tmp_path, options, said):
    done = run_warm(*arguments(tmp_path / "heads", *SHORT, *options))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in said), line
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_anything_else_is_not_replaced(sweep, train, arguments, run_warm, tmp_path):
    shutil.copytree(sweep, tmp_path / "heads")
    (tmp_path / "heads" / "notes.txt").write_text("mine")
    done = run_warm(*arguments(tmp_path / "heads", *SHORT, *SWEEP))
    assert done.returncode == 2 and str(tmp_path / "heads") in done.stderr
    assert (tmp_path / "heads" / "notes.txt").read_text() == "mine"
    done = run_warm(*arguments(sweep / name_of(2, 6), *SHORT, *SWEEP))
    assert done.returncode == 2, "a sweep replaced a head"
    done = run_warm(*arguments(sweep, *SHORT, "--depth", 2))
    assert done.returncode == 2, "a head replaced a sweep"


def test_the_head_whose_loss_is_not_finite_is_named_and_none_is_saved(arguments, run_warm, tmp_path):
    done = run_warm(*arguments(tmp_path / "heads", *SHORT, "--w_rej", "[1,3e38]"))
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("accept-head"))
    assert "head depth2-w_rej3e+38: the loss is" in line and "step 0" in line
    assert not (tmp_path / "heads").exists() and not (run_folder(tmp_path / "heads") / "last.ckpt").exists()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--workers", 1), id="fp32, a worker"),
        pytest.param(("--precision", "bf16"), id="bf16", marks=pytest.mark.slow),
        pytest.param(("--cache", "features"), id="cache", marks=pytest.mark.slow),
    ],
)
def test_threads_change_no_bit(train, tmp_path, options):
    """One that reads ahead and two that heads learn on, or three of these where the draft's states are kept; and the
    same metrics, of training and of dev."""
    options = [tmp_path / word if word == "features" else word for word in options]
    one, three = (train(tmp_path / str(count), *SHORT, *SWEEP, *options, "--threads", count) for count in (1, 3))
    for name in NAMES:
        assert_same_head(one / name, three / name)


def test_another_number_of_threads_is_the_same_run(train, arguments, run_warm, tmp_path):
    whole = train(tmp_path / "whole", *SHORT, *SWEEP, "--threads", 1)
    again = run_warm(*arguments(whole, *SHORT, *SWEEP, "--threads", 2))
    assert again.returncode == 0, again.stderr
    refused = run_warm(*arguments(tmp_path / "refused", *SHORT, *SWEEP, "--threads", 0))
    assert refused.returncode == 2
    assert "threads is 0, expected a number from 1 on, or auto" in refused.stderr
    assert not list(tmp_path.glob("refused*"))
