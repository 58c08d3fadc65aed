"""Question: does vLLM with a head serve thousands of mixed requests just as vLLM without speculation does?

Two servers on loopback get the same requests, one server after the other. Requests are greedy and sampled, streamed and
not, cancelled, with stop strings, grammars, penalties and logprobs. Prompts are long, too long, empty or a single
token; some values are refused. There are several phases, each with another concurrency, up to 32. After each phase the
server is left to fall idle and is looked at. The script fails if, next to plain vLLM, there is

- another status or error message for any request, or another line of kind ERROR in the log;
- another token, text or reason to finish in any greedy response (of a cancelled one: in what had arrived);
- a cache block or a request left when the server is idle, or memory that grows (MEMORY_GROWTH, MEMORY_SLOPE);
- a count of accepted or verified tokens in `vllm:accept_head_*` that is not that of vLLM's own counters.

.venv-vllm/bin/python benchmarks/vllm_soak.py     # benchmarks/results/vllm_soak.json: 12 minutes on 2 busy cores
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from record import REPOSITORY, TINY, write_result
from transformers import AutoTokenizer

from accept_head.inference.adapters.vllm.metrics import FOLDER
from accept_head.inference.adapters.vllm.settings import installed_version

TARGET, DRAFT, HEAD = (str(TINY.relative_to(REPOSITORY) / name) for name in ("target", "draft", "heads/sampled"))
SPECULATION = {
    "method": "draft_model",
    "model": DRAFT,
    "num_speculative_tokens": 20,
    "draft_sample_method": "probabilistic",
}
PLUGIN = [
    "--no-async-scheduling",
    *("--speculative-config", json.dumps(SPECULATION)),
    *("--additional-config", json.dumps({"accept_head": {"policy": f"head:{HEAD}"}})),
]
LOGS = REPOSITORY / "runs" / "vllm_soak"
# Cache for 6,144 tokens: it is used through many times over, and in the harder phases some requests have to wait for it
# or are preempted.
COMMON = ["--model", TARGET, "--dtype", "float32", "--num-gpu-blocks-override", "48"]
CONTEXT = 512  # tokens that both models have positions for
# Requests at once in each phase. The first is the warm-up: all that is allocated once is allocated there.
CONCURRENCY = (32, 1, 16, 4, 32, 32, 2, 16, 32, 8, 16, 32)
# Of all three processes together, from the end of the warm-up to the end of the run, and by a line through the ends of
# all phases, a thousand requests.
MEMORY_GROWTH, MEMORY_SLOPE = 0.05, 0.02
PATIENCE = 120  # seconds for one response, or to fall idle


# --- what is asked ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """body: what is posted, without the model. cancel_after: chunks of the stream after which the client hangs up."""

    kind: str
    body: dict[str, Any]
    cancel_after: int | None = None

    @property
    def greedy(self) -> bool:
        return self.body.get("temperature") == 0


@dataclass(frozen=True)
class Phase:
    """hard: with all kinds of requests; else only with those of which our counts must be vLLM's (`counts_differ`)."""

    concurrency: int
    hard: bool
    requests: list[Request]


def schedule(seed: int, per_phase: int, concurrency: Sequence[int] = CONCURRENCY) -> list[Phase]:
    """The same for the same arguments. Every other phase is hard, the first one too."""
    draw = random.Random(seed)
    texts = prompts()
    return [
        Phase(size, number % 2 == 0, [make_request(draw, texts, number % 2 == 0, size <= 4) for _ in range(per_phase)])
        for number, size in enumerate(concurrency)
    ]


def prompts() -> list[list[int]]:
    """The embedded pair's 1,200 prompts as token ids.

    Without those that leave a single token to feed when all but it are cached: vLLM pads them with drafts of its own.
    """
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / TARGET)
    files = [TINY / "prompts" / f"{split}.jsonl" for split in ("train", "dev", "test")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    texts = tokenizer([json.loads(line)["prompt"] for line in lines])["input_ids"]
    return [ids for ids in texts if (len(ids) - 1) % 16]


def make_request(draw: random.Random, texts: list[list[int]], hard: bool, seeds: bool) -> Request:
    sampling = make_sampling(draw, seeds)
    if not hard:
        sampling.pop("stop", None)
    elif draw.random() < 0.3:
        kind = draw.choice(sorted(HARD))
        return Request(kind, {**sampling, **HARD[kind](draw, texts)})
    stream = draw.random() < 0.5
    body = {**sampling, "prompt": draw.choice(texts), "stream": stream}
    return Request("text", body, draw.choice((0, 1, 3)) if hard and stream and draw.random() < 0.3 else None)


def make_sampling(draw: random.Random, seeds: bool) -> dict[str, Any]:
    """Half of it greedy. Not min_p and logit_bias, which vLLM refuses with any speculation.

    seeds: some requests have one. vLLM 0.32 on a CPU dies, with and without speculation, when the prompt of such a
    request is fed in pieces ("CPU Generator does not use offset"), as happens where many come at once.
    """
    options: dict[str, Any] = {"max_tokens": draw.randint(8, 48), "temperature": draw.choice((0, 0, 0.7, 1.0))}
    if options["temperature"]:
        options |= draw.choice(({}, {}, {"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.8, "top_k": 20}))
        options |= draw.choice(({}, {"seed": draw.randrange(1 << 30)})) if seeds else {}
    chance = draw.random()
    if chance < 0.4:
        options["stop"] = draw.choice((["\n"], [".", "?"], [" the"], ["return", "\n\n", "!"]))
    elif chance < 0.5:
        options["ignore_eos"] = True
    elif chance < 0.6:
        options["repetition_penalty"] = 1.2
    elif chance < 0.7:
        options |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
    if draw.random() < 0.2:
        options["logprobs"] = draw.choice((0, 1, 5))
    return options


def long_prompt(draw: random.Random, texts: list[list[int]], shortest: int, longest: int) -> list[int]:
    ids = [token for text in draw.choices(texts, k=200) for token in text]
    return ids[: draw.randint(shortest, longest)]


JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WRONG = (
    {"temperature": -1},
    {"logprobs": 100},
    {"top_p": 2},
    {"max_tokens": 0},
    {"structured_outputs": {"regex": "("}},
)
# kind: what it changes of the body
HARD: dict[str, Any] = {
    "long": lambda draw, texts: {"prompt": long_prompt(draw, texts, 350, CONTEXT - 49)},
    "up to the end": lambda draw, texts: {"prompt": long_prompt(draw, texts, CONTEXT - 20, CONTEXT - 1)},
    "too long": lambda draw, texts: {"prompt": long_prompt(draw, texts, CONTEXT + 1, 4 * CONTEXT)},
    "empty text": lambda draw, texts: {"prompt": ""},
    "empty list": lambda draw, texts: {"prompt": []},
    "one token": lambda draw, texts: {"prompt": [draw.randrange(5, 4096)]},
    "regex": lambda draw, texts: {
        "prompt": "Call me at ",
        "structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}( or [0-9]{3}-[0-9]{4})?"},
    },
    "json": lambda draw, texts: {"prompt": draw.choice(texts), "structured_outputs": {"json": JSON_SCHEMA}},
    "wrong value": lambda draw, texts: {"prompt": draw.choice(texts), **draw.choice(WRONG)},
}


# --- what comes back -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """status: of HTTP; 0 = the connection failed. error: the server's message, or what failed."""

    status: int = 0
    error: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def take(self, reply: dict[str, Any]) -> None:
        """One response, or one chunk of it."""
        if "error" in reply:
            self.error = f"{reply['error']['type']}: {reply['error']['message']}"
            return
        for choice in reply["choices"]:
            self.tokens += choice["token_ids"] or []
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish


async def send(session: aiohttp.ClientSession, request: Request) -> Outcome:
    outcome = Outcome()
    body = {"model": TARGET, "return_token_ids": True, **request.body}
    try:
        async with session.post("/v1/completions", json=body) as response:
            outcome.status = response.status
            if response.status != 200 or not body.get("stream"):
                outcome.take(await response.json())
            else:
                await follow(response, request.cancel_after, outcome)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.status, outcome.error = 0, repr(error)
    return outcome


async def follow(response: aiohttp.ClientResponse, cancel_after: int | None, outcome: Outcome) -> None:
    """A stream, up to its end or until the client has had enough and closes the connection."""
    chunks = 0
    while chunks != cancel_after:
        line = await response.content.readline()
        if not line or line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            outcome.take(json.loads(line.removeprefix(b"data: ")))
            chunks += 1
    response.close()


async def run_phase(session: aiohttp.ClientSession, phase: Phase) -> list[Outcome]:
    """In the order of the requests, of which as many are under way as the phase says."""
    waiting, outcomes = iter(enumerate(phase.requests)), [Outcome() for _ in phase.requests]

    async def one_client() -> None:
        for index, request in waiting:
            outcomes[index] = await send(session, request)

    await asyncio.gather(*(one_client() for _ in range(phase.concurrency)))
    return outcomes


# --- a server --------------------------------------------------------------------------------------------------------


class Server:
    """vLLM's API server, its engine core and its worker. log: the file with all that they wrote."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def memory(self) -> dict[str, float]:
        """MB resident, by process; multiprocessing's helper is left out."""
        resident: dict[str, float] = {}
        for process in self.processes():
            name = process.name() if "VLLM::" in process.name() else "API server"
            if "resource_tracker" not in " ".join(process.cmdline()):
                resident[name] = resident.get(name, 0.0) + process.memory_info().rss / 1e6
        return resident

    def metrics(self) -> dict[str, float]:
        """Everything at /metrics, by name and position; the same name with other labels is summed up."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as reply:
                text = reply.read().decode()
        except OSError as error:
            raise RuntimeError(f"vLLM is gone ({error}); see {self.log}") from None
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                key = f"{name}[{labels['position']}]" if "position" in labels else name
                values[key] = values.get(key, 0.0) + value
        return values

    def wait_until_ready(self, seconds: float) -> None:
        """Raises RuntimeError with the end of the log if it does not come up."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"vLLM is not up (exit status {self.process.poll()}):\n{self.log.read_text()[-4000:]}")

    def stop(self) -> int:
        """→ exit status after the signal that ends a service. What still runs a minute later is killed."""
        family = self.processes() if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        for left in psutil.wait_procs(family, timeout=10)[1]:
            left.kill()
        return status


@contextmanager
def serving(command: Sequence[str], log: Path, *, seconds: float = 600, **place: Any) -> Iterator[Server]:
    """A server by `command` on a free port of loopback. place: env and cwd, as for subprocess.Popen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as file:
        words = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, **place)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_until_ready(seconds)
        yield server
    finally:
        server.stop()


def environment() -> dict[str, str]:
    """One thread, at most 1 GiB of cache, nothing sent away, and vLLM's usual processes."""
    ours = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # oneDNN keeps what it made for each of the last 1,024 shapes: with any batch size that is new memory grows, until
    # that is full, after many thousand requests. With room for 4 a leak can be told from it.
    inherited = {name: value for name, value in os.environ.items() if name != FOLDER}  # not the counts of other engines
    return {**inherited, **ours, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4"}


# --- one server's run ------------------------------------------------------------------------------------------------


@dataclass
class Idle:
    """What is seen after a phase. requests: sent so far. memory: MB by process. metrics: all of /metrics."""

    requests: int
    seconds: float  # that the phase took
    memory: dict[str, float]
    metrics: dict[str, float]


@dataclass
class Run:
    command: str
    outcomes: list[list[Outcome]]  # by phase
    idle: list[Idle]  # at the start, and after each phase
    log: str  # until it was told to end
    exit_status: int


GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


def soak(options: Sequence[str], phases: list[Phase], log: Path) -> Run:
    command = ["-m", "vllm.entrypoints.openai.api_server", *COMMON, *options]
    with serving([sys.executable, *command], log, env=environment(), cwd=REPOSITORY) as server:
        outcomes, idle = asyncio.run(send_all(server, phases))
        # Read now: as it ends, the API server may or may not notice that its engine is gone, and call that an error.
        text = log.read_text(errors="replace")
        exit_status = server.stop()
    return Run(shlex.join(["python", *command]), outcomes, idle, text, exit_status)


async def send_all(server: Server, phases: list[Phase]) -> tuple[list[list[Outcome]], list[Idle]]:
    outcomes: list[list[Outcome]] = []
    idle = [Idle(0, 0.0, server.memory(), server.metrics())]
    for phase in phases:
        began = time.monotonic()
        async with client(server) as session:
            outcomes.append(await run_phase(session, phase))
        seconds = time.monotonic() - began
        await fall_idle(server)
        sent = idle[-1].requests + len(phase.requests)
        idle.append(Idle(sent, seconds, server.memory(), server.metrics()))
        print(f"  {sent} requests, {sum(idle[-1].memory.values()):.0f} MB", flush=True)
    return outcomes, idle


def client(server: Server) -> aiohttp.ClientSession:
    """To be used without long pauses: the server closes connections that are idle for 5 seconds."""
    limits = aiohttp.ClientTimeout(total=PATIENCE)
    return aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0), timeout=limits)


async def fall_idle(server: Server) -> None:
    """Until nothing runs, or PATIENCE ends. vLLM's gauges are of its engine's last step, which may have been before the
    last request was cancelled: a small request makes another step. Our counts may be a second old."""
    end = time.monotonic() + PATIENCE
    await asyncio.sleep(1)
    while time.monotonic() < end:
        async with client(server) as session:
            await send(session, Request("text", {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}))
        await asyncio.sleep(2.5)
        metrics = server.metrics()
        if not any(metrics[gauge] for gauge in GAUGES):
            return


# --- comparing two runs ----------------------------------------------------------------------------------------------


def differences(phases: list[Phase], plain: Run, served: Run) -> list[str]:
    """What the server with the plugin did that plain vLLM did not, a sentence each."""
    compared = [
        answers_differ(f"phase {number}, request {index} ({request.kind})", request, *pair)
        for number, phase in enumerate(phases)
        for index, (request, *pair) in enumerate(
            zip(phase.requests, plain.outcomes[number], served.outcomes[number], strict=True)
        )
    ]
    found = [sentence for sentence in compared if sentence]
    found += [f"only the plugin's log says: {line}" for line in sorted(errors(served.log) - errors(plain.log))]
    if served.exit_status != plain.exit_status:
        found.append(f"the exit status is {served.exit_status}, without the plugin {plain.exit_status}")
    found += left_over(served.idle) + counts_differ(phases, served.idle)
    return found


def answers_differ(name: str, request: Request, plain: Outcome, served: Outcome) -> str | None:
    if (plain.status, plain.error) != (served.status, served.error):
        return f"{name}: {plain.status} {plain.error!r} without the plugin, {served.status} {served.error!r} with it"
    if not request.greedy or request.cancel_after == 0:
        return None
    mine, theirs = (served.tokens, served.text, served.finish), (plain.tokens, plain.text, plain.finish)
    if request.cancel_after is not None:  # chunks hold as many tokens as were accepted: compare what both had
        tokens, letters = min(len(mine[0]), len(theirs[0])), min(len(mine[1]), len(theirs[1]))
        mine, theirs = (mine[0][:tokens], mine[1][:letters], None), (theirs[0][:tokens], theirs[1][:letters], None)
    return None if mine == theirs else f"{name}: greedy {theirs!r} without the plugin, {mine!r} with it"


def errors(log: str) -> set[str]:
    """Lines of kind ERROR or worse, and the last line of a traceback, without what differs from run to run."""
    lines = [line for line in log.splitlines() if re.search(r"\b(ERROR|CRITICAL)\b|^\w+(Error|Exception)\b", line)]
    return {
        re.sub(r"\(.*?pid=\d+\)|\d\d-\d\d \d\d:\d\d:\d\d|\b(cmpl-)?[0-9a-f]{8,}\b", "", line).strip() for line in lines
    }


def left_over(idle: list[Idle]) -> list[str]:
    return [
        f"after {seen.requests} requests {gauge} is {seen.metrics[gauge]}, expected 0"
        for seen in idle
        for gauge in GAUGES
        if seen.metrics[gauge]
    ]


COUNTED = {"verified": "draft", "accepted": "accepted"}  # ours: vLLM's


def counts_differ(phases: list[Phase], idle: list[Idle]) -> list[str]:
    """In the phases that are not hard. In the others vLLM also counts what nobody drafted: −1 that it pads a prompt of
    one token with, and zeros for the whole batch when one request is too near the end of the context to draft. And it
    leaves out what a grammar forbids, and the step in which a request is found to be cancelled or at a stop string."""
    found = []
    for phase, before, after in zip(phases, idle, idle[1:], strict=False):
        ours, theirs = (counted(before, after, kind) for kind in ("accept_head", "spec_decode"))
        if not phase.hard and ours != theirs:
            found.append(f"after {after.requests} requests we have counted {ours} in this phase, vLLM {theirs}")
    return found


def counted(before: Idle, after: Idle, kind: str) -> dict[str, float]:
    """Tokens of one phase, by our counters (accept_head) or vLLM's (spec_decode); accepted ones by position, too."""
    names = {name: name if kind == "accept_head" else theirs for name, theirs in COUNTED.items()}
    metrics = {label: f"vllm:{kind}_num_{name}_tokens_total" for label, name in names.items()}
    positions = range(SPECULATION["num_speculative_tokens"])
    metrics |= {f"at {k}": f"vllm:{kind}_num_accepted_tokens_per_pos_total[{k}]" for k in positions}
    return {label: after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0) for label, name in metrics.items()}


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """share: from the end of the warm-up to the end. slope: of the line through the ends of all phases since, a share
    per 1,000 requests."""

    share: float
    slope: float


def growth(requests: Sequence[int], memory: Sequence[float]) -> Growth:
    """requests: sent so far; memory: any unit. Both at the ends of the phases, the warm-up's first."""
    slope = np.polyfit(np.array(requests) / 1000, np.array(memory) / memory[0], 1)[0]
    return Growth(share=memory[-1] / memory[0] - 1, slope=float(slope))


def memory_of(idle: list[Idle]) -> Growth:
    seen = idle[1:]  # not at the start
    return growth([moment.requests for moment in seen], [sum(moment.memory.values()) for moment in seen])


def grows(found: Growth) -> list[str]:
    limits = {"share": MEMORY_GROWTH, "slope": MEMORY_SLOPE}
    return [
        f"memory grows: {name} {value:.1%}, expected at most {limits[name]:.0%}"
        for name, value in asdict(found).items()
        if value > limits[name]
    ]


# --- the result ------------------------------------------------------------------------------------------------------


def summary(phases: list[Phase], run: Run) -> dict[str, Any]:
    outcomes = [outcome for phase in run.outcomes for outcome in phase]
    rows = [
        {
            "requests": seen.requests,
            "concurrency": phase.concurrency,
            "hard": phase.hard,
            "seconds": round(seen.seconds, 1),
            "memory_mb": {name: round(size) for name, size in seen.memory.items()},
            **{gauge.removeprefix("vllm:"): seen.metrics[gauge] for gauge in GAUGES},
            "ours": totals(before, seen, "accept_head"),
            "vllms": totals(before, seen, "spec_decode"),
        }
        for phase, (before, seen) in zip(phases, pairwise(run.idle), strict=True)
    ]
    return {
        "command": run.command,
        "statuses": dict(Counter(str(outcome.status) for outcome in outcomes)),
        "errors": dict(Counter(re.sub(r"\d+", "N", o.error) for o in outcomes if o.error).most_common()),
        "tokens": sum(len(outcome.tokens) for outcome in outcomes),
        "memory_at_start_mb": {name: round(size) for name, size in run.idle[0].memory.items()},
        "memory_growth": asdict(memory_of(run.idle)),
        "error_lines_in_the_log": sorted(errors(run.log)),
        "exit_status": run.exit_status,
        "preemptions": run.idle[-1].metrics["vllm:num_preemptions_total"],
        "phases": rows,
    }


def totals(before: Idle, after: Idle, kind: str) -> dict[str, int]:
    """Of one phase, without the positions."""
    tokens = counted(before, after, kind)
    return {name: int(tokens[name]) for name in COUNTED}


def what_was_asked(phases: list[Phase], plain: Run) -> dict[str, Any]:
    requests = [request for phase in phases for request in phase.requests]
    outcomes = [outcome for phase in plain.outcomes for outcome in phase]
    greedy = [o for r, o in zip(requests, outcomes, strict=True) if r.greedy and r.cancel_after is None and o.tokens]
    return {
        "requests": len(requests),
        "by_kind": dict(Counter(request.kind for request in requests).most_common()),
        "streamed": sum(bool(request.body.get("stream")) for request in requests),
        "cancelled": sum(request.cancel_after is not None for request in requests),
        "with_stop_strings": sum("stop" in request.body for request in requests),
        "by_temperature": dict(Counter(str(request.body["temperature"]) for request in requests).most_common()),
        "whole_greedy_responses": len(greedy),
        "tokens_in_them": sum(len(outcome.tokens) for outcome in greedy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per_phase", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    phases = schedule(options.seed, options.per_phase)
    LOGS.mkdir(parents=True, exist_ok=True)
    runs = {}
    for name, words in {"plain": [], "plugin": PLUGIN}.items():
        print(name, flush=True)
        runs[name] = soak(words, phases, LOGS / f"{name}.log")
    found = differences(phases, runs["plain"], runs["plugin"]) + grows(memory_of(runs["plugin"].idle))
    write_result(
        "vllm_soak",
        {
            "vllm": installed_version(),
            "asked": what_was_asked(phases, runs["plain"]),
            "limits": {"memory_growth": MEMORY_GROWTH, "memory_slope_per_1000_requests": MEMORY_SLOPE},
            "differences": found,
            **{name: summary(phases, run) for name, run in runs.items()},
        },
    )
    print("\n".join(found) or "no difference")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
