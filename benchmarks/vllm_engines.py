"""Real vLLM engines in this process, timed step by step, whose drafting is set anew for each run.

One engine has no speculation; the other drafts as vLLM does by itself (any K, or its table from batch size to K) or by
a policy of ours. Both have the same weights, dtype and limits: what is compared runs side by side in one process.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two on shared cores can be many times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import itertools
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accept_head.inference.adapters.vllm.host import PolicyHost
from accept_head.inference.adapters.vllm.unfed import Unfed
from accept_head.inference.decode.rows import DecodeStats, Finished, Request
from accept_head.sampling import Sampling


@dataclass
class Drafting:
    """How one arm drafts. table: vLLM's own rule, tokens by the number of requests; policy: a SPEC of ours; neither: no
    speculation. host: the policy at work; it learns from run to run."""

    table: list[int] | None = None
    policy: str | None = None
    host: PolicyHost | None = None
    draft_forwards: int = field(default=0)

    @classmethod
    def fixed(cls, k: int, rows: int) -> Drafting:
        return cls(table=[k] * (rows + 1))


class Engines:
    """target, draft: folders or Hub names. method: vLLM's name for the kind of drafter. k_max: most tokens that any arm
    drafts. rows: most requests together."""

    def __init__(self, target: str, draft: str, *, k_max: int, rows: int, method: str = "draft_model", **options: Any):
        from vllm import LLM

        shared = {"max_num_seqs": rows, "disable_log_stats": False, "async_scheduling": False, "seed": 0, **options}
        speculation = {
            "method": method,
            "model": draft,
            "num_speculative_tokens": k_max,
            "draft_sample_method": "probabilistic",  # greedy requests draft the most likely token all the same
        }
        self.rows, self.numbers = rows, itertools.count()
        self.at_work: _Batch | None = None  # of those that take turns
        self.plain = LLM(model=target, **shared).llm_engine
        self.speculative = LLM(
            model=target,
            speculative_config=speculation,
            additional_config={"accept_head": {"policy": "fixed:1", "log_every": 0}},
            per_request_spec_decode_metrics="detailed",
            **shared,
        ).llm_engine

    @property
    def device(self) -> Any:
        return self._drafter().device

    def tokenizer(self) -> Any:
        return self.plain.get_tokenizer()

    def run(self, drafting: Drafting, requests: Sequence[Request], sampling: Sampling, rows: int) -> Run:
        """Decode requests, at most `rows` together, and time each step."""
        metrics = drafting.host.metrics if drafting.host else None
        forwards = metrics.read()["draft_forwards"] if metrics else 0
        batch = self._batch(drafting, requests, sampling, rows)
        if batch.engine is self.speculative:
            self._set(drafting)
        wall, cpu = time.perf_counter(), time.process_time()
        steps = list(iter(batch.step, None))
        run = Run(time.perf_counter() - wall, time.process_time() - cpu, steps, batch.finished)
        if metrics:
            forwards = metrics.read()["draft_forwards"] - forwards
        elif drafting.table is not None:
            depth = getattr(self._drafter(), "num_speculative_steps", None)
            forwards = sum(depth or max(1, drafting.table[live]) for live in run.live)
        drafting.draft_forwards += forwards
        return run

    def rounds(
        self, drafting: Drafting, requests: Sequence[Request], sampling: Sampling, rows: int
    ) -> Generator[tuple[float, ...]]:
        """(tokens, seconds) of each step in which `rows` requests decode and none has just arrived. Several of these
        can take turns. The first step after another's turn is left out: vLLM then sets up its batch anew."""
        batch = self._batch(drafting, requests, sampling, rows)
        try:
            while True:
                changed = self._put_to_work(batch)
                step = batch.step()
                if step is None:
                    return
                if step.is_full(rows) and not changed:
                    yield step.tokens, step.seconds
        finally:
            self._put_to_work(batch)
            batch.engine.abort_request(list(batch.there))

    def _batch(self, drafting: Drafting, requests: Sequence[Request], sampling: Sampling, rows: int) -> _Batch:
        plain = drafting.table is None and drafting.policy is None
        engine = self.plain if plain else self.speculative
        return _Batch(engine, drafting, requests, sampling, f"{next(self.numbers)}-", rows)

    def _put_to_work(self, batch: _Batch) -> bool:
        """Whether another batch was at work. What the engine keeps of that one from step to step is put aside."""
        before, self.at_work = self.at_work, batch
        if before is batch:
            return False
        if before is not None:
            before.kept = [getattr(place, name) for place, name, _ in self._keeps(before.engine)]
            before.left = time.perf_counter()
        if batch.engine is self.speculative:
            self._set(batch.drafting)
        if batch.kept and batch.drafting.host is not None:  # costs are learnt from its own rounds' time
            batch.drafting.host.began += time.perf_counter() - batch.left
        for index, (place, name, empty) in enumerate(self._keeps(batch.engine)):
            setattr(place, name, batch.kept[index] if batch.kept else empty)
        return True

    def _keeps(self, engine: Any) -> list[tuple[Any, str, Any]]:
        """What an engine with vLLM's V1 runner keeps of a batch, besides its requests: object, attribute, and its value
        before the first step."""
        running = (engine.engine_core.engine_core.scheduler, "running", [])
        if engine is self.plain:
            return [running]
        drafter = self._drafter()
        probs = [(drafter.runner, name, None) for name in ("_draft_probs", "_draft_prob_req_ids")]
        unfed = Unfed(drafter.unfed.limit, reads_states=drafter.unfed.reads_states)
        return [running, *probs, (drafter, "unfed", unfed)]

    def _set(self, drafting: Drafting) -> None:
        from accept_head.inference.adapters.vllm.build import build_host

        core, drafter = self.speculative.engine_core.engine_core, self._drafter()
        if drafting.policy is not None and drafting.host is None:
            drafter.vllm_config.additional_config = {"accept_head": {"policy": drafting.policy, "log_every": 0}}
            drafting.host = build_host(drafter.vllm_config, drafter.device, drafter.model)
        drafter.host = drafting.host
        core.scheduler.dynamic_sd_lookup = drafting.table
        if hasattr(drafter, "num_speculative_steps") and drafting.table is not None:
            # The V2 speculator drafts all its steps whatever the scheduler takes of them, which must not be more.
            drafter.num_speculative_steps = max(1, *drafting.table)
        elif hasattr(drafter, "num_speculative_steps"):
            drafter.num_speculative_steps = drafter.speculative_config.num_speculative_tokens

    def _drafter(self) -> Any:
        runner = self.speculative.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        return runner.drafter if hasattr(runner, "drafter") else runner.speculator


class Step(NamedTuple):
    """live: requests that the step decoded. tokens: that they got. arrived: whether it is the first for any of them,
    which has the prompt in it."""

    seconds: float
    live: int
    tokens: int
    arrived: bool

    def is_full(self, rows: int) -> bool:
        return self.live == rows and not self.arrived


@dataclass
class Run:
    """wall, cpu: seconds, prompts included."""

    wall: float
    cpu: float
    steps: list[Step]
    finished: list[Finished]

    @property
    def live(self) -> list[int]:
        return [step.live for step in self.steps]


class _Batch:
    """Requests of one run in an engine, at most `rows` together."""

    def __init__(
        self, engine: Any, drafting: Drafting, requests: Sequence[Request], sampling: Sampling, prefix: str, rows: int
    ):
        self.engine, self.drafting, self.sampling, self.prefix, self.rows = engine, drafting, sampling, prefix, rows
        self.waiting = deque(requests)
        self.there: dict[str, Request] = {}
        self.first: dict[str, float] = {}  # time of the first token
        self.taken: dict[str, int] = {}  # steps
        self.tokens: dict[str, int] = {}
        self.finished: list[Finished] = []
        self.kept: list[Any] = []  # of the engine, while another is at work
        self.left = 0.0  # when that one began

    def step(self) -> Step | None:
        """None: all requests are done."""
        while self.waiting and len(self.there) < self.rows:
            self._add(self.waiting.popleft())
        if not self.there:
            return None
        began, before, arrived = time.perf_counter(), sum(self.tokens.values()), False
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            name = output.request_id
            arrived |= name not in self.first
            self.first.setdefault(name, now)
            self.taken[name] += 1
            self.tokens[name] = len(output.outputs[0].token_ids)
            if output.finished:
                seconds = now - self.first[name]
                self.finished.append(_finished(self.there.pop(name), output, self.taken[name], seconds))
        return Step(now - began, len(outputs), sum(self.tokens.values()) - before, arrived)

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams

        name, sampling = f"{self.prefix}{request.index}", self.sampling
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
        parameters = SamplingParams(max_tokens=request.max_new_tokens, **options)
        self.engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, parameters)
        self.there[name], self.taken[name], self.tokens[name] = request, 0, 0


def _finished(request: Request, output: Any, steps: int, seconds: float) -> Finished:
    """seconds: from its first token, which comes with the prompt, to its last; they are of one token less."""
    ids = list(output.outputs[0].token_ids)
    said = output.outputs[0].spec_decode_metrics
    verified = sum(said.per_step_drafted) if said is not None else 0
    rounds = max(1, steps - 1)
    stats = DecodeStats(
        generated=len(ids),
        drafted=verified,
        submitted=verified,
        accepted=max(0, len(ids) - 1 - rounds),
        rounds=rounds,
        draft_forwards=verified,
        seconds=seconds * len(ids) / max(1, len(ids) - 1),
    )
    return Finished(request, ids, stats)
