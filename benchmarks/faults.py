"""What interruptions and damage do to collect, train, tune and publish on the embedded pair: nothing, or one line.

    python benchmarks/faults.py [--only collect train tune publish bits] [--kills 50]

Each part replaces its own figures in benchmarks/results/faults.json. collect, train, tune, publish: killed with SIGKILL
at random moments, also several times in a row, and just before random file operations; then run to the end, and every
file compared with those of an undisturbed run. bits: bits flipped in trace shards and what is stored beside them, and
`collect --repair true`. Full disks, read-only folders, dying ranks and clocks that jump are in
tests/integration/test_faults.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow.parquet as pq
from killed import Command, import_libraries, start, summary, torture, wait
from record import REPOSITORY, RESULTS, TINY, write_result

import accept_head
from accept_head.checksum import check_parquet, read_tensors
from accept_head.errors import InputError
from accept_head.files import read_json
from accept_head.trace.config import TraceConfig
from accept_head.trace.shards import check_shard, shard_path, write_shard

PAIR = ["--target", TINY / "target", "--draft", TINY / "draft"]
WRITE_KILLS, START_KILLS = 20, 3
SMALL = ("--max_prompts", 16, "--max_new_tokens", 12)
NOT_COMPARED = {
    "train": "logs: metrics.csv has a folder for each start, TensorBoard's events name times; and the checkpoint, a "
    "state on the way, which of a run that was continued is of the last step, of others of the last multiple of 5",
    "tune": "the field 'date' of tuned.json and decoding.json",
}


def collect_command(folder: str = "traces") -> Command:
    sizes = ["--max_prompts", 40, "--max_new_tokens", 24, "--batch_size", 4, "--shard_size", 4]
    prompts = ["--prompts", TINY / "prompts" / "train.jsonl"]
    return Command(
        verb="collect",
        arguments=["collect", *PAIR, *prompts, "--out", folder, *sizes],
        stage=lambda work: f"{len(list((work / folder).glob('shard-*'))):2} of 10 shards",
    )


def train_command(traces: Path) -> Command:
    sizes = ["--batch_size", 4, "--micro_batch_size", 4, "--epochs", 6, "--checkpoint_every", 5]

    def stage(work: Path) -> str:
        if (work / "head").exists():
            return "head written"
        return "checkpoint written" if (work / "head-run" / "last.ckpt").exists() else "before the first checkpoint"

    return Command(
        verb="train",
        arguments=["train", "--traces", traces, "--draft", TINY / "draft", "--out", "head", *sizes],
        stage=stage,
        ignored=("head-run/csv/*", "head-run/tensorboard/*", "head-run/last.ckpt"),
    )


def tune_command(traces: Path) -> Command:
    def prepare(work: Path) -> None:
        shutil.copytree(traces, work / "traces")
        shutil.copytree(TINY / "heads" / "sampled", work / "head")

    def stage(work: Path) -> str:
        rollouts, informed = (len(list((work / "traces" / n).glob("shard-*"))) for n in ("rollouts", "informed"))
        return (
            f"{rollouts:2} of 10 rollout files, {informed:2} of the bound" + ", tuned" * (work / "tuned.json").exists()
        )

    options = ["--t_draft", 0.001, "--t_target", 0.005, "--rules", "max-prob"]
    return Command(
        verb="tune",
        arguments=["tune", "--traces", "traces", *PAIR, "--head", "head", "--out", "tuned.json", *options],
        prepare=prepare,
        stage=stage,
        dated=("tuned.json", "head/decoding.json"),
    )


class Hub:
    """tests/hub_server.py in a process of its own: `reset` and `dump` are lines that it reads."""

    SERVE = """
import json, sys
from hub_server import HubServer, sha256
with HubServer() as hub:
    print(hub.endpoint, flush=True)
    for line in sys.stdin:
        if line.strip() == "reset":
            hub.repositories.clear(), hub.large.clear()
        held = {name: each.commits[each.branches["main"]] for name, each in hub.repositories.items()}
        files = {f"{name}/{path}": sha256(data) for name, tree in held.items() for path, data in tree.items()}
        print(json.dumps(files), flush=True)
"""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SERVE],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # clients that are killed break connections
            text=True,
        )
        self.endpoint = self._answer()

    def ask(self, line: str) -> dict[str, str]:
        """{path in a repository: checksum} of what it holds."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return dict(json.loads(self._answer()))

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def publish_command(place: Path) -> Command:
    hub = Hub()
    endpoint = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_writer", "NO_PROXY": "127.0.0.1"}
    endpoint |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(place / "home")}

    def prepare(work: Path) -> None:
        hub.ask("reset")
        shutil.copytree(TINY / "heads" / "sampled", work / "head")

    def before() -> None:  # read from the environment when it was imported, before this fork
        huggingface_hub.constants.ENDPOINT = hub.endpoint
        huggingface_hub.constants.HF_HUB_DISABLE_XET = True

    return Command(
        verb="publish",
        arguments=["publish", "head", "user/name"],
        prepare=prepare,
        stage=lambda work: ("not there", "being made", "published")[min(2, len(hub.ask("dump")))],
        environment=endpoint,
        before=before,
        elsewhere=lambda: hub.ask("dump"),
    )


def collected(place: Path, *sizes: Any) -> Path:
    """The traces that the other parts read."""
    place.mkdir(parents=True)
    command = collect_command()
    assert wait(start(command, place, *sizes)) == 0, place.with_suffix(".err").read_text()
    return place / "traces"


# --- flipped bits ----------------------------------------------------------------------------------------------------


def bits(place: Path) -> dict[str, Any]:
    traces = collected(place / "collected")
    config = TraceConfig.load(traces)
    tune = tune_command(traces)
    tune.prepare(place / "tuned")
    assert wait(start(tune, place / "tuned")) == 0, (place / "tuned.err").read_text()
    draw = random.Random(0)
    stored = place / "tuned" / "traces"
    return {
        "shard": _flip_shard(traces, config, draw),
        "rollouts": _flip_tensors(stored / "rollouts" / "shard-00003.safetensors", draw),
        "informed": _flip_tensors(stored / "informed" / "shard-00003.safetensors", draw),
        "repair": _repair(traces, draw),
    }


def _flip_shard(traces: Path, config: TraceConfig, draw: random.Random) -> dict[str, Any]:
    """Every bit of a shard; a sample also by way of what reads shards; and without the whole file's checksum."""
    path = shard_path(traces, 3)
    size = path.stat().st_size
    sealed = sum(_refused(path, bit, lambda: check_parquet(path)) for bit in range(8 * size))
    sample = draw.sample(range(8 * size), 1000)
    named = sum(_refused(path, bit, lambda: check_shard(traces, config, 3), "shard-00003.parquet") for bit in sample)
    records = pq.read_table(path).to_pylist()
    with tempfile.TemporaryDirectory() as other:
        bare = Path(other)
        write_shard(bare, 3, records)
        data = bare.joinpath("shard-00003.parquet").read_bytes()
        assert data == path.read_bytes()
        start_of_seal = data.rfind(b"accept-head sha256:")
        bare.joinpath("shard-00003.parquet").write_bytes(data[:start_of_seal] + data[start_of_seal + 19 + 64 :])
        sample = draw.sample(range(8 * (size - 83)), 1000)
        pages = sum(
            _refused(shard_path(bare, 3), bit, lambda: check_shard(bare, config, 3), "shard-00003.parquet")
            for bit in sample
        )
    return {
        "bits": 8 * size,
        "found": sealed,
        "sample_named_by_the_reader": f"{named} of 1000",
        "sample_found_without_the_file_checksum": f"{pages} of 1000",
    }


def _flip_tensors(path: Path, draw: random.Random) -> dict[str, Any]:
    """All bits of the header, and a sample of the rest."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flips = [*range(8 * header), *draw.sample(range(8 * header, 8 * path.stat().st_size), 1000)]
    found = sum(_refused(path, bit, lambda: read_tensors(path, names), path.name) for bit in flips)
    return {"bits": 8 * path.stat().st_size, "flipped": len(flips), "found": found}


def _refused(path: Path, bit: int, read: Callable[[], object], name: str = "") -> bool:
    with _flipped(path, bit):
        try:
            read()
        except InputError as error:
            return name in str(error)
        except ValueError:
            return not name
    return False


@contextmanager
def _flipped(path: Path, bit: int) -> Iterator[None]:
    _flip(path, bit)
    try:
        yield
    finally:
        _flip(path, bit)


def _flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def _repair(traces: Path, draw: random.Random) -> dict[str, Any]:
    """Two damaged shards and a missing one among ten: the same command with --repair true."""
    before = {path: path.read_bytes() for path in traces.iterdir()}
    for shard in (2, 7):
        path = shard_path(traces, shard)
        _flip(path, draw.randrange(8 * path.stat().st_size))
    shard_path(traces, 5).unlink()
    stats = {path: path.stat() for path in traces.iterdir()}
    command = collect_command()
    begin = time.monotonic()
    assert wait(start(command, traces.parent, "--repair", "true")) == 0
    seconds = time.monotonic() - begin
    told = traces.parent.with_suffix(".err").read_text()
    untouched = [
        path.name
        for path, old in stats.items()
        if (path.stat().st_mtime_ns, path.stat().st_ino) == (old.st_mtime_ns, old.st_ino)
    ]
    return {
        "seconds": round(seconds, 2),
        "identical": {path: path.read_bytes() for path in traces.iterdir()} == before,
        "untouched": sorted(untouched),
        "told": sorted(shard for shard in ("shard-00002", "shard-00007") if shard in told),
    }


# --- which parts -----------------------------------------------------------------------------------------------------


def kills(make: Callable[[Path], Command], place: Path, count: int) -> dict[str, Any]:
    place.mkdir(parents=True, exist_ok=True)
    command = make(place)
    begin = time.monotonic()
    found = torture(
        command, place / "runs", kills=count, write_kills=WRITE_KILLS, start_kills=START_KILLS, seed=20241122
    )
    result = summary(found) | {"seconds": round(time.monotonic() - begin)}
    if command.verb in NOT_COMPARED:
        result["not_compared"] = NOT_COMPARED[command.verb]
    return result


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "collect": lambda place, count: kills(lambda _: collect_command(), place, count),
    "train": lambda place, count: kills(lambda p: train_command(collected(p / "input")), place, count),
    "tune": lambda place, count: kills(lambda p: tune_command(collected(p / "input", *SMALL)), place, count),
    "publish": lambda place, count: kills(publish_command, place, count),
    "bits": lambda place, _: bits(place),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kills", type=int, default=50, help="kills of each verb at random moments")
    arguments = parser.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    print(f"code: {accept_head.__file__}")
    import_libraries()
    path = RESULTS / "faults.json"
    parts = read_json(path)["parts"] if path.is_file() else {}
    place = Path(tempfile.mkdtemp(prefix="faults-"))  # not TemporaryDirectory: every fork would remove it at its exit
    for name in arguments.only:
        parts[name] = PARTS[name](place / name, arguments.kills)
        print(name, {key: value for key, value in parts[name].items() if key != "moments_seconds"}, flush=True)
        write_result("faults", {"parts": parts})
    shutil.rmtree(place)
    wrong = [name for name in arguments.only if parts[name].get("different")]
    if wrong:
        raise SystemExit(f"not bit-identical after kills: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
