"""Engines whose policy a test changes while they run, and our own loop as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accept_head import AcceptanceHead, Pair
from accept_head.inference import generate
from accept_head.inference.costs.host import VLLM_V1, VLLM_V2
from accept_head.inference.decode.round import Round
from accept_head.inference.policies.online.signals import prior_base


def worker_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def drafter_of(llm: Any) -> Any:
    """vLLM's proposer (V1) or speculator (V2)."""
    runner = worker_of(llm)
    return runner.drafter if hasattr(runner, "drafter") else runner.speculator


def use(llm: Any, policy: str | None) -> Any:
    """From now on this engine drafts by another SPEC; None: as vLLM does by itself. → the host."""
    from accept_head.inference.adapters.vllm.build import build_host

    drafter = drafter_of(llm)
    drafter.vllm_config.additional_config = {"accept_head": {"policy": policy}} if policy else {}
    whose = getattr(drafter, "tenant_of", None)
    runner = VLLM_V1 if whose else VLLM_V2
    drafter.host = build_host(drafter.vllm_config, drafter.device, drafter.model, whose, runner=runner)
    return drafter.host


def at_most(llm: Any, rows: int) -> None:
    """From now on so many requests are decoded together."""
    llm.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = rows


def toy_head(folder: Path, hidden: int, **config: Any) -> Path:
    """A head that was not trained but whose predictions spread around one half, saved. base: in its config; that of a
    head that learns while serving, which is q(Y)."""
    torch.manual_seed(0)
    if config.get("base"):
        of_base = prior_base()
        names = ("signals", "signal_mean", "signal_std", "reads")
        config = {"depth": 0} | {name: getattr(of_base.config, name) for name in names} | config
    head = AcceptanceHead({"hidden_size": hidden, "depth": 1, **config})
    if config.get("base"):
        head.base.load_state_dict(of_base.base.state_dict())
    if head.config.residual:
        torch.nn.init.normal_(head.output.weight, std=0.3)
        torch.nn.init.constant_(head.output.bias, 1.0)
    head.save_pretrained(folder)
    return folder


def our_rounds(
    pair: Pair, prompts: Sequence[Sequence[int]], policy: str, *, new_tokens: int, batch: int = 4
) -> list[list[tuple[int, int]]]:
    """(drafted, accepted) of each round of each response, decoded greedily by our own loop; end tokens are ignored."""
    rounds: list[list[tuple[int, int]]] = [[] for _ in prompts]

    def watch(done: Round) -> None:
        for row in done.rows.live_rows:
            request = done.rows.requests[row]
            assert request is not None
            rounds[request.index].append((int(done.outcome.drafted[row]), int(done.outcome.accepted[row])))

    options: dict[str, Any] = {"max_new_tokens": new_tokens, "batch_size": batch, "end_token_ids": []}
    generate(pair.target, pair.draft, [list(prompt) for prompt in prompts], policy=policy, watch=watch, **options)
    return rounds
