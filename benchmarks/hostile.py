"""Hostile input: thousands of spoiled files, each of which must work or be refused in one line.

    python benchmarks/hostile.py --write                                          # all kinds
    python benchmarks/hostile.py --share 0.05 --kind "prompts JSONL" --show 5     # a look at one

Each input goes through the front door, `accept_head.cli.main`, in a worker process. An input fails the test if the
command raises; prints anything but one line `accept-head: error: …` with exit code 2; takes over SECONDS of processor
time; needs more than MEMORY beyond the loaded libraries and models; opens a file for writing outside the output folder,
or changes a file there; unpickles; or starts a program. A worker that hangs or dies is replaced, and the input that did
it is recorded.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from spoil import (
    TEXTS,
    escaping_pickle,
    numpy_pickle,
    spoil_bytes,
    spoil_json,
    spoil_lines,
    spoil_safetensors,
    spoil_table,
    spoil_yaml,
    torch_pickle,
)

SECONDS = 10
MEMORY = 2 << 30
ERROR = "accept-head: error: "
PREPARATION = 300  # seconds for a worker to load everything


class Outcome(NamedTuple):
    """verdict: works, refused, or what went wrong. seconds: of processor time. detail: what was said."""

    verdict: str
    seconds: float
    detail: str


# --- good inputs, and the commands that read them --------------------------------------------------------------------


class Sandbox:
    """A folder with a pair's small traces, heads, costs and so on (`good`), and the place of one input (`case`)."""

    def __init__(self, root: Path, pair: Path):
        self.root, self.pair = root, pair
        self.good, self.case, self.out = root / "good", root / "case", root / "out"
        self.cwd, self.tmp = root / "cwd", root / "tmp"
        self.models = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]

    def prepare(self) -> None:
        """Make the good inputs, with the package's own commands where it has them."""
        for folder in (self.good, self.case, self.out, self.cwd, self.tmp):
            folder.mkdir(parents=True, exist_ok=True)
        lines = (self.pair / "prompts" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:2]
        (self.good / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._traces()
        self._head(_hidden_size(self.pair / "draft"))
        self._research(_hidden_size(self.pair / "draft"))
        _write(self.good / "costs.json", COSTS)
        _write(self.good / "batch_map.json", BATCH_MAP)

    def _traces(self) -> None:
        from accept_head.cli import main

        prompts = self.pair / "prompts" / "train.jsonl"
        options = {"prompts": prompts, "out": self.good / "traces", "max_prompts": 8, "max_new_tokens": 8}
        options |= {"shard_size": 4, "top_k": 0}
        assert main(["collect", *self.models, *_flags(options)]) == 0

    def _head(self, size: int) -> None:
        from accept_head import AcceptanceHead, HeadConfig
        from accept_head.calibration import DepthCalibration
        from accept_head.signals import SIGNALS

        config = HeadConfig(
            hidden_size=size, depth=2, predicts="both", reads="before", width=24, embedding_std=0.5,
            signals=SIGNALS, signal_mean=(-2.0, 2.0, 0.5), signal_std=(2.0, 1.0, 0.3),
        )  # fmt: skip
        head = self.good / "head"
        AcceptanceHead(config).save_pretrained(head)
        DepthCalibration(method="affine", slopes=(1.0, 0.9), intercepts=(0.0, 0.1)).save(head)
        _write(head / "decoding.json", DECODING)
        shutil.copy(self.good / "traces" / "trace_config.json", head)
        _write(head / "metrics.json", METRICS)

    def _research(self, size: int) -> None:
        import torch
        from safetensors.torch import save_file

        from accept_head.trace.shards import read_traces

        folder = self.good / "checkpoint"
        folder.mkdir()
        _write(folder / "config.json", {"hidden_size": size, "num_layers": 2})
        shapes = {"model.0.linear.weight": (size, size), "model.0.linear.bias": (size,)}
        shapes |= {"model.2.weight": (2, size), "model.2.bias": (2,)}
        save_file({name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}, folder / "model.safetensors")
        _, traces = read_traces(self.good / "traces")
        columns = {"prefix": "prompt_ids", "tokens": "response_ids", "draft": "draft_ids", "p_acc": "acceptance"}
        records = [
            {"prompt": "p", "continuation": "c", **{key: str(list(trace[name])) for key, name in columns.items()}}
            for trace in traces.select(range(3))
        ]
        (self.good / "research.json").write_text(json.dumps(records), encoding="utf-8")

    def start_case(self) -> None:
        for folder in (self.case, self.out, self.cwd, self.tmp):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def copied(self, name: str) -> Path:
        """A good input of one's own."""
        source, place = self.good / name, self.case / name
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
        return place

    def files(self) -> dict[str, tuple[int, int]]:
        """What must not change."""
        found = {}
        for folder in (self.good, self.case, self.cwd):
            for path in folder.rglob("*"):
                stat = path.lstat()
                found[str(path)] = (stat.st_mtime_ns if path.is_file() else 0, stat.st_size if path.is_file() else 0)
        return found

    def generate(self, policy: str, **changes: Any) -> list[str]:
        options = {"prompts": self.good / "prompts.jsonl", "out": self.out / "text.jsonl", **GENERATE, **changes}
        return ["generate", *self.models, "--policy", policy, *_flags(options)]

    def train(self, traces: Path) -> list[str]:
        options = {"traces": traces, "dev_traces": self.good / "traces", "draft": self.pair / "draft"}
        options |= {"out": self.out / "head", "batch_size": 8, "epochs": 1}
        return ["train", *_flags(options)]

    def imported(self, **source: Any) -> list[str]:
        return ["import-specdecpp", *_flags({**source, "out": self.out / "imported"})]


GENERATE = {"max_new_tokens": 3, "batch_size": 2, "stream": "false"}
COSTS = {
    "t_draft": 0.01, "t_target": 0.05, "t_autoregressive": 0.04,
    "batch": {
        model: {"alpha": 1e-6, "beta": 1e-5, "gamma": seconds, "r_squared": 0.9}
        for model, seconds in (("draft", 0.01), ("target", 0.05))
    },
}  # fmt: skip
COST_POLICIES = ("goodput:{}", "adaspec:{}", "budget:{}", "fixed:2,costs={}", "leviathan:{}")
BATCH_MAP = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]], "num_speculative_tokens": 3}
DECODING = {"threshold": 0.5, "k_min": 1, "k_max": 4, "expected": {"speedup": 1.1}, "traces": {"prompts": 8}}
METRICS = {"dev": {"token": {"count": 8, "binary_kl": 0.1, "brier": 0.1, "ece": 0.0, "auroc": 0.7}}, "steps": 1}

Kind = Callable[[Sandbox, Random], list[str]]  # writes one spoiled input and says the command that reads it


def config_file(suffix: str, spoil: Callable[[Any, Random], bytes]) -> Kind:
    def write(box: Sandbox, random: Random) -> list[str]:
        values = {"prompts": str(box.good / "prompts.jsonl"), "policy": "fixed:2", "seed": 1, "temperature": 0.5}
        values |= {"target": box.models[1], "draft": box.models[3], "stop": ["x"], "max_new_tokens": 3}
        path = box.case / f"config{suffix}"
        path.write_bytes(spoil({**values, "batch_size": 2, "stream": False, "top_k": 5}, random))
        # Where to write is the user's to say: it stays what it is.
        return ["generate", "--config", str(path), "--out", str(box.out / "text.jsonl")]

    return write


def head_file(name: str, policy: str, spoil: Callable[[Any, Random], bytes] = spoil_json) -> Kind:
    """One JSON file of a head. policy: with {} for its folder."""

    def write(box: Sandbox, random: Random) -> list[str]:
        head = box.copied("head")
        (head / name).write_bytes(spoil(json.loads((head / name).read_text()), random))
        return box.generate(policy.format(head))

    return write


def head_weights(box: Sandbox, random: Random) -> list[str]:
    path = box.copied("head") / "model.safetensors"
    path.write_bytes(spoil_safetensors(path.read_bytes(), random))
    return box.generate(f"head:{path.parent}:0.5")


def policy_file(name: str, *policies: str) -> Kind:
    def write(box: Sandbox, random: Random) -> list[str]:
        path = box.case / name
        path.write_bytes(spoil_json(json.loads((box.good / name).read_text()), random))
        return box.generate(random.choice(policies).format(path))

    return write


def prompts(box: Sandbox, random: Random) -> list[str]:
    lines = [{"id": "a", "domain": "b", "prompt": "one two"}]
    lines.append({"id": 2, "prompt": [{"role": "user", "content": "three"}]} if random.random() < 0.3 else lines[0])
    path = box.case / "prompts.jsonl"
    path.write_bytes(spoil_lines(lines, random))
    return box.generate("fixed:2", prompts=path)


def trace_bytes(box: Sandbox, random: Random) -> list[str]:
    path = box.copied("traces") / f"shard-{random.randrange(2):05d}.parquet"
    path.write_bytes(spoil_bytes(path.read_bytes(), random))
    return box.train(path.parent)


def trace_values(box: Sandbox, random: Random) -> list[str]:
    """A whole parquet file, with a seal or without one, that holds what it must not."""
    import pyarrow.parquet as pq

    from accept_head.checksum import seal_parquet

    path = box.copied("traces") / f"shard-{random.randrange(2):05d}.parquet"
    pq.write_table(spoil_table(pq.read_table(path), random), path)
    if random.random() < 0.5:
        path.write_bytes(spoil_bytes(path.read_bytes(), random) if random.random() < 0.5 else path.read_bytes())
    else:
        seal_parquet(path)
    return box.train(path.parent)


def trace_config(box: Sandbox, random: Random) -> list[str]:
    path = box.copied("traces") / "trace_config.json"
    path.write_bytes(spoil_json(json.loads(path.read_text()), random))
    return box.train(path.parent)


def research_data(box: Sandbox, random: Random) -> list[str]:
    records = json.loads((box.good / "research.json").read_text())
    if random.random() < 0.4:
        record, field = random.choice(records), random.choice(("prefix", "tokens", "draft", "p_acc"))
        text = spoil_bytes(record[field].encode(), random).decode("utf-8", "replace")
        record[field] = random.choice(
            (text, *TEXTS, "[1]*3", "(1,)", "[True]", "[1,]", "[nan]", "{}", "list(range(9))")
        )
        data = json.dumps(records).encode()
    else:
        data = spoil_json(records, random)
    path = box.case / "research.json"
    path.write_bytes(data)
    pair = {"target": box.models[1], "draft": box.models[3]}
    return box.imported(data=path, **pair, score=random.choice(("true", "false")))


def research_config(box: Sandbox, random: Random) -> list[str]:
    path = box.copied("checkpoint") / "config.json"
    path.write_bytes(spoil_json(json.loads(path.read_text()), random))
    return box.imported(checkpoint=path.parent)


def research_weights(box: Sandbox, random: Random) -> list[str]:
    path = box.copied("checkpoint") / "model.safetensors"
    path.write_bytes(spoil_safetensors(path.read_bytes(), random))
    return box.imported(checkpoint=path.parent)


def published(box: Sandbox, random: Random) -> list[str]:
    """There is no Hub here: it is refused in the end, but every file is read first."""
    head = box.copied("head")
    name = random.choice(("metrics.json", "decoding.json", "trace_config.json", "calibration.json"))
    (head / name).write_bytes(spoil_json(json.loads((head / name).read_text()), random))
    return ["publish", "--head", str(head), "--repo", "user/name"]


def planted(box: Sandbox, random: Random) -> list[str]:
    """Pickles that make a file when they are opened, and code that comes with a model, where data are expected."""
    pickled = random.choice((escaping_pickle, torch_pickle, numpy_pickle))()
    place = random.choice(("head", "head beside", "checkpoint", "checkpoint alone", "traces", "draft", "draft code"))
    if place.startswith("head"):
        head = box.copied("head")
        if place == "head beside":
            (head / "model.safetensors").unlink()
        for name in ("pytorch_model.bin", "adapter_model.bin", "model.pkl"):
            (head / name).write_bytes(pickled)
        if place == "head":
            (head / random.choice(("model.safetensors", "config.json", "decoding.json"))).write_bytes(pickled)
        return box.generate(f"head:{head}")
    if place.startswith("checkpoint"):
        folder = box.copied("checkpoint")
        if place == "checkpoint alone":
            (folder / "model.safetensors").unlink()
        (folder / ("model.safetensors" if place == "checkpoint" else "pytorch_model.bin")).write_bytes(pickled)
        return box.imported(checkpoint=folder)
    if place == "traces":
        folder = box.copied("traces")
        (folder / random.choice(("shard-00000.parquet", "trace_config.json"))).write_bytes(pickled)
        return box.train(folder)
    draft = box.case / "draft"
    shutil.copytree(box.pair / "draft", draft)
    if place == "draft":
        (draft / "model.safetensors").unlink()
        (draft / "pytorch_model.bin").write_bytes(pickled)
    else:
        config = json.loads((draft / "config.json").read_text())
        config |= {
            "model_type": "escaping",
            "auto_map": {"AutoConfig": "escaping.C", "AutoModelForCausalLM": "escaping.M"},
        }
        _write(draft / "config.json", config)
        (draft / "escaping.py").write_text("open('escaped', 'w')\n")
    arguments = box.generate("fixed:2")
    arguments[arguments.index("--draft") + 1] = str(draft)
    return arguments


KINDS: dict[str, tuple[int, Kind]] = {  # how many, and how
    "config YAML": (1000, config_file(".yaml", spoil_yaml)),
    "config JSON": (700, config_file(".json", spoil_json)),
    "head config.json": (1000, head_file("config.json", "head:{}:0.5")),
    "head model.safetensors": (1100, head_weights),
    "head decoding.json": (800, head_file("decoding.json", "head:{}")),
    "head calibration.json": (600, head_file("calibration.json", "head:{}:0.5,calibration=true")),
    "head trace_config.json": (250, head_file("trace_config.json", "head:{}:0.5")),
    "costs JSON": (700, policy_file("costs.json", *COST_POLICIES)),
    "batch map JSON": (300, policy_file("batch_map.json", "batch-map:{}")),
    "prompts JSONL": (900, prompts),
    "trace parquet, bytes": (600, trace_bytes),
    "trace parquet, values": (350, trace_values),
    "trace trace_config.json": (450, trace_config),
    "research JSON": (900, research_data),
    "research config.json": (300, research_config),
    "research model.safetensors": (500, research_weights),
    "published files": (150, published),
    "planted pickles and code": (60, planted),
}  # fmt: skip


# --- one input at a time, in a process of its own ---------------------------------------------------------------------


def work(connection: Connection, box: Sandbox, kind: str, first: int, count: int, seed: int) -> None:
    """Send (index, outcome) of each input, and at last the peak memory in bytes."""
    try:
        _work(connection, box, kind, first, count, seed)
    except BaseException:
        connection.send(("broken", traceback.format_exc()))
    os._exit(0)


def _work(connection: Connection, box: Sandbox, kind: str, first: int, count: int, seed: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    os.dup2(errors.fileno(), 2)
    sys.stderr, sys.stdout = os.fdopen(2, "w", closefd=False), os.fdopen(1, "w", closefd=False)
    os.chdir(box.cwd)
    tempfile.tempdir = str(box.tmp)
    violations = watch([box.out, box.tmp])
    main = warmed_main(box)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send(("ready", None))
    for index in range(first, count):
        random = Random(f"{seed}/{kind}/{index}")
        box.start_case()
        arguments = KINDS[kind][1](box, random)
        before = box.files()
        os.ftruncate(errors.fileno(), 0)
        os.lseek(errors.fileno(), 0, os.SEEK_SET)
        violations.clear()
        violations.watching = True
        begin = time.process_time()
        raised = ""
        try:
            code: Any = main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            code, raised = 1, traceback.format_exc()
        seconds = time.process_time() - begin
        violations.watching = False
        sys.stderr.flush()
        said = os.pread(errors.fileno(), 1 << 20, 0).decode("utf-8", "replace")
        verdict = judge(code, said, [*violations, *changed(before, box.files())])
        connection.send((index, Outcome(verdict, seconds, (raised or said)[-3000:])))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak
    connection.send(("done", grown))
    connection.recv()


def judge(code: Any, said: str, violations: Sequence[str]) -> str:
    """One word or a short phrase for what happened."""
    if violations:
        return f"escaped: {violations[0]}"
    if code == 0:
        return "works"
    if code != 2:
        return f"exit code {code}"
    lines = said.splitlines()
    if len(lines) != 1 or not lines[0].startswith(ERROR) or not said.strip().isprintable():
        return f"said {len(lines)} lines"
    return "refused"


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [f"changed {name}" for name in {**before, **after} if before.get(name) != after.get(name)]


class Violations(list[str]):
    watching = False


def watch(writable: Sequence[Path]) -> Violations:
    """From now on, a list of what this process does that no input may make it do."""
    found = Violations()
    roots = tuple(f"{path.resolve()}{os.sep}" for path in writable)
    programs = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
    moves = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not found.watching:
            return
        if event == "pickle.find_class":
            found.append(f"unpickled {arguments}")
        elif event in programs:
            found.append(f"{event} {str(arguments)[:80]}")
        elif (
            event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            outside(arguments[0], "open")
        elif event in moves and not (event in ("os.remove", "os.rmdir") and arguments[1] != -1):  # of an open folder
            outside(
                os.fsdecode(arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0]), event
            )

    def outside(name: str, event: str) -> None:
        path = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(name))), os.path.basename(name))
        if not f"{path}{os.sep}".startswith(roots) and not path.startswith(("/dev/", "/proc/")):
            found.append(f"{event} {path}")

    sys.addaudithook(hook)
    return found


def warmed_main(box: Sandbox) -> Callable[[Sequence[str]], int]:
    """`cli.main`, with everything loaded. The pair's models are loaded once, and a command line without --config that
    is the same as before is parsed once: they are not what is spoiled."""
    import jsonargparse

    import accept_head.checkpoint as checkpoint
    import accept_head.inference.decode.file as decode_file
    import accept_head.inference.verbs.generate as generate_file
    import accept_head.pair as pair
    import accept_head.training.learn.run as run
    import accept_head.training.specdecpp as specdecpp
    from accept_head.cli import main

    for made in (pair.load_pair, pair.load_model, pair.load_tokenizer, checkpoint.checkpoint_fingerprint):
        name, once = made.__name__, remembered(made)
        for module in (decode_file, generate_file, run, specdecpp):
            if hasattr(module, name):
                setattr(module, name, once)
    jsonargparse.auto_cli = parsed_once(jsonargparse.auto_cli)
    box.start_case()
    for policy in ("fixed:2", f"head:{box.good / 'head'}"):
        if main(box.generate(policy)) != 0:
            raise RuntimeError(f"good input is refused: {policy}")
    return main


def parsed_once(auto_cli: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, dict[str, Any]] = {}

    def call(function: Callable[..., Any], args: Sequence[str], **options: Any) -> Any:
        if "--config" in args:
            return auto_cli(function, args=args, **options)
        key = (function, *args)
        if key not in known:

            @functools.wraps(function)
            def record(**values: Any) -> None:
                known[key] = values

            auto_cli(record, args=args, **options)
        return function(**known[key])

    return call


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}

    @functools.wraps(function)
    def once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, options))
        if key not in known:
            known[key] = function(*arguments, **options)
        return known[key]

    return once


@contextmanager
def worker(box: Sandbox, kind: str, first: int, count: int, seed: int) -> Iterator[tuple[Connection, Any]]:
    """A fork that is ready."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=work, args=(theirs, box, kind, first, count, seed), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join()
        ours.close()


def run_kind(box: Sandbox, kind: str, count: int, seed: int) -> tuple[list[Outcome], int]:
    """Outcomes of `count` inputs of a kind, and the most memory that a worker came to need for them."""
    outcomes: list[Outcome] = []
    most = 0
    while len(outcomes) < count:
        with worker(box, kind, len(outcomes), count, seed) as (connection, process):
            try:
                wait = PREPARATION
                while True:
                    if not answers(connection, process, wait):
                        if wait != SECONDS:
                            raise RuntimeError(f"{kind}: the worker was not ready after {wait} s")
                        outcomes.append(Outcome("hangs", SECONDS, ""))
                        break
                    what, value = connection.recv()
                    if what == "broken":
                        raise RuntimeError(f"{kind} {len(outcomes)}: this harness is at fault\n{value}")
                    if what == "done":
                        most = max(most, value)
                        connection.send("bye")
                        break
                    if what != "ready":
                        outcomes.append(value)
                    wait = SECONDS
            except (EOFError, ConnectionResetError):
                outcomes.append(Outcome("died", 0.0, ""))
    return outcomes, most


def answers(connection: Connection, process: Any, seconds: float) -> bool:
    """Wait for a message as long as the worker has not used up so many seconds of processor time, on a machine that
    others may be using; and at most ten times as long."""
    begin, used = time.monotonic(), processor_seconds(process.pid)
    while not connection.poll(0.5):
        if processor_seconds(process.pid) - used > seconds or time.monotonic() - begin > 10 * seconds:
            return False
    return True


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- all of them ------------------------------------------------------------------------------------------------------


def summary(box: Sandbox, kind: str, share: float, seed: int, show: int = 0) -> dict[str, Any]:
    """How many inputs of a kind had which outcome, the slowest, and the memory."""
    count = max(1, round(KINDS[kind][0] * share))
    outcomes, memory = run_kind(box, kind, count, seed)
    bad = [(place, each) for place, each in enumerate(outcomes) if each.verdict not in ("works", "refused")]
    found = {
        "inputs": count,
        "outcomes": dict(Counter(outcome.verdict for outcome in outcomes)),
        "slowest_processor_seconds": max(outcome.seconds for outcome in outcomes),
        "memory_bytes": memory,
        "failed": {str(place): each.verdict for place, each in bad},
    }
    print(kind, found, flush=True)
    for place, each in bad[:show]:
        print(f"--- {kind} {place}: {each.verdict}\n{each.detail}", flush=True)
    return found


def _flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _hidden_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["hidden_size"])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    from record import RESULTS, TINY, write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--share", type=float, default=1.0, help="of the inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=2, help="failures to print of each kind")
    parser.add_argument(
        "--write", action="store_true", help="into results/hostile.json, where other kinds stay as they are"
    )
    given = parser.parse_args()
    path = RESULTS / "hostile.json"
    results = json.loads(path.read_text())["kinds"] if given.write and path.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox(Path(folder), TINY)
        box.prepare()
        for kind in given.kind:
            results[kind] = summary(box, kind, given.share, given.seed, given.show)
            totals = Counter[str]()
            for result in results.values():
                totals.update(result["outcomes"])
            if given.write:
                bounds = {"processor_seconds": SECONDS, "memory_bytes": MEMORY}
                known = {name: results[name] for name in KINDS if name in results}
                total = {"bounds": bounds, "seed": given.seed, "inputs": sum(totals.values()), "outcomes": totals}
                write_result("hostile", {**total, "kinds": known}, "python benchmarks/hostile.py --write")
    print(dict(totals), "of", sum(totals.values()))
