"""Full disks, read-only folders, damaged shards, dying ranks, clock jumps: one clear line, and work that continues.

benchmarks/faults.py, test_collect.py and test_train.py kill at random moments.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import tqdm.std

from accept_head.cli import main
from accept_head.trace.shards import read_traces, shard_path
from tests.integration.folders import content, the_same

SIZES = ("--max_new_tokens", 12, "--batch_size", 4, "--shard_size", 4)


@pytest.fixture(scope="module")
def pair(random_pair_folder):
    return ("--target", random_pair_folder / "target", "--draft", random_pair_folder / "draft")


@pytest.fixture(scope="module")
def collect_words(pair, random_pair_folder):
    return lambda out, *more: [
        *("collect", *pair, "--prompts", random_pair_folder / "prompts" / "train.jsonl", "--out", out, *SIZES, *more)
    ]


def the_line(done):
    """The one line that says what is wrong; progress bars aside."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("accept-head: error:"))
    return line


# --- a flipped bit, and --repair -------------------------------------------------------------------------------------


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.fixture
def traces(random_traces_folder, tmp_path):
    shutil.copytree(random_traces_folder, tmp_path / "traces")
    return tmp_path / "traces"


def test_repair_collects_damaged_and_missing_shards_again_and_leaves_the_others(
    traces, random_traces_folder, collect_words, run_warm
):
    flip(shard_path(traces, 1), 4000)
    flip(shard_path(traces, 4), 8 * shard_path(traces, 4).stat().st_size - 100)  # in what describes the pages
    shard_path(traces, 2).unlink()
    whole = [traces / "trace_config.json", *(shard_path(traces, shard) for shard in (0, 3, 5))]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in whole}

    unrepaired = run_warm(*collect_words(traces))
    assert unrepaired.returncode == 0 and shard_path(traces, 2).exists(), unrepaired.stderr
    refused = run_warm("train", "--traces", traces, "--draft", collect_words(traces)[4], "--out", traces / "head")
    line = the_line(refused)
    assert str(shard_path(traces, 1)) in line and "checksum" in line and "--repair" in line

    done = run_warm(*collect_words(traces, "--repair", "true"))
    assert done.returncode == 0, done.stderr
    assert "shard-00001" in done.stderr and "shard-00004" in done.stderr and "shard-00003" not in done.stderr
    assert content(traces) == content(random_traces_folder)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in whole} == before


def test_repair_of_whole_traces_changes_nothing(traces, collect_words, run_warm):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in traces.iterdir()}
    done = run_warm(*collect_words(traces, "--repair", "true"))
    assert done.returncode == 0 and "again" not in done.stderr, done.stderr
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in traces.iterdir()} == before


def test_shards_from_before_checksums_are_read_and_not_collected_again(traces, collect_words, run_warm):
    """As other programs write them, too. The shipped pair's traces under runs/ are such."""
    config, expected = read_traces(traces)
    expected, fingerprint = expected.to_dict(), config.fingerprint()
    for path in traces.glob("*.parquet"):
        pq.write_table(pq.read_table(path), path, write_page_checksum=True)
        assert b"sha256" not in path.read_bytes()
    before = content(traces)
    config, found = read_traces(traces)
    assert found.to_dict() == expected and config.fingerprint() == fingerprint
    done = run_warm(*collect_words(traces, "--repair", "true"))
    assert done.returncode == 0 and content(traces) == before


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """disk(kib) makes a folder that holds so much; disk.resize(kib), or disk.resize(None) for a read-only one."""
    mounted = []

    def mount(kib):
        folder = tmp_path / "disk"
        folder.mkdir(exist_ok=True)
        if mounted:
            subprocess.run(["umount", mounted.pop()], check=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    def resize(kib):
        options = "remount,ro" if kib is None else f"remount,rw,size={kib}k"
        subprocess.run(["mount", "-o", options, mounted[0]], check=True)

    mount.resize = resize
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a small disk needs the right to mount one")
    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


ROOMY = 65536


@pytest.fixture
def verbs(pair, random_pair_folder, random_traces_folder, collect_words, tmp_path):
    """verb → (what it finds in its folder, its command line, whether all of its files must be the same each time)."""
    draft, prompts = pair[2:], ("--prompts", random_pair_folder / "prompts" / "train.jsonl")
    priced = ("--t_draft", 1, "--t_target", 5)

    def with_traces(folder):
        shutil.copytree(random_traces_folder, folder / "traces")

    return {
        "collect": (lambda folder: None, lambda folder: collect_words(folder / "traces")),
        "train": (
            lambda folder: None,
            lambda folder: [
                *("train", "--traces", random_traces_folder, *draft, "--out", folder / "head"),
                *("--batch_size", 4, "--micro_batch_size", 4, "--epochs", 6, "--checkpoint_every", 5),
            ],
        ),
        "tune": (
            with_traces,
            lambda folder: [
                *("tune", "--traces", folder / "traces", *pair, *priced, "--out", folder / "tuned.json"),
                *("--rules", "max-prob"),
            ],
        ),
        "report": (
            with_traces,
            lambda folder: [
                *("report", "--traces", folder / "traces", *draft, *priced, "--out", folder / "report.html")
            ],
        ),
        "generate": (
            lambda folder: None,
            lambda folder: [
                *("generate", *pair, *prompts, "--out", folder / "out.jsonl", "--max_new_tokens", 80),
                *("--policy", "fixed:2"),
            ],
        ),
    }


def used(folder):
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_bsize // 1024


SHARES = {
    "collect": (0.0, 0.5),
    "train": (0.05, 0.5, 0.95),
    "tune": (0.1, 0.9),
    "report": (0.3, 0.9),
    "generate": (0.6,),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", SHARES)
def test_a_full_disk_is_one_line_and_the_same_command_goes_on_once_there_is_room(verb, verbs, disk, run_warm):
    fill, words = verbs[verb]
    folder = disk(ROOMY)
    fill(folder)
    given = used(folder)
    done = run_warm(*words(folder))
    assert done.returncode == 0, done.stderr
    needed, undisturbed = used(folder) - given, content(folder)
    for share in SHARES[verb]:
        folder = disk(ROOMY)
        fill(folder)
        before = content(folder)
        disk.resize(used(folder) + max(4, int(share * needed) // 4 * 4))
        line = the_line(run_warm(*words(folder)))
        assert "No space left" in line, line
        made = content(folder)
        assert not [name for name in made if name.endswith(".partial")]
        visible = content(folder, hidden=False)
        changed = {name: data for name, data in visible.items() if data != before.get(name)}
        assert the_same(changed, {name: undisturbed[name] for name in changed}), "half a file was left"
        disk.resize(ROOMY)
        done = run_warm(*words(folder))
        assert done.returncode == 0, done.stderr
        assert the_same(content(folder), undisturbed)


def test_collect_on_a_full_disk_goes_on_once_there_is_room(collect_words, random_traces_folder, disk, run_warm):
    folder = disk(40)
    line = the_line(run_warm(*collect_words(folder / "traces")))
    assert "No space left" in line and str(folder) in line
    there = content(folder / "traces")
    assert 1 < len(there) < 7 and there.items() <= content(random_traces_folder).items()
    disk.resize(ROOMY)
    assert run_warm(*collect_words(folder / "traces")).returncode == 0
    assert content(folder / "traces") == content(random_traces_folder)


# --- a folder that cannot be written to ------------------------------------------------------------------------------


def test_collect_into_a_read_only_folder_is_one_line(collect_words, disk, run_warm):
    folder = disk(ROOMY)
    (folder / "traces").mkdir()
    disk.resize(None)
    for out in (folder / "traces", folder / "new"):
        line = the_line(run_warm(*collect_words(out)))
        assert f"--out {out}" in line and "Read-only" in line
    assert content(folder) == {}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "tune", "report", "generate"])
def test_a_read_only_folder_is_one_line_that_names_it(verb, verbs, disk, run_warm):
    fill, words = verbs[verb]
    folder = disk(ROOMY)
    fill(folder)
    before = content(folder)
    disk.resize(None)
    line = the_line(run_warm(*words(folder)))
    assert str(folder) in line and "--" in line and "Read-only" in line
    assert content(folder) == before


@pytest.mark.slow
def test_a_disk_that_others_fill_while_it_trains_is_one_line(verbs, disk, console_script, cli_environment):
    _, words = verbs["train"]
    folder = disk(ROOMY)
    command = [console_script, *map(str, words(folder)), "--epochs", "5000"]
    process = subprocess.Popen(command, env=cli_environment, stderr=subprocess.PIPE, text=True)
    wait_until((folder / "head-run" / "last.ckpt").exists, process)
    with (folder / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "Traceback" not in err and "No space left" in err, err
    assert not list(folder.rglob("*.partial"))


def test_traces_in_a_read_only_folder_can_be_trained_on(disk, random_traces_folder, pair, run_warm, tmp_path):
    folder = disk(ROOMY)
    shutil.copytree(random_traces_folder, folder / "traces")
    disk.resize(None)
    sizes = ("--batch_size", 8, "--epochs", 1)
    done = run_warm("train", "--traces", folder / "traces", *pair[2:], "--out", tmp_path / "head", *sizes)
    assert done.returncode == 0, done.stderr


# --- one rank dies ---------------------------------------------------------------------------------------------------


def wait_until(ready, process, seconds=240):
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "it ended before that"
        assert time.monotonic() < end
        time.sleep(0.01)


def ranks_of(process):
    """{rank: process} of those below a launcher."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            environment, words = child.environ(), child.cmdline()
        except psutil.Error:
            continue
        if "launch" not in words and {"collect", "train"} & set(words) and "python" in words[0]:
            found[int(environment.get("RANK", environment.get("LOCAL_RANK", 0)))] = child
    return found


def launcher(name):
    scripts = Path(sys.executable).parent
    if name == "accelerate":
        return [scripts / "accelerate", "launch", "--cpu", "--num_processes", "2"]
    return [scripts / "torchrun", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture
def start_ranks(cli_environment, tmp_path):
    """Starts a command line in two ranks; what they say goes to `err`. Nothing of them outlives the test."""
    started = []

    def start(name, words, program=("-m", "accept_head")):
        err = (tmp_path / "err").open("w")
        command = [str(word) for word in (*launcher(name), *program, *words)]
        started.append(subprocess.Popen(command, env=cli_environment, stdout=err, stderr=err, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def all_end(process, ranks, seconds=60):
    """Seconds until the launcher and all ranks are gone."""
    begin = time.monotonic()
    _, alive = psutil.wait_procs([*ranks.values()], timeout=seconds)
    for left in alive:
        left.kill()
    assert not alive, f"{len(alive)} ranks are still there after {seconds} seconds"
    process.wait(timeout=max(1.0, seconds - (time.monotonic() - begin)))
    return time.monotonic() - begin


@pytest.fixture
def long_runs(random_traces_folder, random_pair_folder, pair, collect_words, tmp_path):
    """verb → (command line of a run of minutes, whether it is at work)."""
    prompts = tmp_path / "many.jsonl"
    lines = (random_pair_folder / "prompts" / "train.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines * 400) + "\n")
    collect = [*collect_words(tmp_path / "traces"), "--prompts", prompts]
    train = ("train", "--traces", random_traces_folder, *pair[2:], "--out", tmp_path / "head", "--epochs", 5000)
    return {
        "collect": (collect, lambda: len(list((tmp_path / "traces").glob("shard-*"))) > 3),
        "train": ([*train, "--checkpoint_every", 5, "--batch_size", 8], (tmp_path / "head-run" / "last.ckpt").exists),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launched_by", "verb", "dying"),
    [("accelerate", "collect", 1), ("accelerate", "train", 0), ("torchrun", "collect", 0), ("torchrun", "train", 1)],
)
def test_when_a_rank_is_killed_the_others_end_within_a_minute_and_it_is_named(
    long_runs, start_ranks, tmp_path, launched_by, verb, dying
):
    words, at_work = long_runs[verb]
    process = start_ranks(launched_by, words)
    wait_until(at_work, process)
    ranks = ranks_of(process)
    assert sorted(ranks) == [0, 1]
    ranks[dying].send_signal(signal.SIGKILL)
    seconds = all_end(process, ranks)
    told = (tmp_path / "err").read_text()
    assert process.returncode != 0
    assert seconds < 60
    assert str(ranks[dying].pid) in told or f"rank: {dying}" in told or "SIGKILL" in told, told[-3000:]


# The console command, but for what one rank finds in its share of the data.
BAD_DATA = """
import os, sys
from accept_head import cli
from accept_head.errors import InputError
from accept_head.training.collect import collector
def refuse(*_):
    raise InputError("shard 1 has bad data")
if os.environ.get("LOCAL_RANK") == "1":
    collector.write_shard = refuse
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launched_by", ["accelerate", "torchrun"])
def test_when_a_rank_finds_bad_data_the_others_end_within_a_minute_and_its_line_is_shown(
    long_runs, start_ranks, tmp_path, launched_by
):
    words, _ = long_runs["collect"]
    script = tmp_path / "faulty.py"
    script.write_text(BAD_DATA)
    process = start_ranks(launched_by, words, program=[script])
    wait_until(lambda: len(ranks_of(process)) == 2, process)
    ranks = ranks_of(process)
    told = tmp_path / "err"
    wait_until(lambda: "bad data" in told.read_text(), process)
    all_end(process, ranks)
    assert process.returncode != 0
    lines = [line for line in told.read_text().splitlines() if line.startswith("accept-head: error:")]
    assert "accept-head: error: shard 1 has bad data" in lines and "report it" not in told.read_text()


# --- a clock that jumps ----------------------------------------------------------------------------------------------

# Preloaded into every process of the command: each time anything asks, the wall clock is an hour later or earlier than
# the last time. Clocks that only go forward are as ever.
JUMPING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static int calls;
static long jump(void) { return (++calls % 2) ? 3600 : -3600; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec, now->tv_usec = time.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory):
    """Environment of a process whose wall clock jumps."""
    if shutil.which("gcc") is None:
        pytest.skip("the clock that jumps is a C library, and there is no gcc")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "jumping.c").write_text(JUMPING)
    library = folder / "jumping.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, folder / "jumping.c", "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library)}
    times = "import time; a = [time.time() for _ in range(4)]; print([round(y - x) for x, y in zip(a, a[1:])])"
    done = subprocess.run(
        [sys.executable, "-c", times], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert sorted(set(json.loads(done.stdout))) == [-7200, 7200], "the clock does not jump"
    return environment


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["collect", "train", "tune", "generate"])
def test_a_clock_that_jumps_by_hours_changes_no_artefact(verb, verbs, jumping_clock, run_cli, tmp_path):
    fill, words = verbs[verb]
    made = []
    for name, environment in (("usual", None), ("jumping", jumping_clock)):
        folder = tmp_path / name / "work"
        folder.mkdir(parents=True)
        fill(folder)
        done = run_cli(*words(folder), env=environment)
        assert done.returncode == 0, done.stderr
        made.append(content(folder))
    assert the_same(*made)
    for path in tmp_path.rglob("stats.json"):
        assert 0 < json.loads(path.read_text())["seconds"] < 600


@pytest.mark.slow
def test_measured_times_do_not_see_a_clock_that_jumps(pair, random_pair_folder, jumping_clock, run_cli, tmp_path):
    prompts = ("--prompts", random_pair_folder / "prompts" / "train.jsonl", "--max_prompts", 4)
    words = ("bench", *pair, *prompts, "--policy", "none", "fixed:2", "--max_new_tokens", 16)
    done = run_cli(*words, "--out", tmp_path / "bench.json", env=jumping_clock)
    assert done.returncode == 0, done.stderr

    cells = json.loads((tmp_path / "bench.json").read_text())["cells"]
    seconds = [value for cell in cells for policy in cell["policies"] for value in policy["chunks"]["seconds"]]
    assert len(seconds) > 4 and all(0 < value < 600 for value in seconds)


@pytest.mark.parametrize("hour", [3600, -3600])
def test_a_clock_that_jumps_once_amid_collect_changes_no_trace(
    hour, collect_words, random_traces_folder, tmp_path, monkeypatch, capsys
):
    real, calls = time.time, itertools.count()

    def jumped():
        return real() + (hour if next(calls) > 20 else 0)

    monkeypatch.setattr(time, "time", jumped)
    monkeypatch.setattr(tqdm.std, "time", jumped)  # the bar is the one that shows speeds by the wall clock
    assert main([str(word) for word in collect_words(tmp_path / "traces")]) == 0
    assert next(calls) > 21, "nobody asked for the time after it had jumped"
    assert content(tmp_path / "traces") == content(random_traces_folder)
