"""What forwards cost; the policies that a verdict is about, decoded on the test prompts; all others, replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from accept_head.console import Progress
from accept_head.cost import ForwardCosts
from accept_head.files import read_json, write_json
from accept_head.fit.plan import COST_PROMPTS, COST_TOKENS
from accept_head.inference.bench.kept import kept_runs
from accept_head.inference.bench.measure import Stage, Timed, make_chunks
from accept_head.inference.decode.generate import make_decoder, make_requests
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.profile.device import conditions
from accept_head.inference.profile.regression import regress_rounds
from accept_head.inference.replay.asking import replay
from accept_head.inference.replay.comparison import compare
from accept_head.inference.replay.coupled import CoupledTraces
from accept_head.inference.replay.walk import replay_fixed, replay_oracle
from accept_head.inference.tune.rules import LEARNERS
from accept_head.pair import Pair
from accept_head.prompts import Prompt, load_prompts
from accept_head.sampling import Sampling

FIXED_K = (1, 2, 3, 4, 6, 8)


def forward_costs(path: Path, pair: Pair, models: dict[str, Any], prompts: Path, sampling: Sampling) -> ForwardCosts:
    """Measured in the decode loop, one request at a time; once."""
    if not path.is_file():
        ids = [prompt.ids for prompt in load_prompts(str(prompts), pair.tokenizer, max_prompts=COST_PROMPTS)]
        costs = regress_rounds(pair, ids, sampling=sampling, max_new_tokens=COST_TOKENS).costs
        write_json(path, asdict(costs) | conditions(models["target"], models["draft"], pair, "none"))
    values = read_json(path)
    return ForwardCosts(**{name: values[name] for name in ("t_draft", "t_target", "t_autoregressive")})


def chosen_specs(tuned: Path) -> dict[str, str]:
    """Kind → SPEC, each the best of its kind on the dev traces. tuned: the file that `tune` wrote."""
    rows = read_json(tuned)["policies"]
    specs = {"none": "none"}
    for kind in ("fixed", "rule", "head"):
        specs[kind] = max((row for row in rows if _kind(row["name"]) == kind), key=lambda row: row["throughput"])[
            "spec"
        ]
    return specs


def _kind(name: str) -> str:
    family = name.partition(":")[0]
    return family if family in ("none", "fixed", "head", "oracle", "informed") else "rule"


def shown_name(spec: str, head: Path) -> str:
    return spec.replace(f"head:{head}", "head")


def decoded(
    pair: Pair, specs: Mapping[str, str], prompts: Sequence[Prompt], sampling: Sampling, max_new_tokens: int, path: Path
) -> list[Timed]:
    """Decode the prompts one at a time with each policy, in turns. Goes on where the file at `path` ends."""
    requests = make_requests([prompt.ids for prompt in prompts], max_new_tokens)
    policies = {kind: make_policy(spec, pair) for kind, spec in specs.items()}
    largest = max(policies.values(), key=lambda policy: policy.max_draft_tokens)
    decoder = make_decoder(pair.target, pair.draft, requests, largest, batch_size=1, greedy=sampling.greedy)
    stage = Stage(decoder, pair, sampling)
    chunks = make_chunks(requests, [None] * len(requests), batch=1)
    done, new = kept_runs(lambda kind, chunk: stage.time(chunk, policies[kind], 0), list(specs), chunks, path)
    every = len(specs) * len(chunks)
    return [*done, *Progress(new, "decode", total=every, initial=len(done), unit="run")]


def counts_by_kind(runs: Sequence[Timed]) -> dict[str, np.ndarray]:
    """Kind → (n, 4), in the order of the prompts."""
    rows: dict[str, dict[int, Any]] = {}
    for run in runs:
        rows.setdefault(run.arm, {}).update({done.request.index: astuple(done.stats.counts) for done in run.finished})
    return {kind: np.array([of[index] for index in sorted(of)], dtype=float) for kind, of in rows.items()}


def replayed_rows(
    traces: CoupledTraces, draft: PreTrainedModel, specs: Mapping[str, str], head: Path, costs: ForwardCosts
) -> list[dict[str, Any]]:
    """Every fixed length, what was chosen, and the oracle, in the form of summary.json."""
    everything: list[Any] = replay_fixed(traces, [0, *FIXED_K])
    known = {policy.name for policy in everything}
    for spec in specs.values():
        if spec not in known:
            learns = spec.partition(":")[0] in LEARNERS
            policy = make_policy(spec, draft)
            everything.append(replay(traces, policy, shown_name(spec, head), batch=1 if learns else None, costs=costs))
    return compare([*everything, replay_oracle(traces)], costs)
