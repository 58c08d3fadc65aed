"""The header of a bench's file: how, where and when it was measured, and everything that its figures depend on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.files import sha256
from accept_head.inference.bench.arms import resolved
from accept_head.inference.bench.arrivals import Arrival
from accept_head.inference.bench.cells import Job
from accept_head.inference.policies.content import content_hash
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.profile.device import command_line, device_name, versions
from accept_head.prompts import prompts_fingerprint

SETTINGS = (
    *("max_new_tokens", "top_k", "repeats", "slo", "seed", "verifier", "allow_lossy"),
    *("compile", "attention", "trace_requests", "load"),
)  # parameters of the verb that are recorded unchanged


def header(job: Job, given: Mapping[str, Any], traces: Mapping[str, Sequence[Arrival]]) -> dict[str, Any]:
    """The header. given: the verb's values by parameter.

    In the result, settings: everything that a cell's figures depend on. They do not depend on the other cells.
    """
    where = {"device": device_name(job.pair.target.device), "threads": torch.get_num_threads()}
    return {
        "command": command_line(),
        "versions": versions(),
        **where,
        "date": datetime.date.today().isoformat(),
        "settings": {
            **{name: given[name] for name in SETTINGS},
            "policies": {name: content_hash(make_policy(resolved(name, 1.0), job.pair)) for name in job.names},
            "chunks": "domain" if job.by_domain else "mixed",
            "prompts": prompts_fingerprint(job.prompts),
            "costs": asdict(job.costs) if job.costs else None,
            "traces": {file: _digest(arrivals) for file, arrivals in traces.items()},
            "target": checkpoint_fingerprint(given["target"]),
            "draft": checkpoint_fingerprint(given["draft"]),
            "dtype": str(job.pair.target.dtype).removeprefix("torch."),
            "measured": {**where, "versions": versions()},
        },
    }


def _digest(arrivals: Sequence[Arrival]) -> str:
    return sha256(repr([(a.seconds, a.prompt_tokens, a.output_tokens) for a in arrivals]))
