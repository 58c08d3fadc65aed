"""`accept-head bench`: policies side by side on the same prompts, or on the same arrivals of a trace, in wall clock.

Always among them: the target alone, fixed draft lengths, and the best of these a second time: how far apart two runs
of the same policy are is what any gain has to be compared with. A cell, one batch size and temperature, is kept in a
hidden file beside the output when it is finished, so that an interrupted run goes on with the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accept_head.console import make_console
from accept_head.errors import InputError
from accept_head.files import writable_file, write_json
from accept_head.inference.bench.arms import arm_names, check_all_lossless
from accept_head.inference.bench.arrivals import read_trace
from accept_head.inference.bench.cells import Job
from accept_head.inference.bench.header import header
from accept_head.inference.bench.measure import each_fills
from accept_head.inference.bench.run import Place, measured, write_plots
from accept_head.inference.costs.files import forward_costs
from accept_head.inference.decode.unfinished import Unfinished
from accept_head.inference.engine.attention.choice import Attention
from accept_head.inference.engine.cache import Compile
from accept_head.inference.policy import Verifier
from accept_head.inference.verbs.options import explained
from accept_head.pair import context_tokens, load_pair
from accept_head.prompts import load_prompts
from accept_head.sampling import Sampling

BATCHES, TEMPERATURES, FIXED_K = (1, 2, 4, 8, 16, 32), (0.0, 1.0), (1, 2, 3, 4, 6, 8)
TRACE_BATCHES = (8,)


@explained
def bench(
    target: str,
    draft: str,
    prompts: str,
    out: str,
    policy: list[str] | None = None,
    fixed: list[int] | None = None,
    field: str = "prompt",
    max_prompts: int | None = None,
    batch_size: list[int] | None = None,
    temperature: list[float] | None = None,
    top_k: int = 50,
    max_new_tokens: int = 64,
    repeats: int = 2,
    costs: str | None = None,
    slo: bool = False,
    trace: list[str] | None = None,
    trace_requests: int = 100,
    load: float = 0.8,
    seed: int = 0,
    verifier: Verifier = "ratio",
    allow_lossy: bool = False,
    dtype: str = "auto",
    compile: Compile = "none",
    attention: Attention = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Measure policies side by side: tokens a second, time per output token, rates, gain over the best fixed length.

    Prompts go in chunks; on each chunk every policy runs in turn, in an order that is drawn anew. With --trace, one
    policy after the other decodes requests that arrive as they did at a real service instead.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's tokenizer.
        prompts: JSONL file, or a data set's name.
        out: JSON file to write; plots are put beside it.
        policy: Policies to measure; `accept-head --list-policies` prints what there is. In a SPEC, slo_ms=p90 stands
            for the limit of --slo at the batch size at hand.
        fixed: Fixed draft lengths, always measured as the reference; 1, 2, 3, 4, 6 and 8 when left out.
        field: Field of a prompt record: text, or a list of chat messages.
        max_prompts: Use the first so many prompts.
        batch_size: Numbers of rows decoded together; 1, 2, 4, 8, 16 and 32 when left out, as far as there are prompts,
            and 8 with --trace.
        temperature: Sampling temperatures; 0 is greedy. 0 and 1 when left out.
        top_k: Most likely tokens kept when sampling; 0 keeps all.
        max_new_tokens: Longest response, in tokens.
        repeats: How often everything is measured; each time with new random numbers and with policies that have learnt
            nothing yet.
        costs: JSON file by `accept-head profile`: adds throughput by forward counts, the oracle's, and the gap closed.
        slo: Add the share of responses within a limit of time per output token: 0.8 to 1.2 times the 90th percentile
            of the target alone. Traces always have it.
        trace: Arrival traces to replay: CSV of Azure or BurstGPT, JSONL of Mooncake.
        trace_requests: Use so many requests of a trace.
        load: Offered load, as a share of what the target alone sustains at this batch size.
        seed: Seed of the random numbers, of the order and of the bootstrap.
        verifier: How candidates are tested when sampling: ratio, or match, under which all policies emit the same.
        allow_lossy: Let policies run whose sampled output is not distributed as the target's.
        dtype: float32, bfloat16, float16, or auto.
        compile: {compile}
        attention: {attention}
        trust_remote_code: Run model code that comes with the checkpoint.
    """
    given = dict(locals())
    path = writable_file(Path(out))
    fixed = _numbers("fixed", fixed, FIXED_K, 1, 64)
    batches = _numbers("batch_size", batch_size, TRACE_BATCHES if trace else BATCHES, 1, 4096)
    samplings = [Sampling(temperature=value, top_k=top_k) for value in dict.fromkeys(temperature or TEMPERATURES)]
    _check_positive(given)
    names = arm_names(policy or [], fixed)
    priced_at = forward_costs(Path(costs)) if costs else None
    traces = {file: read_trace(Path(file), trace_requests) for file in trace or []}
    pair = load_pair(target, draft, dtype=dtype, trust_remote_code=trust_remote_code)
    room = min(context_tokens(pair.target), context_tokens(pair.draft)) - max_new_tokens
    loaded = load_prompts(prompts, pair.tokenizer, field=field, max_prompts=max_prompts, max_prompt_tokens=max(room, 0))
    if batch_size is None:
        batches = [batch for batch in batches if traces or batch <= len(loaded)]
    elif not traces and max(batches) > len(loaded):
        raise InputError(f"batch_size is {max(batches)}, but there are {len(loaded)} prompts; each row needs one")
    job = Job(
        pair=pair,
        prompts=loaded,
        names=names,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        by_domain=each_fills(loaded, max(batches)),
        costs=priced_at,
        slo=slo,
        load=load,
        seed=seed,
        verifier=verifier,
        allow_lossy=allow_lossy,
        compile=compile,
        attention=attention,
    )
    check_all_lossless(names, pair, verifier, samplings, allow_lossy=allow_lossy)
    head = header(job, given, traces)
    wanted = [Place(file, batch, sampling) for file in traces or [None] for batch in batches for sampling in samplings]
    console = make_console(unseen_width=132)
    kept = Unfinished(path, head["settings"])
    cells = measured(job, wanted, traces, kept, console)
    result = {**head, "traces" if traces else "cells": cells}
    write_json(path, result)
    kept.forget()
    for written in [path, *write_plots(path, result)]:
        console.print(f"wrote {written}", highlight=False)


def _numbers(name: str, given: Sequence[int] | None, default: Sequence[int], low: int, high: int) -> list[int]:
    values = list(default if given is None else given)
    if not values or not all(low <= value <= high for value in values):
        raise InputError(f"{name} is {values}, expected integers from {low} to {high}")
    return sorted(set(values))


def _check_positive(given: Mapping[str, Any]) -> None:
    for name in ("max_new_tokens", "repeats", "max_prompts", "trace_requests"):
        if given[name] is not None and given[name] < 1:
            raise InputError(f"{name} is {given[name]}, expected a positive integer")
    if not 0 < given["load"] < math.inf:
        raise InputError(f"load is {given['load']}, expected a positive number")
