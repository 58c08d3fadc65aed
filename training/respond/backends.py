"""The backends of `collect`, their options, and the choice of a responder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from accept_head.errors import InputError
from accept_head.pair import Pair
from accept_head.prompts import Prompt
from accept_head.trace.config import TraceConfig
from accept_head.training.respond.openai import ServerResponder, check_endpoint
from accept_head.training.respond.responder import Responder
from accept_head.training.respond.stored import StoredResponder, StoredResponses
from accept_head.training.respond.vllm import MISSING, VllmResponder, check_options, is_installed

Backend = Literal["loop", "vllm", "openai"]

# Options that belong to one backend. With another backend they are refused, because they would have no effect.
OPTIONS: dict[str, Backend] = {
    "draft_policy": "loop",
    "tensor_parallel_size": "vllm",
    "gpu_memory_utilization": "vllm",
    "endpoint": "openai",
    "served_name": "openai",
    "concurrency": "openai",
    "retries": "openai",
}


def check_backend(backend: Backend, given: dict[str, Any], *, dry_run: bool = False) -> None:
    """Check a backend's options before anything is loaded. Raises InputError naming the option.

    given: the options in OPTIONS, None where left out. dry_run: the engine need not be installed.
    """
    for name, value in given.items():
        if value is not None and OPTIONS[name] != backend:
            raise InputError(f"--{name} is given, but it belongs to --backend {OPTIONS[name]}, not {backend}")
    if backend == "vllm":
        check_options(given["tensor_parallel_size"], given["gpu_memory_utilization"])
        if not dry_run and not is_installed():
            raise InputError(MISSING)
    if backend == "openai":
        check_endpoint(given["endpoint"], given["concurrency"], given["retries"])


def make_responder(
    backend: Backend,
    pair: Pair,
    prompts: Sequence[Prompt],
    config: TraceConfig,
    options: dict[str, Any],
    *,
    stored: StoredResponses | None = None,
    trust_remote_code: bool = False,
) -> Responder:
    """The responder for these settings, unless our own loop answers. It starts nothing before its first shard. options:
    `given` of check_backend."""
    if stored is not None:
        return StoredResponder(stored, config)
    mine = {name: options[name] for name, owner in OPTIONS.items() if owner == backend and options[name] is not None}
    if backend == "vllm":
        longest = max(len(prompt.ids) for prompt in prompts)
        return VllmResponder(pair, config, longest=longest, trust_remote_code=trust_remote_code, **mine)
    return ServerResponder(pair, config, **mine)
