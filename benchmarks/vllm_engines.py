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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accept_head.inference.adapters.vllm.host import PolicyHost
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

    def run(
        self,
        drafting: Drafting,
        requests: Sequence[Request],
        sampling: Sampling,
        rows: int,
        full_tokens: int | None = None,
    ) -> Run:
        """Decode requests, at most `rows` together, and time each step. full_tokens: end after so many tokens of steps
        in which `rows` requests decode; None = when all requests are done."""
        engine = self.plain if drafting.table is None and drafting.policy is None else self.speculative
        core = engine.engine_core.engine_core
        core.scheduler.max_num_active_reqs = rows
        if engine is self.speculative:
            self._set(drafting)
        metrics = drafting.host.metrics if drafting.host else None
        forwards = metrics.read()["draft_forwards"] if metrics else 0
        run = _decode(engine, requests, sampling, f"{next(self.numbers)}-", rows, full_tokens)
        if metrics:
            forwards = metrics.read()["draft_forwards"] - forwards
        elif drafting.table is not None:
            steps = getattr(self._drafter(), "num_speculative_steps", None)
            forwards = sum(steps or max(1, drafting.table[live]) for live in run.live)
        drafting.draft_forwards += forwards
        return run

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


def _decode(
    engine: Any, requests: Sequence[Request], sampling: Sampling, prefix: str, rows: int, full_tokens: int | None
) -> Run:
    from vllm import SamplingParams

    options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    by_id = {f"{prefix}{request.index}": request for request in requests}
    wall, cpu = time.perf_counter(), time.process_time()
    for name, request in by_id.items():
        parameters = SamplingParams(max_tokens=request.max_new_tokens, **options)
        engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, parameters)
    first: dict[str, float] = {}
    taken: dict[str, int] = dict.fromkeys(by_id, 0)  # steps
    tokens: dict[str, int] = dict.fromkeys(by_id, 0)
    steps, finished, last = list[Step](), list[Finished](), time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now, before, arrived = time.perf_counter(), sum(tokens.values()), False
        for output in outputs:
            name = output.request_id
            arrived |= name not in first
            first.setdefault(name, now)
            taken[name] += 1
            tokens[name] = len(output.outputs[0].token_ids)
            if output.finished:
                finished.append(_finished(by_id[name], output, taken[name], now - first[name]))
        steps.append(Step(now - last, len(outputs), sum(tokens.values()) - before, arrived))
        last = now
        full = sum(step.tokens for step in steps if step.is_full(rows))
        if full_tokens is not None and full >= full_tokens:
            engine.abort_request(list(by_id))
    return Run(time.perf_counter() - wall, time.process_time() - cpu, steps, finished)


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
