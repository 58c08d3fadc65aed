"""SIGTERM and Ctrl-C: every verb stops soon, says how to go on, and the rerun ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from accept_head.command.stopping import Stopped, stopping_on_signals
from tests.integration.folders import content, the_same

SOON = 10  # seconds
CODES = {"SIGTERM": 143, "SIGINT": 130}


@pytest.fixture(scope="module")
def verbs(random_pair_folder):
    """verb → its command line in a folder that holds traces."""
    pair = ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft")
    prompts = ("--prompts", random_pair_folder / "prompts" / "train.jsonl")
    sizes = ("--batch_size", 4, "--micro_batch_size", 4, "--epochs", 40, "--checkpoint_every", 5)
    return {
        "collect": lambda folder: [
            *("collect", *pair, *prompts, "--out", folder / "new", "--max_new_tokens", 60, "--batch_size", 2),
            *("--shard_size", 2, "--max_prompts", 10),
        ],
        "train": lambda folder: [
            *("train", "--traces", folder / "traces", *pair[2:], "--out", folder / "head", *sizes)
        ],
        "tune": lambda folder: [
            *("tune", "--traces", folder / "traces", *pair, "--t_draft", 1, "--t_target", 5),
            *("--out", folder / "tuned.json", "--rules", "max-prob", "entropy"),
        ],
        "generate": lambda folder: [
            *("generate", *pair, *prompts, "--out", folder / "out.jsonl", "--max_new_tokens", 80),
            *("--policy", "fixed:2", "--batch_size", 1),
        ],
        "bench": lambda folder: [
            *("bench", *pair, *prompts, "--out", folder / "bench.json", "--max_new_tokens", 80),
            *("--policy", "fixed:2", "--fixed", 1),
        ],
    }  # fmt: skip


@pytest.fixture
def folder(random_traces_folder, tmp_path):
    shutil.copytree(random_traces_folder, tmp_path / "run" / "traces")
    return tmp_path / "run"


@pytest.fixture
def stopped(verbs, console_script, cli_environment):
    """stopped(verb, folder, signal, seconds) runs the verb and sends the signal then → (exit code, stderr)."""

    def run(verb, folder, name, seconds):
        words = [console_script, *map(str, verbs[verb](folder))]
        process = subprocess.Popen(
            words, env=cli_environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        time.sleep(seconds)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=SOON)
        return process.returncode, err

    return run


def check_stopped(verb, code, err, name):
    assert code == CODES[name], err
    assert "bug" not in err, err
    (line,) = (line for line in err.splitlines() if line.startswith("accept-head: "))
    assert f"stopped by {name}" in line


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("collect", "SIGTERM"),
        ("train", "SIGTERM"),
        ("generate", "SIGINT"),
        *(pytest.param(verb, "SIGTERM", marks=pytest.mark.slow) for verb in ("tune", "generate", "bench")),
        *(pytest.param(verb, "SIGINT", marks=pytest.mark.slow) for verb in ("collect", "train", "tune", "bench")),
    ],
)
def test_a_verb_stops_soon_and_says_how_to_go_on(verb, name, stopped, folder):
    code, err = stopped(verb, folder, name, 1.0 if verb == "tune" else 4.0)  # tune is done soon
    check_stopped(verb, code, err, name)
    assert not [path for path in content(folder) if path.endswith(".partial")]


def test_sigterm_ends_a_program_that_calls_collect(random_pair_folder, cli_environment, tmp_path):
    """Lightning takes the signal in a predict run, and goes on."""
    program = f"""
from accept_head.training.collect.verb import collect

folder = {str(random_pair_folder)!r}
prompts = folder + "/prompts/train.jsonl"
collect(folder + "/target", folder + "/draft", prompts=prompts, out={str(tmp_path / "out")!r}, shard_size=1,
        batch_size=1, max_new_tokens=100)
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=cli_environment, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/shard-*.parquet")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SOON)
    assert process.returncode == CODES["SIGTERM"], err
    assert len(list(tmp_path.glob("out/shard-*.parquet"))) < 24


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "stops"), [("collect", 20), ("train", 20), ("generate", 3)])
def test_the_rerun_after_stops_at_random_moments_ends_with_the_same_bits(
    verb, stops, verbs, stopped, folder, run_cli, random_traces_folder, tmp_path
):
    shutil.copytree(folder, tmp_path / "undisturbed")
    began = time.monotonic()
    done = run_cli(*verbs[verb](tmp_path / "undisturbed"))
    assert done.returncode == 0, done.stderr
    longest, moments = time.monotonic() - began, random.Random(0)
    for _ in range(stops):
        code, err = stopped(verb, folder, "SIGTERM", moments.uniform(0, longest))
        assert code in (0, 143, -signal.SIGTERM), err  # the last: before the first line of ours has run
        if code == 0:  # it was done before the signal came
            assert the_same(content(folder), content(tmp_path / "undisturbed"))
            shutil.rmtree(folder)
            shutil.copytree(random_traces_folder, folder / "traces")
    assert run_cli(*verbs[verb](folder)).returncode == 0
    assert the_same(content(folder), content(tmp_path / "undisturbed"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_swallows_stops_as_well(capfd):
    class Careless:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped) as caught, stopping_on_signals("train"):
        careless = Careless()
        del careless
        threading.enumerate()[-1].cancel()  # or it would end the tests
    assert caught.value.exit_code == 143
    assert "stopped by SIGTERM: checkpoints are kept" in capfd.readouterr().err


def test_a_stop_that_a_library_takes_for_its_own_error_stops_as_well(capfd):
    """As scipy does when it is stopped while it is imported: it tries the import anew, and that fails."""
    with pytest.raises(Stopped) as caught, stopping_on_signals("train"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            threading.enumerate()[-1].cancel()
            raise ImportError("already registered") from None
    assert caught.value.exit_code == 143
    assert "stopped by SIGTERM: checkpoints are kept" in capfd.readouterr().err


def test_a_stopped_process_is_not_dismantled():
    """What is registered for its end happens, and what it has printed is written. But nothing that Python would do to
    its modules, as a library that was stopped halfway may then crash."""
    program = """
import atexit, sys
from accept_head.command.stopping import leave
class Fragile:
    def __del__(self):
        print("dismantled")
fragile, _ = Fragile(), atexit.register(print, "ended", end="")
print("begun,", end=" ")
"""
    for last, printed in (("leave(143)", "begun, ended"), ("sys.exit(143)", "begun, endeddismantled\n")):
        done = subprocess.run([sys.executable, "-c", program + last], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (143, printed), done.stderr
